"""Measure speculation along long texts: each arm's speed relative to the target alone within windows of the text's length.

    python benchmarks/long_texts.py --model SmolLM2-135M --prompts questions.jsonl --problems 4 --exit 12     # drafts by its first 12 layers
    python benchmarks/long_texts.py --model M --assistant D --prompts questions.jsonl --problems 4 --tokens 1024

Source of the claim: SVIP's paper (huggingface.co/papers/2411.18462), whose gain grows with the text. Arms: the target alone, `strict γ`, `heuristic`
(Transformers' schedule) and `svip`; sampling at --temperature, or greedily at 0. All arms take turns at each prompt, every text has `--tokens` new
tokens, and one prompt is a repeat. Ratios are medians over the prompts, with the lowest and highest. "accepted": of drafted tokens, over the whole text.
"""

import statistics
from typing import Any

import torch
from pairs import machine, options, record  # which adds examples/reproduce to the path


# isort: split
from along_texts import measure_along
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.tasks.prompts import read_prompts


def main() -> None:
    parser = options(__doc__, problems=4)
    parser.add_argument(
        "--exit", type=int, help="draft by the target's first layers, so many, in place of --assistant"
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
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
