"""Tokens per second of this engine beside Transformers' own, all arms interleaved in one run.

    python benchmarks/engine.py                                              # the demo pair, CPU
    python benchmarks/engine.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 8 --max-new-tokens 64
    python benchmarks/engine.py --device cuda --dtype bfloat16 --json out.json

Arms at batch 1: `target` (Transformers' generate alone), `assisted γ` (Transformers' assisted generation with
num_assistant_tokens=γ, schedule "constant", confidence threshold 0), `assisted default` (the same with Transformers' defaults:
20 tokens, threshold 0.4, refitted every round where scikit-learn is installed), `strict γ` and `svip` (ours). Then `target`,
`strict γ` and `svip` in batches. Every arm does all prompts once per repeat, in an order that rotates from repeat to repeat,
after one warm-up; the figure is the median. Greedy; a row counts its tokens up to and with its end token.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.prompts import read_prompts
from hf_lossy_assist.stats import SpeculationStats


def load(args: argparse.Namespace) -> tuple[Any, Any, Any, list[str]]:
    dtype = getattr(torch, args.dtype)
    if args.model is None:
        models = hla.demo.load(dtype, args.device)
        return (
            models.target,
            models.draft,
            models.tokenizer,
            [p.prompt for p in hla.demo.problems(args.problems, args.seed)],
        )
    target, draft = (
        AutoModelForCausalLM.from_pretrained(m, dtype=dtype).to(args.device).eval()
        for m in (args.model, args.assistant)
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    if args.prompts is None:
        raise SystemExit("--model needs --prompts FILE.jsonl")
    prompts = read_prompts(args.prompts, args.problems)
    if args.chat:
        prompts = [
            tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
            for p in prompts
        ]
    return target, draft, tokenizer, prompts


class Arm:
    """One way to continue all prompts. `run` returns tokens, seconds, texts and, for ours, statistics."""

    def __init__(self, name: str, batch_size: int, generate: Callable[..., Any]):
        self.name, self.batch_size, self.generate = name, batch_size, generate
        self.speeds: list[float] = []
        self.stats: SpeculationStats | None = None
        self.texts: list[tuple[int, ...]] = []

    def run(self, tokenizer: Any, prompts: list[str], args: argparse.Namespace, ends: set[int]) -> float:
        self.texts, calls, tokens, seconds = [], [], 0, 0.0
        for i in range(0, len(prompts), self.batch_size):
            inputs = tokenizer(prompts[i : i + self.batch_size], return_tensors="pt", padding=True).to(args.device)
            inputs.pop("token_type_ids", None)
            synchronize(args.device)
            began = time.perf_counter()
            out = self.generate(
                **inputs, max_new_tokens=args.max_new_tokens, do_sample=False, return_dict_in_generate=True
            )
            synchronize(args.device)
            seconds += time.perf_counter() - began
            calls.append(getattr(out, "speculation", None))
            for row in out.sequences[:, inputs["input_ids"].shape[1] :].tolist():
                end = next((j + 1 for j, token in enumerate(row) if token in ends), len(row))
                self.texts.append(tuple(row[:end]))
                tokens += end
        self.stats = SpeculationStats.merge([c for c in calls if c]) if calls[0] else None
        return tokens / seconds


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def arms_for(target: Any, draft: Any, args: argparse.Namespace) -> list[Arm]:
    gamma, plain = args.gamma, type(target).generate
    given = draft.generation_config

    def assisted(settings: dict[str, Any]) -> Callable[..., Any]:
        def generate(**kwargs: Any) -> Any:
            # A fresh config each call: Transformers' schedule and threshold write back into it.
            draft.generation_config = GenerationConfig(**(given.to_diff_dict() | settings))
            try:
                return plain(target, assistant_model=draft, **kwargs)
            finally:
                draft.generation_config = given

        return generate

    def ours(policy: str, **settings: Any) -> Callable[..., Any]:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **settings, **kwargs)

    def alone(**kwargs: Any) -> Any:
        return plain(target, **kwargs)

    fixed = {
        "num_assistant_tokens": gamma,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }
    arms = [
        Arm("target", 1, alone),
        Arm(f"assisted γ={gamma}", 1, assisted(fixed)),
        Arm("assisted default", 1, assisted({})),
        Arm(f"strict γ={gamma}", 1, ours("strict", num_assistant_tokens=gamma)),
        Arm("svip", 1, ours("svip")),
    ]
    for size in args.batch_sizes:
        if size > 1:
            arms.append(Arm("target", size, alone))
            arms.append(Arm(f"strict γ={gamma}", size, ours("strict", num_assistant_tokens=gamma)))
            arms.append(Arm("svip", size, ours("svip")))
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="target: a path or Hub id; default the demo pair")
    parser.add_argument("--assistant", help="draft: a path or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines (needed with --model)")
    parser.add_argument("--chat", action="store_true", help="put prompts through the chat template")
    parser.add_argument("--problems", type=int, default=32, help="how many prompts (default 32)")
    parser.add_argument("--seed", type=int, default=777, help="of the demo problems")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=5, help="the figure is the median of these (default 5)")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 4, 8, 16, 32])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    args = parser.parse_args()

    target, draft, tokenizer, prompts = load(args)
    hla.enable(target)
    ends = target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    arms = arms_for(target, draft, args)
    for arm in arms:  # warm-up
        arm.run(tokenizer, prompts[: max(arm.batch_size, 2)], args, ends)
    for repeat in range(args.repeats):
        shift = repeat % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            arm.speeds.append(arm.run(tokenizer, prompts, args, ends))

    reference = arms[0]
    where = (
        torch.cuda.get_device_name()
        if args.device.startswith("cuda")
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    rows = []
    for arm in arms:
        speed, stats = statistics.median(arm.speeds), arm.stats
        rows.append(
            {
                "arm": arm.name,
                "batch_size": arm.batch_size,
                "tokens_per_second": round(speed, 1),
                "lowest": round(min(arm.speeds), 1),
                "highest": round(max(arm.speeds), 1),
                "over_target_alone": round(speed / statistics.median(reference.speeds), 3),
                "texts_equal_to_target": sum(a == b for a, b in zip(arm.texts, reference.texts, strict=True))
                / len(prompts),
                "mean_acceptance_length": round(stats.mean_acceptance_length, 3) if stats else None,
                "draft_acceptance_rate": round(stats.draft_acceptance_rate, 4) if stats else None,
                "forwards": stats.forwards if stats else None,
            }
        )
    table = Table(
        "arm", "batch", "tokens/s", "range", "× target", "equal", "accepted/round", "acceptance", title=where
    )
    for r in rows:
        acceptance = "" if r["draft_acceptance_rate"] is None else f"{r['draft_acceptance_rate']:.1%}"
        table.add_row(
            str(r["arm"]), str(r["batch_size"]), str(r["tokens_per_second"]), f"{r['lowest']}–{r['highest']}",
            str(r["over_target_alone"]), f"{r['texts_equal_to_target']:.0%}", str(r["mean_acceptance_length"] or ""), acceptance,
        )  # fmt: skip
    Console(width=120).print(table)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "hf_lossy_assist": hla.__version__,
        }
        args.json.write_text(
            json.dumps({"where": where, "settings": settings, "versions": versions, "arms": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
