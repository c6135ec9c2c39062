"""SPRINTER beside strict acceptance, SVIP and the target alone: tokens per target call, speed, and what is lost.

    python benchmarks/sprinter_speed.py                                            # the demo pair and its head, 20 and 96 new tokens
    python benchmarks/sprinter_speed.py --model M --assistant D --head HEAD --prompts gsm8k.jsonl --chat --problems 8
    python benchmarks/sprinter_speed.py --batch-sizes 1 8 32 --patience 1 0.5 0    # who waits for whom in a batch

Greedy. All arms interleaved in one run as in benchmarks/engine.py: medians over the repeats, ratios the medians of the ratios
within a repeat. "Lost" is measured against the target's own text: ROUGE-L (F1, rouge-score), the share of texts that are equal, and on the
demo the share of right answers (only where the text is long enough to state one). Needs rouge-score (`pip install rouge-score`).
"""

import argparse
import statistics
from typing import Any

from engine import Arm, one_repeat, ratio, warm_up
from pairs import machine, opened, options, record
from rich.console import Console
from rich.table import Table
from rouge_score.rouge_scorer import RougeScorer

import hf_lossy_assist as hla
from hf_lossy_assist.stats.report import SpeculationStats


class Words:
    """Splits at blanks: rouge-score's own splitter drops "+" and "=", which are words of an answer."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def arms_for(target: Any, draft: Any, head: hla.Head, args: argparse.Namespace) -> list[Arm]:
    def ours(policy: Any) -> Any:
        return lambda **kwargs: target.generate(assistant_model=draft, lossy_policy=policy, **kwargs)

    def alone(**kwargs: Any) -> Any:
        return type(target).generate(target, **kwargs)

    arms = []
    for size in args.batch_sizes:
        arms.append(Arm("target", size, alone))
        arms.append(Arm("strict γ=5", size, ours(hla.LossyPolicy(stop=hla.Constant(5)))))
        arms.append(Arm("svip", size, ours("svip")))
        for tau in args.threshold:
            for patience in args.patience if size > 1 else [1.0]:
                name = f"sprinter τ={tau:g}" + (
                    f" patience {patience:g}" if size > 1 and len(args.patience) > 1 else ""
                )
                arms.append(Arm(name, size, ours(hla.Sprinter(head, tau, args.max_draft, patience))))
    return arms


def report(arms: list[Arm], tokenizer: Any, problems: list[Any]) -> list[dict[str, Any]]:
    """One row for each arm; texts of the last repeat (greedy: they are the same in all)."""
    scorer = RougeScorer(["rougeL"], tokenizer=Words())
    rows = []
    for arm in arms:
        own, strict = (
            next(a for a in arms if a.batch_size == arm.batch_size and a.name == n) for n in ("target", "strict γ=5")
        )
        texts, wanted = ([tokenizer.decode(t, skip_special_tokens=True) for t in a.texts] for a in (arm, own))
        row: dict[str, Any] = {
            "arm": arm.name,
            "batch_size": arm.batch_size,
            "tokens_per_second": round(statistics.median(arm.speeds), 1),
            "of_strict": ratio(arm, strict),
            "of_target": ratio(arm, own),
            "rouge_l": statistics.mean(scorer.score(w, t)["rougeL"].fmeasure for w, t in zip(wanted, texts, strict=True)),
            "equal_texts": statistics.mean(t == w for t, w in zip(arm.texts, own.texts, strict=True)),
        }  # fmt: skip
        if problems:
            row["right"] = statistics.mean(
                hla.demo.answer(t) == p.answer for t, p in zip(texts, problems, strict=True)
            )
        if arm.calls:
            stats = SpeculationStats.merge(arm.calls)
            new = stats.num_new_tokens
            row |= {
                "tokens_per_target_call": new
                / stats.summary()["num_spec_steps"],  # each row's own calls, as in the paper
                "unchecked": stats.num_unchecked_tokens / new,
                "lossy": stats.num_lossy_accepts / new,
            }
        else:
            row["tokens_per_target_call"] = 1.0
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], new_tokens: int, console: Console) -> None:
    table = Table("batch", "arm", "tok/s", "× strict", "× target", "tokens / target call", "never checked", "lossy",
                  "ROUGE-L", "equal texts", "right", title=f"{new_tokens} new tokens")  # fmt: skip
    for r in rows:
        share = [
            f"{r[name]:.1%}" if name in r else "" for name in ("unchecked", "lossy", "rouge_l", "equal_texts", "right")
        ]
        table.add_row(
            str(r["batch_size"]), r["arm"], f"{r['tokens_per_second']:.0f}", f"{r['of_strict']:.2f}",
            f"{r['of_target']:.2f}", f"{r['tokens_per_target_call']:.2f}", *share,
        )  # fmt: skip
    console.print(table)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--head", help="a head's folder or Hub repository; default the demo head")
    parser.add_argument("--max-new-tokens", type=int, nargs="+", default=[20, 96])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.7, 0.5, 0.3])
    parser.add_argument("--patience", type=float, nargs="+", default=[1.0])
    parser.add_argument("--max-draft", type=int, default=hla.HeadStop.max_draft)
    args = parser.parse_args()

    target, draft, tokenizer, prompts, ends = opened(args)
    problems = hla.demo.problems(args.problems, args.seed) if args.model is None else []
    head = hla.demo.head() if args.head is None else hla.Head.from_pretrained(args.head)
    console, results = Console(), {}
    for new_tokens in args.max_new_tokens:
        arms = arms_for(target, draft, head, args)
        one = argparse.Namespace(**(vars(args) | {"max_new_tokens": new_tokens}))
        warm = argparse.Namespace(**(vars(args) | {"max_new_tokens": min(new_tokens, 8)}))
        warm_up(arms, tokenizer, prompts[: max(args.batch_sizes)], warm, ends)
        for _ in range(args.repeats):
            one_repeat(arms, tokenizer, prompts, one, ends)
        rows = report(arms, tokenizer, problems if new_tokens >= 64 else [])
        results[new_tokens] = rows
        show(rows, new_tokens, console)
    console.print(machine(args.device))
    record(args, machine(args.device), results=results)


if __name__ == "__main__":
    main()
