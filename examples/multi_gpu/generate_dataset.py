"""Answer a file of prompts in several processes, one per GPU or CPU core.

    torchrun --nproc-per-node 2 examples/multi_gpu/generate_dataset.py --out answers.jsonl
    accelerate launch --num_processes 8 examples/multi_gpu/generate_dataset.py --model M --assistant D --prompts questions.jsonl --out answers.jsonl

Each process runs `--rows` sequences at once and appends every finished one to a file of its own. The same command continues an
interrupted run, with any number of processes. In the end the first process merges the files, in the order of the prompts.
"""

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.tasks.prompts import read_prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: a path or Hub id (default: the demo pair and its problems)")
    parser.add_argument("--assistant", help="draft: a path or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `prompt`")
    parser.add_argument("--policy", default="svip")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--limit", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    state = PartialState(
        cpu=not torch.accelerator.is_available(), timeout=timedelta(days=30)
    )  # one may be done long before another
    target, draft, tokenizer, prompts = opened(args, state.device)
    part = args.out.with_name(f"{args.out.name}.{state.process_index}.part")
    if state.is_main_process:
        for file in find_parts(args.out):
            drop_torn_line(file)
    state.wait_for_everyone()
    done = {answer["index"] for answer in read_parts(args.out)}
    state.wait_for_everyone()  # nobody writes before all have read
    share = [n for n in range(state.process_index, len(prompts), state.num_processes) if n not in done]
    with part.open("a", encoding="utf-8") as answers_file:
        for result in hla.generate_many(
            target, (prompts[n] for n in share), numbers=share, assistant_model=draft, lossy_policy=args.policy,
            tokenizer=tokenizer, max_rows=args.rows, max_new_tokens=args.max_new_tokens, seed=0,
        ):  # fmt: skip
            answer = {"index": result.index, "prompt": prompts[result.index], "text": result.text}
            answers_file.write(json.dumps(answer, ensure_ascii=False) + "\n")
            answers_file.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        answers = sorted(read_parts(args.out), key=lambda answer: answer["index"])
        args.out.write_text("".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers))
        for file in find_parts(args.out):
            file.unlink()
        print(f"{args.out}: {len(answers)} answers, written by {state.num_processes} processes")


def opened(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any, Any, list[str]]:
    """Return the models on this process's device, and all prompts."""
    if args.model is None:
        demo = hla.demo.load(device=device)
        return (
            demo.target,
            demo.draft,
            demo.tokenizer,
            [problem.prompt for problem in hla.demo.problems(args.limit, seed=0)],
        )
    dtype = getattr(torch, args.dtype)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval()
        for name in (args.model, args.assistant)
    )
    return target, draft, AutoTokenizer.from_pretrained(args.model), read_prompts(args.prompts, args.limit)


def find_parts(out: Path) -> list[Path]:
    return sorted(out.parent.glob(f"{out.name}.*.part"))


def read_parts(out: Path) -> list[dict[str, Any]]:
    """Return the finished answers."""
    return [json.loads(line) for file in find_parts(out) for line in file.open(encoding="utf-8")]


def drop_torn_line(part: Path) -> None:
    """Remove a last line that a killed process left incomplete."""
    data = part.read_bytes()
    part.write_bytes(data[: data.rfind(b"\n") + 1])


if __name__ == "__main__":
    main()
