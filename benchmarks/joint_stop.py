"""The joint stop beside every constant draft length and the stops that end each row's draft for itself, in batches.

    python benchmarks/joint_stop.py                                  # the demo pair, batches of 1, 8 and 32
    python benchmarks/joint_stop.py --gammas 2 4 6 --batch-sizes 8 --repeats 7
    python benchmarks/joint_stop.py --model M --assistant D --prompts gsm8k.jsonl --chat --problems 32

Greedy, strict acceptance, all arms interleaved in one run as in benchmarks/engine.py, after a warm-up in which every arm does every prompt
once: the joint stop measures what rounds cost, and goes on with what it has learnt of the pair. Medians over the repeats; ratios are
the medians of the ratios within a repeat. "Best" is the fastest other arm of the batch size, chosen after the fact: nobody knows it before.
"""

import statistics
from typing import Any

from engine import Arm, one_repeat, ratio, warm_up
from pairs import machine, opened, options, record
from rich.console import Console
from rich.table import Table

import hf_lossy_assist as hla
from hf_lossy_assist.stats.report import SpeculationStats


JOINT = "joint_goodput"


def stops_for(gammas: list[int]) -> dict[str, hla.DraftStop]:
    """The arms by name, with their sources' settings."""
    constants: dict[str, hla.DraftStop] = {f"constant {gamma}": hla.Constant(gamma) for gamma in gammas}
    return constants | {"svip": hla.SVIP(), "disco": hla.DISCO(), "adaedl": hla.AdaEDL(), JOINT: hla.JointGoodput()}


def report(arms: list[Arm]) -> list[dict[str, Any]]:
    """One row for each arm; texts and counts of the last repeat."""
    rows = []
    for arm in arms:
        same = [other for other in arms if other.batch_size == arm.batch_size]
        target = same[0]
        best = max((other for other in same if other.name != JOINT), key=lambda other: statistics.median(other.speeds))
        row: dict[str, Any] = {
            "arm": arm.name,
            "batch_size": arm.batch_size,
            "tokens_per_second": round(statistics.median(arm.speeds), 1),
            "lowest": round(min(arm.speeds), 1),
            "highest": round(max(arm.speeds), 1),
            "best": best.name,
            "of_best": ratio(arm, best),
            "of_target": ratio(arm, target),
            "equal_texts": statistics.mean(t == w for t, w in zip(arm.texts, target.texts, strict=True)),
        }
        if arm.calls:
            total = SpeculationStats.merge(arm.calls).total()
            row |= {
                "drafted": total.num_draft_tokens / total.num_spec_steps,
                "tokens_per_target_call": total.num_new_tokens / total.num_spec_steps,
            }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("batch", "arm", "tok/s", "range", "× best other", "× target", "drafted a round", "tokens / target call", "equal texts")  # fmt: skip
    for r in rows:
        own = [f"{r['drafted']:.2f}", f"{r['tokens_per_target_call']:.2f}"] if "drafted" in r else ["", "1.00"]
        name = f"{r['arm']} (best)" if r["arm"] == r["best"] else r["arm"]
        table.add_row(
            str(r["batch_size"]), name, f"{r['tokens_per_second']:.0f}", f"{r['lowest']:.0f}–{r['highest']:.0f}",
            f"{r['of_best']:.3f}", f"{r['of_target']:.2f}", *own, f"{r['equal_texts']:.1%}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--gammas", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8, 10, 12])
    args = parser.parse_args()

    target, draft, tokenizer, prompts, ends = opened(args)

    def ours(stop: hla.DraftStop) -> Any:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=stop, **kwargs)

    arms = []
    for size in args.batch_sizes:
        arms.append(Arm("target", size, lambda **kwargs: type(target).generate(target, **kwargs)))
        arms += [Arm(name, size, ours(stop)) for name, stop in stops_for(args.gammas).items()]
    warm_up(arms, tokenizer, prompts, args, ends)
    for _ in range(args.repeats):
        one_repeat(arms, tokenizer, prompts, args, ends)
    rows, console = report(arms), Console(width=130)
    show(rows, console)
    console.print(machine(args.device))
    record(args, machine(args.device), results=rows)


if __name__ == "__main__":
    main()
