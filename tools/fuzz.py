"""Draw wrong uses at random and count the outcomes: refused in one line of this package, accepted and right, anything else.

Run `python tools/fuzz.py --seed 0 --cases 1000` (`--only` for one area, `--case` for one case). The same seed draws the same cases. It
exits with 1 if any case is neither refused in one line nor right. Nothing is downloaded: models are random and tiny,
servers are on loopback. The areas are files in `tools/fuzzing`.
"""

import argparse
import logging
import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import torch
import transformers
from fuzzing import arguments, commands, folders, policies, tensors
from fuzzing.verdicts import ELSE, REFUSED, RIGHT, Verdict, judge


# name → the function that draws a case, and its share
AREAS = {
    "arguments": (arguments.case, 25),
    "tensors": (tensors.case, 12),
    "policies": (policies.case, 20),
    "heads": (folders.head_case, 9),
    "profiles": (folders.profile_case, 7),
    "commands": (commands.case, 12),
}
SECONDS = 10.0  # a case that takes longer hangs
MEMORY = 3 * 2**30  # bytes that all cases may need beyond the libraries


def run(seed: int, number: int, only: str | None = None) -> tuple[str, str, Verdict]:
    """Run case `number` of `seed`; return its area, its description and its verdict."""
    drawn = random.Random(f"{seed}/{number}").choices(list(AREAS), [share for _, share in AREAS.values()])[0]
    area = only or drawn
    with tempfile.TemporaryDirectory() as folder:
        case = AREAS[area][0](random.Random(f"{seed}/{area}/{number}"), Path(folder))
        torch.manual_seed(number)
        return area, case.what, judge(case, SECONDS)


def fuzz(seed: int, numbers: range, only: str | None = None, loud: bool = False) -> Counter[tuple[str, str]]:
    """Return the counts by area and verdict, and print every case that is neither refused in one line nor right."""
    counts: Counter[tuple[str, str]] = Counter()
    for number in numbers:
        began = time.perf_counter()
        area, what, verdict = run(seed, number, only)
        counts[area, verdict.kind] += 1
        if verdict.kind == ELSE or loud:
            print(f"--only {area} --seed {seed} --case {number} ({time.perf_counter() - began:.2f} s): {what}")
            print(f"    {verdict.kind}: {verdict.seen}{chr(10) + verdict.trace if loud else ''}", flush=True)
    return counts


def quiet() -> None:
    """Silence Transformers' warnings, which would hide the counts."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(logging.CRITICAL)


@contextmanager
def bounded() -> Iterator[None]:
    """Limit memory, so that a case that exhausts it fails alone."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").is_file() else 0
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--only", choices=list(AREAS))
    parser.add_argument("--case", type=int, help="run only this case and print its outcome")
    options = parser.parse_args()
    quiet()
    numbers = range(options.cases) if options.case is None else range(options.case, options.case + 1)
    began = time.perf_counter()
    with bounded():
        counts = fuzz(options.seed, numbers, options.only, options.case is not None)
    seconds = time.perf_counter() - began
    for area in AREAS:
        row = [counts[area, kind] for kind in (REFUSED, RIGHT, ELSE)]
        if sum(row):
            print(f"{area:10s} {row[0]:5d} {REFUSED}, {row[1]:5d} {RIGHT}, {row[2]:5d} {ELSE}")
    total = {kind: sum(counts[area, kind] for area in AREAS) for kind in (REFUSED, RIGHT, ELSE)}
    print(
        f"seed {options.seed}: {len(numbers)} cases in {seconds:.1f} s: "
        + ", ".join(f"{n} {kind}" for kind, n in total.items())
    )
    return 1 if total[ELSE] else 0


if __name__ == "__main__":
    sys.exit(main())
