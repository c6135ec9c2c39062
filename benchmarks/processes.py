"""Time jobs of `hf-lossy` in one process and shared by several, each process with one thread; arms take turns within each repeat.

    torchrun --standalone --nproc-per-node 2 benchmarks/processes.py         # mining and comparing the demo pair

The processes persist: in the arm of one process, the first one works while the others wait. Seconds are of the whole command, loading included, without
the start of Python. "at once": each process does the whole job at the same time, so processes × alone ÷ at once is
the machine's limit for independent processes. Ratios are medians of the ratios within a repeat.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from pairs import machine, record
from rich.console import Console
from rich.table import Table

from hf_lossy_assist.cli import _runs
from hf_lossy_assist.cli.app import app
from hf_lossy_assist.training.processes import ALONE, Processes


JOBS = {
    "mine": ["mine", "--task", "demo", "--limit", "64", "--batch-size", "8"],
    "compare": ["compare", "--limit", "24", "--no-static", "--policies", "svip"],
    "collect": ["collect", "--prompts", "demo", "--limit", "64", "--max-new-tokens", "48"],
}


ARMS = "alone", "together", "at once"


def seconds(words: list[str], together: Processes, arm: str) -> float:
    """Return the seconds of one job, until all processes have finished."""
    folders = together.all(tempfile.mkdtemp())
    original, out = Processes.started, folders[together.rank if arm == "at once" else 0]
    if arm != "together":
        Processes.started = classmethod(lambda cls: ALONE)  # type: ignore[method-assign, assignment]
    together.wait()
    began = time.perf_counter()
    if together.first or arm != "alone":
        sys.argv = ["hf-lossy", *words, "--out", str(Path(out, "found"))]
        with (
            open(os.devnull, "w") as nothing,
            contextlib.redirect_stdout(nothing),
            contextlib.redirect_stderr(nothing),
        ):
            code = _runs.run(app)
        assert not code, f"{' '.join(words)}: exit code {code}"
    together.wait()
    Processes.started = original  # type: ignore[method-assign]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=["mine", "compare"])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    together = Processes.started()
    found = []
    for name in args.jobs:
        took: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for repeat in range(args.repeats + 1):
            for place in range(len(ARMS)):
                arm = ARMS[(place + repeat) % len(ARMS)]
                spent = seconds(JOBS[name], together, arm)
                if repeat:
                    took[arm].append(spent)
        ratios = [one / several for one, several in zip(took["alone"], took["together"], strict=True)]
        most = [together.count * one / each for one, each in zip(took["alone"], took["at once"], strict=True)]
        found.append({"job": name, **took, "ratio": statistics.median(ratios), "ratios": ratios, "ceilings": most})
    if together.first:
        table = Table(
            "job", "one process, s", f"{together.count} processes, s", "times as fast", "range", "sharing nothing"
        )
        for row in found:
            alone, several, most = (statistics.median(row[kind]) for kind in ("alone", "together", "ceilings"))
            low, high = min(row["ratios"]), max(row["ratios"])
            table.add_row(
                str(row["job"]),
                f"{alone:.1f}",
                f"{several:.1f}",
                f"{row['ratio']:.2f}",
                f"{low:.2f}–{high:.2f}",
                f"{most:.2f}",
            )
        Console(width=100).print(table, machine("cpu"))
        record(args, machine("cpu"), results=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
