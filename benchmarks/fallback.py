"""What `Fallback` saves where drafting does not pay, and what it costs where it does: tokens per second, four arms by turns.

    python benchmarks/fallback.py                                                  # the demo's draft, and one that never agrees
    python benchmarks/fallback.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 3 --max-new-tokens 64

A draft that never agrees is the draft model with its logits negated: its favourite is the target's last choice. Every text runs to its full
length (end tokens are off), greedy, batch size 1; arms rotate at each prompt, ratios are medians over the repeats after one that is not counted.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from engine import load, machine, synchronize
from huggingface_hub.utils import disable_progress_bars
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla


def never(draft: Any) -> Any:
    """A draft that likes best what this one likes least; it costs the same."""
    head = draft.get_output_embeddings()
    out = copy.deepcopy(draft)
    other = torch.nn.Linear(
        head.in_features,
        head.out_features,
        bias=head.bias is not None,
        dtype=head.weight.dtype,
        device=head.weight.device,
    )
    with torch.no_grad():
        other.weight.copy_(-head.weight)
        if head.bias is not None:
            other.bias.copy_(-head.bias)
    out.config.tie_word_embeddings = False
    out.set_output_embeddings(other)
    return out.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded demo pair")
    parser.add_argument("--assistant")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--problems", type=int, default=4)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bars()

    target, draft, tokenizer, prompts = load(args)
    hla.enable(target)
    bad, constant = never(draft), hla.LossyPolicy(stop=hla.Constant(args.gamma))
    arms: dict[str, dict[str, Any]] = {
        "target alone": {},
        "never agrees": {"assistant_model": bad, "lossy_policy": constant},
        "never agrees, fallback": {"assistant_model": bad, "lossy_policy": constant.with_fallback()},
        "draft": {"assistant_model": draft, "lossy_policy": constant},
        "draft, fallback": {"assistant_model": draft, "lossy_policy": constant.with_fallback()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    plain: dict[str, int] = {}
    settings = {"max_new_tokens": args.max_new_tokens, "min_new_tokens": args.max_new_tokens, "do_sample": False}
    for repeat in range(args.repeats + 1):
        spent = dict.fromkeys(arms, 0.0)
        for turn, prompt in enumerate(prompts):
            inputs = tokenizer(prompt, return_tensors="pt").to(args.device)
            inputs.pop("token_type_ids", None)
            names = list(arms)
            shift = (repeat + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                synchronize(args.device)
                began = time.perf_counter()
                out = target.generate(**inputs, **settings, **arms[name], return_dict_in_generate=True)
                synchronize(args.device)
                spent[name] += time.perf_counter() - began
                if getattr(out, "speculation", None):
                    plain[name] = out.speculation.total().num_plain_steps
        if repeat:
            for name, value in spent.items():
                seconds[name].append(value)

    def ratio(name: str, other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True)), 3)

    tokens = len(prompts) * args.max_new_tokens
    table = Table("arm", "tok/s", "× target alone", "× without fallback", "rounds without drafts, last text")
    rows = []
    for name in arms:
        base = name.removesuffix(", fallback")
        rows.append({"arm": name, "tokens_per_second": round(tokens / statistics.median(seconds[name]), 1), "of_target": ratio(name, "target alone"),
                     "of_without": ratio(name, base) if base != name else None, "plain": plain.get(name)})  # fmt: skip
        r = rows[-1]
        table.add_row(
            name,
            f"{r['tokens_per_second']:.1f}",
            f"{r['of_target']:.3f}",
            "" if r["of_without"] is None else f"{r['of_without']:.3f}",
            str(r["plain"] or ""),
        )
    console = Console(width=120)
    console.print(table)
    console.print(machine(args.device))
    if args.json:
        args.json.write_text(json.dumps({"where": machine(args.device), "settings": {k: str(v) for k, v in vars(args).items()}, "results": rows}, indent=1, ensure_ascii=False) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
