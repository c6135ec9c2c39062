"""AutoJudge beside strict acceptance, top-K, the target alone and the draft alone: right answers, accepted tokens, speed.

    python benchmarks/autojudge_speed.py                                                        # the demo pair and its judge
    python benchmarks/autojudge_speed.py --model M --assistant D --head HEAD --task gsm8k --data dev.jsonl --chat --problems 24 \\
        --top-k 4 --no-alone --speed 0 --window 8 --batch-size 24

Greedy, on problems that no head was trained on. Two tables:

1. the curve, all arms with one window, in batches: accuracy (share of right answers among all problems), tokens per target call (each
   row's own calls) and the share of lossy tokens. Nothing here depends on time.
2. the speed, at batch size 1, every arm with the window that made it fastest on other problems (`--tune`). All arms take turns
   at each problem in an order that rotates; ratios are medians over `--parts` equal parts of the problems.

`--plot FILE.png` draws the curve; it needs matplotlib.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from engine import one_repeat, ratio
from judge_arms import Pair, Texts, arm, load, policies
from pairs import machine
from rich.console import Console
from rich.table import Table

from hf_lossy_assist.tasks.tasks import AnswerTask, Problem, task_named


def curve(pair: Pair, task: AnswerTask, problems: list[Problem], args: argparse.Namespace, ends: set[int]) -> list[dict]:  # fmt: skip
    arms = [arm(n, pair, None, args.batch_size) for n in ("target alone", "draft alone") if not args.no_alone]
    arms += [arm(name, pair, make(args.window), args.batch_size) for name, make in policies(pair, args).items()]
    kept, texts, rows = Texts(arms), [pair.text(p) for p in problems], []
    for a in arms:  # no time is taken here, so they need not take turns
        one_repeat([a], pair.tokenizer, texts, args, ends)
        kept.add([a])
        rows.append(kept.row(a.name, pair, task, problems))
        print(json.dumps(rows[-1], ensure_ascii=False), file=sys.stderr)
    return rows


def tuned(pair: Pair, problems: list[Problem], args: argparse.Namespace, ends: set[int]) -> dict[str, int]:
    """For each arm the window with the most tokens per second on `problems`."""
    arms = {
        (name, window): arm(f"{name} {window}", pair, make(window), 1)
        for name, make in policies(pair, args).items()
        for window in args.windows
    }
    texts = [pair.text(p) for p in problems]
    one_repeat(list(arms.values()), pair.tokenizer, texts[:4], args, ends)
    one_repeat(list(arms.values()), pair.tokenizer, texts, args, ends)
    return {name: max(args.windows, key=lambda window: arms[name, window].speeds[-1]) for name in policies(pair, args)}


def speed(
    pair: Pair, task: AnswerTask, problems: list[Problem], windows: dict[str, int], args: argparse.Namespace, ends: set[int]
) -> list[dict]:  # fmt: skip
    arms = [arm(n, pair, None, 1) for n in ("target alone", "draft alone")]
    arms += [arm(name, pair, make(windows[name]), 1) for name, make in policies(pair, args).items()]
    texts, kept = [pair.text(p) for p in problems], Texts(arms)
    one_repeat(arms, pair.tokenizer, texts[:4], args, ends)
    for a in arms:
        a.speeds.clear()
    size = -(-len(problems) // args.parts)
    for first in range(0, len(problems), size):
        one_repeat(arms, pair.tokenizer, texts[first : first + size], args, ends)
        kept.add(arms)
    own, strict = (next(a for a in arms if a.name == n) for n in ("target alone", "strict"))
    return [
        kept.row(a.name, pair, task, problems)
        | {
            "window": windows.get(a.name),
            "tokens_per_second": round(statistics.median(a.speeds), 1),
            "of_strict": ratio(a, strict),
            "of_target": ratio(a, own),
        }
        for a in arms
    ]


def show(rows: list[dict], title: str, console: Console) -> None:
    strict = next(r for r in rows if r["arm"] == "strict")["tokens_per_target_call"]
    timed = "of_strict" in rows[0]
    table = Table(
        "arm", "right", "no answer", "tokens / target call", "× strict", "accepted / call", "lossy", title=title
    )
    for name in ("window", "tok/s", "× strict", "× target") if timed else ():
        table.add_column(name)
    for r in rows:
        per_call = r["tokens_per_target_call"]
        cells = [r["arm"], f"{r['right']:.1%}", f"{r['no_answer']:.1%}"]
        cells += ["", ""] if per_call is None else [f"{per_call:.2f}", f"{per_call / strict:.2f}"]
        cells += [f"{r['accepted_per_call']:.2f}", f"{r['lossy']:.1%}"] if "lossy" in r else ["", ""]
        if timed:
            cells += [str(r["window"] or ""), f"{r['tokens_per_second']:.0f}", f"{r['of_strict']:.2f}", f"{r['of_target']:.2f}"]  # fmt: skip
        table.add_row(*cells)
    console.print(table)


def draw(rows: list[dict], window: int, path: Path) -> None:
    """Accuracy against tokens per target call: one line for each kind of rule, the lossless arm and the draft as marks."""
    from matplotlib.figure import Figure

    from hf_lossy_assist.training.plots import save

    figure = Figure(figsize=(6, 4.4), layout="constrained")
    axes = figure.add_subplot(xlabel=f"tokens per target call (window {window})", ylabel="right answers, %")
    for kind, style in (("top-", "s--"), ("autojudge", "o-")):
        points = sorted((r["tokens_per_target_call"], 100 * r["right"]) for r in rows if r["arm"].startswith(kind))
        axes.plot(*zip(*points, strict=True), style, label={"top-": "top-K", "autojudge": "AutoJudge"}[kind])
    strict = next(r for r in rows if r["arm"] == "strict")
    axes.plot(strict["tokens_per_target_call"], 100 * strict["right"], "k*", markersize=11, label="strict (lossless)")
    for draft in (r for r in rows if r["arm"] == "draft alone"):
        axes.axhline(100 * draft["right"], color="gray", linestyle=":", label="draft alone")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded demo pair")
    parser.add_argument("--assistant")
    parser.add_argument("--head", help="a judge's folder or Hub repository; default the demo's")
    parser.add_argument("--task", default="demo")
    parser.add_argument("--data", type=Path, help="the task's problems, for gsm8k and math")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=11, help="of the demo's test problems")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--top-k", type=int, nargs="*", default=[2, 4, 8, 16, 32, 0], help="0 is the whole vocabulary")
    parser.add_argument("--no-alone", action="store_true", help="leave out the arms target alone and draft alone")
    parser.add_argument("--threshold", type=float, nargs="+", help="default: the head's own and others of its table")
    parser.add_argument("--window", type=int, default=32, help="of all arms of the curve")
    parser.add_argument("--batch-size", type=int, default=50, help="of the curve")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 6, 8, 12, 16, 24, 32])
    parser.add_argument("--tune", type=int, default=24, help="problems to choose each arm's window on")
    parser.add_argument("--speed", type=int, help="problems of the second table; default all; 0 leaves it out")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    pair = load(args)
    task = task_named(args.task, data=args.data, split="test", seed=args.seed)
    problems = task.problems(args.problems)
    ends = pair.target.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    console, results = Console(width=150), {}
    results["curve"] = curve(pair, task, problems, args, ends)
    show(results["curve"], f"{len(problems)} problems, window {args.window}, batches of {args.batch_size}", console)
    if args.plot:
        draw(results["curve"], args.window, args.plot)
    timed = problems[: len(problems) if args.speed is None else args.speed]
    if timed:
        others = task_named(args.task, data=args.data, split="calibration", seed=args.seed).problems(len(problems) + args.tune)  # fmt: skip
        if len(others) < len(problems) + args.tune:
            raise SystemExit(
                f"{args.data} has {len(others)} problems: too few for {args.tune} others to tune the windows on"
            )
        windows = tuned(pair, others[-args.tune :], args, ends)
        results["speed"] = speed(pair, task, timed, windows, args, ends)
        show(results["speed"], f"{len(timed)} problems, batch size 1, window tuned for each arm", console)
    console.print(machine(args.device))
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        found = {"where": machine(args.device), "settings": settings, "results": results}
        args.json.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
