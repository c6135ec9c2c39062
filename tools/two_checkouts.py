"""Compare this engine's tokens per second in two checkouts, their arms interleaved in one run on the demo pair.

    git worktree add /tmp/before 452a2f8
    python tools/two_checkouts.py /tmp/before . --batch-sizes 1 8 32

Each checkout has one process, which waits while the other works. They take turns at each batch of prompts, the first turn
changing from batch to batch. After half of the repeats both restart in the other order. The same checkout given twice shows
the machine's noise. The ratio (second ÷ first) is the median over the repeats of the ratio within a repeat. "Of the fastest" takes
for each batch of prompts the fastest repeat of either checkout: the work is the same every time, so a slower one was disturbed. Greedy; a
row counts its tokens up to and including its end token, and both checkouts must give the same ones.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


POLICIES = ("strict", "svip")
Repeat = tuple[int, list[list[float]]]  # tokens of all prompts; of each checkout the seconds of each batch of prompts


def serve(problems: int, seed: int) -> None:
    """Serve as the worker: one line of JSON in per batch (policy, first, count), one out (tokens of each row, seconds)."""
    import hf_lossy_assist as hla

    models = hla.demo.load()
    target, tokenizer = hla.enable(models.target), models.tokenizer
    prompts = [p.prompt for p in hla.demo.problems(problems, seed)]
    [end] = {target.generation_config.eos_token_id}
    for line in sys.stdin:
        policy, first, count = json.loads(line)
        inputs = tokenizer(prompts[first : first + count], return_tensors="pt", padding=True)
        settings = {"num_assistant_tokens": 5} if policy == "strict" else {}
        began = time.perf_counter()
        out = target.generate(
            **inputs, assistant_model=models.draft, lossy_policy=policy, max_new_tokens=64, do_sample=False, **settings
        )
        seconds = time.perf_counter() - began
        new = out[:, inputs["input_ids"].shape[1] :].tolist()
        texts = [row[: row.index(end) + 1] if end in row else row for row in new]
        print(json.dumps([texts, seconds]), flush=True)


class Checkout:
    """One checkout's worker and its results in each repeat."""

    def __init__(self, process: "subprocess.Popen[str]"):
        self.process = process

    def run(self, policy: str, first: int, count: int) -> tuple[list[list[int]], float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([policy, first, count]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker ended with {self.process.wait()}")
        texts, seconds = json.loads(line)
        return texts, seconds


@contextmanager
def started(folder: Path, args: argparse.Namespace) -> Iterator[Checkout]:
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--serve",
        "--problems",
        str(args.problems),
        "--seed",
        str(args.seed),
    ]
    environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment, cwd=folder) as process:
        try:
            yield Checkout(process)
        finally:
            process.kill()


def repeat(pair: list[Checkout], policy: str, size: int, problems: int) -> Repeat:
    """Return the tokens of all prompts, `size` at a time, and the seconds of each batch in both checkouts."""
    tokens = 0
    seconds: list[list[float]] = [[], []]
    for turn, first in enumerate(range(0, problems, size)):
        texts: dict[int, Any] = {}
        for k in (0, 1) if turn % 2 == 0 else (1, 0):
            texts[k], took = pair[k].run(policy, first, size)
            seconds[k].append(took)
        assert texts[0] == texts[1], f"{policy}, batch {size}: the two checkouts write different texts"
        tokens += sum(len(text) for text in texts[0])
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="a checkout")
    parser.add_argument("after", type=Path, nargs="?", help="another one")
    parser.add_argument("--problems", type=int, default=32, help="how many prompts (default 32)")
    parser.add_argument("--seed", type=int, default=777, help="of the demo problems")
    parser.add_argument("--repeats", type=int, default=8, help="the figure is the median of these (default 8)")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.problems, args.seed)
    if args.after is None:
        parser.error("two checkouts are needed: BEFORE AFTER")

    arms = [(size, policy) for size in args.batch_sizes for policy in POLICIES]
    found: dict[tuple[int, str], list[Repeat]] = {arm: [] for arm in arms}
    for exchanged in (False, True):
        order = [args.after, args.before] if exchanged else [args.before, args.after]
        with started(order[0], args) as first, started(order[1], args) as second:
            pair = [second, first] if exchanged else [first, second]
            for size, policy in arms:
                repeat(pair, policy, size, min(args.problems, 2 * size))  # warm-up
                count = (args.repeats + exchanged) // 2
                found[size, policy] += [repeat(pair, policy, size, args.problems) for _ in range(count)]
    show(found)


def show(found: dict[tuple[int, str], list[Repeat]]) -> None:
    """Print a row for each batch size and policy."""
    table = Table(
        "policy", "batch", "before, tokens/s", "after, tokens/s", "after ÷ before", "range", "of the fastest"
    )
    for (size, policy), repeats in found.items():
        speeds = [[tokens / sum(batches) for batches in seconds] for tokens, seconds in repeats]
        ratios = [after / before for before, after in speeds]
        both = [f"{statistics.median(arm):.1f}" for arm in zip(*speeds, strict=True)]
        around = f"{min(ratios):.3f}–{max(ratios):.3f}"
        fastest = [sum(map(min, zip(*(seconds[k] for _, seconds in repeats), strict=True))) for k in (0, 1)]
        ratio = f"{statistics.median(ratios):.3f}"
        table.add_row(policy, str(size), *both, ratio, around, f"{fastest[0] / fastest[1]:.3f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
