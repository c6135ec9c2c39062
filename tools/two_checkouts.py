"""Compare this engine's tokens per second in two checkouts, their arms interleaved in one run on the demo pair.

    git worktree add /tmp/before 452a2f8
    python tools/two_checkouts.py /tmp/before . --batch-sizes 1 8 32

Each checkout has one process, which waits while the other works. They take turns at each batch of prompts, the first turn
changing from batch to batch. After half of the repeats both restart in the other order. The same checkout given twice shows
the machine's noise. The ratio (second ÷ first) is the median over the repeats of the ratio within a repeat. Greedy; a
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
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


POLICIES = ("strict", "svip")
Worker = subprocess.Popen[str]
Repeat = tuple[int, list[float]]  # tokens of all prompts, and the seconds of each checkout


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
        settings: dict[str, Any] = {"lossy_policy": policy, "max_new_tokens": 64, "do_sample": False}
        settings |= {"num_assistant_tokens": 5} if policy == "strict" else {}
        began = time.perf_counter()
        out = target.generate(**inputs, assistant_model=models.draft, **settings)
        seconds = time.perf_counter() - began
        new = out[:, inputs["input_ids"].shape[1] :].tolist()
        texts = [row[: row.index(end) + 1] if end in row else row for row in new]
        print(json.dumps([texts, seconds]), flush=True)


@contextmanager
def started(folder: Path, args: argparse.Namespace) -> Iterator[Worker]:
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    command += ["--problems", str(args.problems), "--seed", str(args.seed)]
    environment = os.environ | {"PYTHONPATH": str(folder.resolve())}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment, cwd=folder) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(process: Worker, *given: object) -> tuple[list[list[int]], float]:
    """Return a worker's texts of a batch, and its seconds."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(given) + "\n")
    process.stdin.flush()
    texts, seconds = json.loads(process.stdout.readline())
    return texts, seconds


def repeat(pair: list[Worker], policy: str, size: int, problems: int) -> Repeat:
    """Have both checkouts write all prompts, `size` at a time."""
    tokens, seconds = 0, [0.0, 0.0]
    for turn, first in enumerate(range(0, problems, size)):
        texts: dict[int, Any] = {}
        for k in (0, 1) if turn % 2 == 0 else (1, 0):
            texts[k], took = ask(pair[k], policy, first, size)
            seconds[k] += took
        assert texts[0] == texts[1], f"{policy}, batch {size}: the two checkouts write different texts"
        tokens += sum(map(len, texts[0]))
    return tokens, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", help="two: BEFORE AFTER")
    parser.add_argument("--problems", type=int, default=32, help="how many prompts (default 32)")
    parser.add_argument("--seed", type=int, default=777, help="of the demo problems")
    parser.add_argument("--repeats", type=int, default=8, help="the figure is the median of these (default 8)")
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.problems, args.seed)
    if len(args.checkouts) != 2:
        parser.error("two checkouts are needed: BEFORE AFTER")

    arms = [(size, policy) for size in args.batch_sizes for policy in POLICIES]
    found: dict[tuple[int, str], list[Repeat]] = {arm: [] for arm in arms}
    for order in (1, -1):
        with ExitStack() as stack:
            pair = [stack.enter_context(started(folder, args)) for folder in args.checkouts[::order]][::order]
            for size, policy in arms:
                repeat(pair, policy, size, min(args.problems, 2 * size))  # warm-up
                count = (args.repeats + (order < 0)) // 2
                found[size, policy] += [repeat(pair, policy, size, args.problems) for _ in range(count)]
    table = Table("policy", "batch", "before, tokens/s", "after, tokens/s", "after ÷ before", "range")
    for (size, policy), repeats in found.items():
        speeds = [[tokens / each for each in seconds] for tokens, seconds in repeats]
        ratios = [after / before for before, after in speeds]
        both = [f"{statistics.median(arm):.1f}" for arm in zip(*speeds, strict=True)]
        table.add_row(
            policy, str(size), *both, f"{statistics.median(ratios):.3f}", f"{min(ratios):.3f}–{max(ratios):.3f}"
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
