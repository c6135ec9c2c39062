"""SV beside target-only, strict acceptance, SVIP, a moving average and staged speculation: tokens per second in batches.

    python benchmarks/sv_goodput.py                                        # the demo's three models, and a second, weaker draft
    python benchmarks/sv_goodput.py --model M --assistant D --companion int8 --prompts FILE.jsonl --chat --batch-size 8 --gamma 5 \\
        --profile DIR

Every arm has the same γ (SVIP and the moving average: at most), samples at temperature 1 unless `--greedy`, and takes its turn at
each batch of prompts in an order that rotates; ratios are medians over `--repeats`, after one that is not counted. A profile is
made first for each draft, on other prompts, unless `--profile` names one. All speculating arms but SV and staged have no companion.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from huggingface_hub.utils import disable_progress_bars
from pairs import machine
from rich.console import Console
from rich.table import Table
from sv_arms import Arm, Triple, arms_for, triples

import hf_lossy_assist as hla
from hf_lossy_assist.cli.profile import PROFILED
from hf_lossy_assist.methods.sprinter.theory import forward_flops
from hf_lossy_assist.methods.sv.instrument import ProfileSettings
from hf_lossy_assist.methods.sv.profiling import profile
from hf_lossy_assist.stats.report import SpeculationStats


def measured(triple: Triple, gamma: int, batch: int, texts: list[str], args: argparse.Namespace) -> list[Arm]:
    """All arms on the same prompts, a batch at a time by turns."""
    arms = arms_for(triple, gamma, args)
    batches = max(1, -(-args.rows // batch))
    for repeat in range(args.repeats + 1):
        if repeat == 1:  # the first one warmed up
            for arm in arms:
                arm.seconds, arm.tokens, arm.calls = [], [], []
        for arm in arms:
            arm.seconds.append(0.0)
            arm.tokens.append(0)
        for turn in range(batches):
            first = (repeat * batches + turn) * batch
            chosen = [texts[(first + i) % len(texts)] for i in range(batch)]
            inputs = triple.tokenizer(chosen, return_tensors="pt", padding=True).to(args.device)
            inputs.pop("token_type_ids", None)
            shift = (repeat + turn) % len(arms)
            for arm in arms[shift:] + arms[:shift]:
                arm.run(triple, inputs, args, seed=first + 1)
    return arms


def figures(triple: Triple, gamma: int, batch: int, arms: list[Arm]) -> list[dict[str, Any]]:
    """One row for each arm: ratios are medians of ratios of one repeat."""
    by_name = {arm.name: arm for arm in arms}
    rows = []
    for arm in arms:
        row: dict[str, Any] = {"draft": triple.name, "gamma": gamma, "batch": batch, "arm": arm.name}
        row["tokens_per_second"] = round(statistics.median(arm.speeds), 1)
        for name in ("strict", "target"):
            if name in by_name:
                row[f"of_{name}"] = round(
                    statistics.median(a / b for a, b in zip(arm.speeds, by_name[name].speeds, strict=True)), 3
                )
        if arm.calls:
            stats, tokens = SpeculationStats.merge(arm.calls), sum(arm.tokens)
            total = stats.total()
            row |= {
                "acceptance": round(total.num_accepted_draft_tokens / max(total.num_draft_tokens, 1), 3),
                "drafted": (total.num_draft_tokens + total.num_dropped_tokens) / tokens,
                "verified": total.num_draft_tokens / tokens,
                "rejected": (total.num_draft_tokens - total.num_accepted_draft_tokens) / tokens,
                "target_gflop": gflop(triple.target, (total.num_draft_tokens + total.num_spec_steps) / tokens),
                "companion_gflop": 0.0,
            }
            if stats.forwards.get("companion"):
                share = stats.forwards["companion"] / max(stats.forwards["target"], 1)
                fed = share * (total.num_draft_tokens + total.num_dropped_tokens + total.num_spec_steps) / tokens
                row["companion_gflop"] = gflop(triple.companion, fed)
        rows.append(row)
    for row in rows:
        strict = next((r for r in rows if r["arm"] == "strict"), None)
        if strict is not None and "rejected" in row:
            row["rejected_of_strict"] = round(row["rejected"] / strict["rejected"], 3) if strict["rejected"] else None
            row["target_flop_of_strict"] = round(row["target_gflop"] / strict["target_gflop"], 3)
            row["companion_of_strict"] = round(row["companion_gflop"] / strict["target_gflop"], 3)
    return rows


def gflop(model: Any, tokens: float) -> float:
    """Of `tokens` tokens that go through the model, at a typical length."""
    return tokens * forward_flops(model.config, 64, 64) / 64 / 1e9


def fairness(arm: Arm) -> list[dict[str, Any]]:
    """Requests by the drafted tokens of theirs that a round verifies, on average: the lowest five and the highest five (Table 9)."""
    rows = [row for call in arm.calls for row in call.rows if row.num_spec_steps >= 5]
    means = sorted((row.num_draft_tokens / row.num_spec_steps, i) for i, row in enumerate(rows))
    out = []
    for mean, i in means[:5] + means[-5:]:
        sent: Counter[int] = Counter()
        for (tokens, _), count in rows[i].steps.items():
            sent[tokens] += count
        out.append({"request": i, "mean": round(mean, 2), "rounds": dict(sorted(sent.items()))})
    return out


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table("batch", "arm", "tok/s", "× strict", "× target", "accepted", "verified / token", "rejected / token",
                  "rejected, of strict", "target FLOPs, of strict", "companion FLOPs",
                  title=f"{rows[0]['draft']}, γ = {rows[0]['gamma']}")  # fmt: skip
    for r in rows:
        cells = [str(r["batch"]), r["arm"], f"{r['tokens_per_second']:.0f}"]
        cells += [f"{r[key]:.2f}" if key in r else "" for key in ("of_strict", "of_target")]
        if "verified" in r:
            cells += [f"{r['acceptance']:.0%}", f"{r['verified']:.2f}", f"{r['rejected']:.2f}"]
            if r.get("rejected_of_strict") is not None:
                cells += [
                    f"{r[k]:.0%}" for k in ("rejected_of_strict", "target_flop_of_strict", "companion_of_strict")
                ]
        table.add_row(*cells, end_section=r["arm"] == "staged")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded demo")
    parser.add_argument("--assistant")
    parser.add_argument("--companion", help="a path, Hub id or int8; default the demo's")
    parser.add_argument(
        "--noise", type=float, nargs="*", default=[0.6], help="of weaker drafts, in spreads of the weights"
    )
    parser.add_argument("--weaker", action="store_true", help="of the demo's drafts those with noise alone")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--gamma", type=int, nargs="+", default=[5, 7])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--rows", type=int, default=32, help="of a repeat, in as many batches as that takes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--problems", type=int, default=320)
    parser.add_argument("--profile-prompts", type=int, default=PROFILED)
    parser.add_argument(
        "--rounds", type=int, default=ProfileSettings.rounds, help="timed of each kind for the profile"
    )
    parser.add_argument("--profile", type=Path, help="a profile made before; default: make one for each draft")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=int, default=11, help="of the demo's test problems")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    disable_progress_bars()

    console, results = Console(width=150), []
    for name, target, draft, companion, tokenizer, profiled, texts in triples(args):
        hla.enable(target)
        with tempfile.TemporaryDirectory() as folder:
            settings = ProfileSettings(
                gamma=tuple(args.gamma), batches=tuple(args.batch_size), batch_size=32, do_sample=not args.greedy,
                new_tokens=args.max_new_tokens, rounds=args.rounds,
            )  # fmt: skip
            made = (
                hla.Profile.from_pretrained(args.profile) if args.profile
                else profile(target, draft, companion, tokenizer, profiled, Path(folder, "profile"), settings)
            )  # fmt: skip
        triple = Triple(name, target, draft, companion, tokenizer, made)
        found: dict[str, Any] = {
            "draft": name,
            "metrics": made.metrics,
            "pays": made.pays.tolist(),
            "rows": [],
            "fairness": {},
        }
        for gamma in args.gamma:
            for batch in args.batch_size:
                arms = measured(triple, gamma, batch, texts, args)
                found["rows"] += figures(triple, gamma, batch, arms)
                own = next((a for a in arms if a.name == "SV, no fallback"), None)
                if own is not None and batch == max(args.batch_size):
                    found["fairness"][gamma] = fairness(own)
            show([r for r in found["rows"] if r["gamma"] == gamma], console)
        results.append(found)
        console.print(
            f"{name}: acceptance {made.metrics['acceptance']:.1%}, pays as predicted {made.pays.round(2).tolist()}"
        )
        for row in made.metrics["information"]:
            console.print(f"  {row['resolution']}: gain {row['gain']:.3f} of {row['entropy']:.3f} bits")
        for gamma, lines in found["fairness"].items():
            console.print(f"  γ = {gamma}, verified in a round of a request: {[line['mean'] for line in lines]}")
        if args.json:
            args.json.write_text(json.dumps({"where": machine(args.device), "settings": {k: str(v) for k, v in vars(args).items()}, "results": results}, indent=1, ensure_ascii=False) + "\n")  # fmt: skip
    console.print(machine(args.device))


if __name__ == "__main__":
    main()
