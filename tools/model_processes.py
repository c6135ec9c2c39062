"""Run work on many models in separate processes, because one may hang or crash."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


CHUNK = 6  # models to a process


def main(
    script: str,
    doc: str,
    names: Callable[[list[str] | None], list[str]],
    work: Callable[[list[str]], None],
    page: Callable[[list[dict[str, Any]]], tuple[str, int]],
    seconds: int,
    out: Path | None = None,
) -> int:
    """Run a script's command line; return its exit status, 1 if `page` counts a wrong result.

    Args:
        names: those of all models, or of some types. work: prints a line of JSON for each name, in a separate process. page: text of results, and how
            many are wrong. seconds: for a model. out: the file of the page of all models; None: it is printed.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--processes", type=int, default=1, help="at a time, of one thread each")
    parser.add_argument(
        "--lines", type=Path, help="file of raw results, a line of JSON per model, to which new ones are added"
    )
    options = parser.parse_args()
    if options.work:
        work(options.work)
        return 0
    lines = options.lines.read_text().splitlines() if options.lines and options.lines.exists() else []
    done = [json.loads(line) for line in lines]
    left = [name for name in names(options.only) if name not in {result["name"] for result in done}]
    text, wrong = page(done + run(script, left, options.lines, options.processes, seconds))
    if options.only or out is None:
        print(text)
    else:
        out.write_text(text)
    return int(wrong > 0)


def run(script: str, names: list[str], lines: Path | None, processes: int, seconds: int) -> list[dict[str, Any]]:
    """Run `script --work name …` on a few of `names` at a time, with `seconds` for each; it prints one line of JSON per name.

    A name that kills its process is recorded, and the rest continues. `lines`: the file to which raw results are appended.
    """
    results: list[dict[str, Any]] = []

    def attempt(now: list[str]) -> list[dict[str, Any]]:
        new = one_process(script, now, seconds)
        results.extend(new)
        if lines:
            with lines.open("a") as file:
                file.writelines(json.dumps(result) + "\n" for result in new)
        print(f"{len(results)} of {len(names)}", file=sys.stderr, flush=True)
        return new + attempt(now[len(new) :]) if len(new) < len(now) else new

    with ThreadPoolExecutor(processes) as pool:
        chunks = list(pool.map(attempt, [names[i : i + CHUNK] for i in range(0, len(names), CHUNK)]))
    return [result for part in chunks for result in part]


def one_process(script: str, names: list[str], seconds: int) -> list[dict[str, Any]]:
    """Return the results of the first few of `names`: all of them, or up to the one that killed its process."""
    command = [sys.executable, script, "--work", *names]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=seconds * len(names), check=False)
        output, ended = done.stdout, f"its process ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, ended = error.stdout or b"", "hangs"
    found = [json.loads(line) for line in output.decode().splitlines() if line.startswith('{"name"')]
    if len(found) < len(names):
        lost = {"not built": ended}
        found.append({"name": names[len(found)], "sdpa": lost, "eager": lost, "seconds": 0.0})
    return found
