"""What `Fallback` saves where drafting does not pay, and what it costs where it does: tokens per second, four arms by turns.

    python benchmarks/fallback.py                                                  # the demo's draft, and one that never agrees
    python benchmarks/fallback.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 3 --max-new-tokens 64

A draft that never agrees is the draft model with its logits negated: its favourite is the target's last choice. Every text runs to its full
length (end tokens are off), greedy, batch size 1; arms rotate at each prompt, ratios are medians over the repeats after one that is not counted.
"""

import copy
import statistics
import time
from typing import Any

import torch
from huggingface_hub.utils import disable_progress_bars
from pairs import machine, opened, options, record, synchronize
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
    parser = options(__doc__, problems=4)
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()
    disable_progress_bars()

    target, draft, tokenizer, prompts, _ = opened(args)
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
    record(args, machine(args.device), results=rows)


if __name__ == "__main__":
    main()
