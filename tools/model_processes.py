"""Run work on many models in separate processes, because one may hang or crash."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


CHUNK = 6  # models to a process


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
