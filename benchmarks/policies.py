"""Measure every acceptance rule at three settings on the demo: right answers, tokens per target call, lossy tokens, speed. Writes docs/policies.md.

    python benchmarks/policies.py --out docs                       # 300 problems; writes policies.md, policies.png and policies.json

All arms have the same draft length and take turns at each batch of problems, in an order that rotates. Speed is the median over the
batches of tokens per second against strict acceptance on the same batch, after a batch that is not counted. Rules for greedy
decoding run greedily, the others sample at temperature 1, each group with its own strict arm. SPRINTER drafts until its head rejects.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from pairs import machine
from rich.console import Console
from rich.table import Table
from rule_arms import GREEDY, SAMPLING, STRICT, Arm, arms_for

import hf_lossy_assist as hla
from hf_lossy_assist.registry import list_entries
from hf_lossy_assist.stats.speculation import SpeculationStats
from hf_lossy_assist.tasks.load import AnswerTask, Problem, load_task


def measured(models: Any, problems: Sequence[Problem], args: argparse.Namespace) -> list[Arm]:
    arms = arms_for(args)
    batches = [problems[i : i + args.batch_size] for i in range(0, len(problems), args.batch_size)]
    for turn, batch in enumerate([batches[0], *batches]):  # the first one warms up
        if turn == 1:
            for arm in arms:
                arm.seconds, arm.tokens, arm.texts, arm.calls = [], [], [], []
        inputs = models.tokenizer([p.prompt for p in batch], return_tensors="pt", padding=True).to(args.device)
        inputs.pop("token_type_ids", None)
        for mode in (GREEDY, SAMPLING):
            same = [arm for arm in arms if arm.mode == mode]
            shift = turn * (len(same) // 5 + 1) % len(same)
            for arm in same[shift:] + same[:shift]:
                arm.run(models, inputs, args)
        print(f"batch {turn} of {len(batches)}", file=sys.stderr)
    return arms


def figures(models: Any, task: AnswerTask, problems: Sequence[Problem], arms: list[Arm]) -> list[dict[str, Any]]:
    rows = []
    for arm in arms:
        strict = next(a for a in arms if a.mode == arm.mode and a.rule == STRICT)
        texts = [models.tokenizer.decode(text, skip_special_tokens=True) for text in arm.texts]
        right = [task.right(p, task.extract(p, t)) is True for p, t in zip(problems, texts, strict=True)]
        total = SpeculationStats.merge(arm.calls).total()
        rows.append({
            "rule": arm.rule, "setting": arm.setting, "mode": arm.mode, "right": statistics.mean(right),
            "tokens_per_target_call": total.num_new_tokens / total.num_spec_steps,
            "lossy": total.num_lossy_accepts / total.num_new_tokens,
            "unchecked": total.num_unchecked_tokens / total.num_new_tokens,
            "of_strict": statistics.median(a / b for a, b in zip(arm.speeds, strict.speeds, strict=True)),
            "tokens_per_second": statistics.median(arm.speeds),
        })  # fmt: skip
    for row in rows:
        row["front"] = row["rule"] != "synthetic_for_benchmarks" and not any(dominates(other, row) for other in rows)
    return rows


def dominates(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether `one` is nowhere worse than `other` and somewhere better, in the same kind of decoding."""
    keys = ("right", "tokens_per_target_call")
    worse = any(one[k] < other[k] for k in keys)
    return (
        one["mode"] == other["mode"]
        and one["rule"] != "synthetic_for_benchmarks"
        and not worse
        and any(one[k] > other[k] for k in keys)
    )


def share(row: dict[str, Any]) -> str:
    """Return the share of lossy tokens, or of unchecked ones if there are any."""
    return f"{row['unchecked']:.1%} unchecked" if row["unchecked"] else f"{row['lossy']:.1%}"


