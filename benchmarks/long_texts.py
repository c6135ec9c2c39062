"""Measure speculation along long texts: each arm's speed relative to the target alone within windows of the text's length.

    python benchmarks/long_texts.py --model SmolLM2-135M --prompts questions.jsonl --problems 4 --exit 12     # drafts by its first 12 layers
    python benchmarks/long_texts.py --model M --assistant D --prompts questions.jsonl --problems 4 --tokens 1024
    python benchmarks/long_texts.py --model D --prompts questions.jsonl --lengths 1024 4096 8000 --window 1024      # a draft step alone

Source of the claim: SVIP's paper (huggingface.co/papers/2411.18462), whose gain grows with the text. Arms: the target alone, `strict γ`, `heuristic`
(Transformers' schedule) and `svip`; sampling at --temperature, or greedily at 0. All arms take turns at each prompt, every text has `--tokens` new
tokens, and one prompt is a repeat. Ratios are medians over the prompts, with the lowest and highest. "accepted": of drafted tokens, over the whole text.

With `--lengths`: the model drafts for itself after so many tokens of the prompts, with a window (`draft_window=`) and without. CPU seconds of a draft step
(`time.process_time`, one thread, median of 32), slots of the cache that it reads, and how many of the model's 32 greedy tokens without a window it predicts.
"""

import statistics
import time
from typing import Any

import torch
from along_texts import measure_along  # of examples/reproduce, whose folder `pairs` adds
from pairs import machine, options, record
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.models.row_model import RowModel
from hf_lossy_assist.models.windowed_model import DraftWindow, WindowedRowModel
from hf_lossy_assist.tasks.prompts import read_prompts


@torch.inference_mode()
def measure_steps(args: Any, steps: int = 32) -> None:
    """Print, for each of `args.lengths`, what a draft step costs and predicts, with and without a window."""
    torch.set_num_threads(1)
    draft = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    text = AutoTokenizer.from_pretrained(args.model)("\n\n".join(read_prompts(args.prompts)))["input_ids"]
    limit, ids = max(args.lengths) + steps, torch.tensor([text[: max(args.lengths)]])
    if len(text) < max(args.lengths):
        raise SystemExit(f"the prompts have {len(text)} tokens together, and --lengths asks for {max(args.lengths)}")
    wanted: dict[int, list[int]] = {length: [] for length in sorted(args.lengths)}  # greedy tokens without a window
    windowed = WindowedRowModel(draft, 1, limit, window=DraftWindow(args.window))
    for name, cached in (("whole text", RowModel(draft, 1, limit)), (f"window {args.window}", windowed)):
        for length, tokens in wanted.items():
            while cached.lengths[0] < length - 1:
                part = ids[:, cached.lengths[0] : min(cached.lengths[0] + 256, length - 1)]
                cached.feed(part, [part.shape[1]], keep=0)
            token, seconds, right = int(ids[0, length - 1]), list[float](), 0
            for step in range(steps):
                began = time.process_time()
                best = int(cached.feed(torch.tensor([[token]]), [1])[0, -1].argmax())
                seconds.append(time.process_time() - began)
                if cached is not windowed:
                    tokens.append(best)
                token, right = tokens[step], right + (best == tokens[step])
            cost, slots = f"{statistics.median(seconds) * 1e3:.1f} ms of CPU", cached.cache.visible
            print(f"{name}, after {length} tokens: {cost}, {slots} slots, {right} of {steps} right", flush=True)
            cached.rollback([length - 1])


def main() -> None:
    parser = options(__doc__, problems=4)
    parser.add_argument(
        "--exit", type=int, help="draft by the target's first layers, so many, in place of --assistant"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="+", help="measure a draft step after so many tokens instead")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.lengths and args.model and args.prompts:
        return measure_steps(args)
    if args.model is None or args.prompts is None or (args.assistant is None) == (args.exit is None):
        parser.error("needs --model, --prompts and one of --assistant and --exit")
    target = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    draft = (
        hla.early_exit(target, args.exit)
        if args.assistant is None
        else AutoModelForCausalLM.from_pretrained(args.assistant, dtype=target.dtype).to(args.device).eval()
    )
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    hla.enable(target)
    windows = [size for size in (256, 512, 1024, 2048, 4096, 8192) if size <= args.tokens]
    with_draft: dict[str, dict[str, Any]] = {
        f"strict {args.gamma}": {"lossy_policy": "strict", "num_assistant_tokens": args.gamma},
        "heuristic": {"lossy_policy": {"stop": "heuristic"}},
        "svip": {"lossy_policy": "svip"},
    }
    alone: dict[str, dict[str, Any]] = {"target": {}}
    arms = alone | {name: how | {"assistant_model": draft} for name, how in with_draft.items()}
    sizes = [end - start for start, end in zip([0, *windows], windows, strict=False)]
    speeds: dict[str, list[list[float]]] = {name: [] for name in arms}
    accepted: dict[str, list[float]] = {name: [] for name in arms}

    def tell(name: str, number: int, seconds: list[float], out: Any) -> None:
        speeds[name].append([size / each for size, each in zip(sizes, seconds, strict=True)])
        if name != "target":
            accepted[name].append(out.speculation.draft_acceptance_rate)
        print(f"prompt {number}, {name}: {[round(speed, 1) for speed in speeds[name][-1]]} tokens/s", flush=True)

    prompts = read_prompts(args.prompts, args.problems)
    inputs = [tokenizer(text, return_tensors="pt").to(args.device) for text in prompts]
    measure_along(target, inputs, windows, arms, args.seed, tell, temperature=args.temperature)

    titles = [f"{start}–{end}" for start, end in zip([0, *windows], windows, strict=False)]
    table = Table("arm", *titles, "accepted", title=f"{machine(args.device)}: × the target alone")
    rows = []
    for name in arms:
        ratios = [
            [ours[w] / alone[w] for ours, alone in zip(speeds[name], speeds["target"], strict=True)]
            for w in range(len(titles))
        ]
        cells = [f"{statistics.median(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in ratios]
        rate = statistics.fmean(accepted[name]) if accepted[name] else None
        table.add_row(name, *cells, "" if rate is None else f"{rate:.1%}")
        rows.append({"arm": name, "windows": windows, "speeds": speeds[name], "accepted": rate})
    Console(width=140).print(table)
    record(args, machine(args.device), arms=rows)


if __name__ == "__main__":
    main()
