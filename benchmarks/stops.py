"""Every draft stop beside the others under strict acceptance: how much they draft, how much of it is accepted, and how fast that is.

    python benchmarks/stops.py                                     # the demo pair and its heads, batch 1
    python benchmarks/stops.py --batch-sizes 1 8 32 --repeats 3
    python benchmarks/stops.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 8 [--head specdec_head]

Greedy, all arms interleaved in one run as in benchmarks/engine.py: medians over the repeats, ratios the medians of the ratios within a
repeat. Tokens per target call are of each row's own rounds. MovingAverage is given what a draft step and a target forward took in a first round
of constant drafts of this very run (a forward of some tokens more counts as free).
"""

import argparse
import statistics
from typing import Any

from engine import Arm, one_repeat, ratio, warm_up
from pairs import machine, opened, options, record
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.stats.report import SpeculationStats


BASE = "constant 5"


def stops_for(head: hla.Head | None, step: float, fixed: float, thresholds: list[float]) -> dict[str, hla.DraftStop]:
    """The arms by name, with their sources' settings unless said otherwise."""
    stops: dict[str, hla.DraftStop] = {
        BASE: hla.Constant(5),
        "constant 10": hla.Constant(10),
        "heuristic": hla.Heuristic(),
        "confidence 0.4": hla.Confidence(),
        "disco": hla.DISCO(),
        "svip": hla.SVIP(),
        "adaedl": hla.AdaEDL(),
        "moving average": hla.MovingAverage(step=step, fixed=fixed, max_draft=20),
    }
    if head is not None:
        stops |= {f"specdec++ {h:g}": hla.SpecDecPP(head, h) for h in thresholds}
    return stops


def costs(
    target: Any, draft: Any, tokenizer: Any, prompts: list[str], args: argparse.Namespace
) -> tuple[float, float]:
    """Seconds of a draft step and of a target forward at the first batch size."""
    inputs = tokenizer(prompts[: args.batch_sizes[0]], return_tensors="pt", padding=True).to(args.device)
    inputs.pop("token_type_ids", None)
    stats = target.generate(
        **inputs, assistant_model=draft, lossy_policy=hla.Constant(5), max_new_tokens=args.max_new_tokens, do_sample=False,
        return_dict_in_generate=True,
    ).speculation  # fmt: skip
    return tuple(stats.seconds[part] / stats.forwards[part] for part in ("draft", "target"))


def report(arms: list[Arm]) -> list[dict[str, Any]]:
    """One row for each arm; texts and counts of the last repeat (greedy: they are the same in all)."""
    rows = []
    for arm in arms:
        own, base = (next(a for a in arms if a.batch_size == arm.batch_size and a.name == n) for n in ("target", BASE))
        row: dict[str, Any] = {
            "arm": arm.name,
            "batch_size": arm.batch_size,
            "tokens_per_second": round(statistics.median(arm.speeds), 1),
            "of_constant": ratio(arm, base),
            "of_target": ratio(arm, own),
            "equal_texts": statistics.mean(t == w for t, w in zip(arm.texts, own.texts, strict=True)),
        }
        if arm.calls:
            stats = SpeculationStats.merge(arm.calls)
            total = stats.total()
            row |= {
                "tokens_per_target_call": total.num_new_tokens / total.num_spec_steps,
                "drafted": total.num_draft_tokens / total.num_spec_steps,
                "acceptance_rate": stats.draft_acceptance_rate,
            }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("batch", "arm", "tok/s", f"× {BASE}", "× target", "drafted a round", "accepted", "tokens / target call", "equal texts")  # fmt: skip
    for r in rows:
        own = ["", "", "1.00"]
        if "drafted" in r:
            own = [f"{r['drafted']:.2f}", f"{r['acceptance_rate']:.1%}", f"{r['tokens_per_target_call']:.2f}"]
        table.add_row(
            str(r["batch_size"]), r["arm"], f"{r['tokens_per_second']:.0f}", f"{r['of_constant']:.2f}", f"{r['of_target']:.2f}",
            *own, f"{r['equal_texts']:.1%}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--head", help="a SpecDec++ head's folder or Hub repository; default the demo's")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9], help="of SpecDec++")
    args = parser.parse_args()

    target, draft, tokenizer, prompts, ends = opened(args)
    head = hla.Head.from_pretrained(args.head) if args.head else None
    if args.model is None and head is None:
        head = hla.demo.head("specdec")
    step, fixed = costs(target, draft, tokenizer, prompts, args)

    def ours(stop: hla.DraftStop) -> Any:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=stop, **kwargs)

    arms = []
    for size in args.batch_sizes:
        arms.append(Arm("target", size, lambda **kwargs: type(target).generate(target, **kwargs)))
        arms += [Arm(name, size, ours(stop)) for name, stop in stops_for(head, step, fixed, args.threshold).items()]
    warm = argparse.Namespace(**(vars(args) | {"max_new_tokens": 8}))
    warm_up(arms, tokenizer, prompts[: max(args.batch_sizes)], warm, ends)
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)
    rows, console = report(arms), Console()
    show(rows, console)
    console.print(f"{machine(args.device)}; a draft step {step * 1e3:.2f} ms, a target forward {fixed * 1e3:.2f} ms")
    record(args, machine(args.device), results=rows)


if __name__ == "__main__":
    main()