def equals_strict(row: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    """Return whether a greedy row has strict acceptance's outputs, in as many rounds."""
    strict = next(r for r in rows if r["mode"] == GREEDY and r["rule"] == STRICT)
    same = row["tokens_per_target_call"] == strict["tokens_per_target_call"]
    return row["mode"] == GREEDY and row is not strict and not row["lossy"] and same


def markdown(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    lossless = [f"`{e.name}`" for e in list_entries("rule") if e.guarantee == "lossless"]
    same = [r for r in rows if equals_strict(r, rows)]
    speeds = [r["of_strict"] for r in same]
    noise = (
        f" Their speeds range from {min(speeds):.2f} to {max(speeds):.2f}: the cost of the rule and noise."
        if same
        else ""
    )
    lines = [
        "# Rules side by side", "",
        f"`python benchmarks/policies.py --out docs` on {machine(args.device)}: the demo pair, {args.problems} problems that no head was trained on,",
        f"γ = {args.gamma}, batches of {args.batch_size}, at most {args.max_new_tokens} new tokens. `hf-lossy policies` lists every rule with its parameters and source; `Mentored` is of `examples/reproduce/baselines.py`,",
        "`CSD` and `RegretBudget` are of `stateful_rules.py` there, and `Cascade`, `Ensemble`, `FLy`, `KLJudge`, `MARS` and `SyntheticForBenchmarks` of `lossy_rules.py`: importing the file registers them.",
        f"Every rule except {' and '.join(lossless)} is lossy. **Bold**: on the Pareto front of right answers and tokens per target call.",
        "× strict: tokens per second against strict acceptance on the same",
        f"batch, median of {-(-args.problems // args.batch_size)} batches. One answer is {1 / args.problems:.1%}. The ranking may differ for your models.", "",
        "![Pareto front](policies.png)", "",
    ]  # fmt: skip
    for mode in (GREEDY, SAMPLING):
        lines += [f"## {mode.capitalize()}{', temperature 1' if mode == SAMPLING else ''}", "",
                  "| rule | right | tokens / target call | lossy tokens | tok/s × strict |", "|---|---|---|---|---|"]  # fmt: skip
        for r in (r for r in rows if r["mode"] == mode and r not in same):
            name = f"`{r['setting'] or r['rule']}`"
            name = f"**{name}**" if r["front"] else name
            lines.append(
                f"| {name} | {r['right']:.1%} | {r['tokens_per_target_call']:.2f} | {share(r)} | {r['of_strict']:.2f} |"
            )
        lines.append("")
        if mode == GREEDY and same:
            settings = ", ".join(f"`{r['setting']}`" for r in same)
            lines += [f"Strict acceptance's outputs, in as many rounds: {settings}.{noise}", ""]
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw right answers against tokens per target call, with the front as a line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    for i, mode in enumerate((GREEDY, SAMPLING)):
        axes = figure.add_subplot(1, 2, i + 1, xlabel="tokens per target call", ylabel="right answers, %", title=mode)
        same = [r for r in rows if r["mode"] == mode and r["rule"] != "synthetic_for_benchmarks"]
        for k, rule in enumerate(dict.fromkeys(r["rule"] for r in same)):
            points = sorted((r["tokens_per_target_call"], 100 * r["right"]) for r in same if r["rule"] == rule)
            axes.plot(
                *zip(*points, strict=True), "oxs^vD*+"[k % 8], label=rule, markersize=12 if rule == STRICT else 7
            )
        front = sorted((r["tokens_per_target_call"], 100 * r["right"]) for r in same if r["front"])
        axes.plot(*zip(*front, strict=True), "k--", linewidth=0.8, label="front")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="folder of policies.md, policies.png and policies.json; default: only print"
    )
    parser.add_argument("--problems", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--gamma", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=11, help="of the demo's test problems")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    disable_progress_bars()

    models = hla.demo.load(device=args.device)
    hla.enable(models.target)
    task = load_task("demo", split="test", seed=args.seed)
    problems = task.problems(args.problems)
    rows = figures(models, task, problems, measured(models, problems, args))
    table = Table("rule", "setting", "mode", "right", "tokens / call", "lossy", "× strict")
    for r in rows:
        cells = [
            f"{r['right']:.1%}",
            f"{r['tokens_per_target_call']:.2f}",
            share(r),
            f"{r['of_strict']:.2f}",
        ]
        table.add_row(r["rule"], r["setting"], r["mode"], *cells)
    Console(width=130).print(table)
    if args.out:
        draw(rows, args.out / "policies.png")
        (args.out / "policies.md").write_text(markdown(rows, args), encoding="utf-8")
        found = {
            "where": machine(args.device),
            "settings": {k: str(v) for k, v in vars(args).items()},
            "results": rows,
        }
        (args.out / "policies.json").write_text(
            json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
