"""Work that may hang or take the process with it, done in processes that can be killed.

Signals would bound it in the main thread alone, and not inside one long operation on whole numbers; forking this
process would copy torch's threads' locks. So each job goes to a small Python process (`worker.py`) that is kept for
the next job.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any


START = 120.0  # seconds that a worker may take to start, on a busy machine with a cold disk

_idle: dict[tuple[int, str], list["Worker"]] = {}  # by process and kind: a forked child must not share our pipes
_lock = threading.Lock()


class Lost(Exception):
    """The worker did not answer in time, or ended."""


class Worker:
    """One process of one kind ("formulas" or "programs"), which serves one job at a time."""

    def __init__(self, kind: str):
        # Isolated: a file in the current folder must not stand for a module. What can be imported here can be there.
        search = json.dumps([os.path.abspath(entry) for entry in sys.path if entry])
        command = [sys.executable, "-I", str(Path(__file__).with_name("worker.py")), kind, search]
        self.killed = False
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that what it started can be killed with it
        )
        try:
            why = self._read(START).get("error")
        except Lost:
            why = f"it ended, or said nothing for {START:g} s"
        if why is not None:
            self.stop()
            raise OSError(f"the worker process for {kind} did not start ({why}); does {sys.executable} run?")

    def ask(self, job: dict[str, Any], timeout: float) -> Any:
        """The answer to one job; raises `Lost` where there is none after `timeout` seconds."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Lost from None
        return self._read(timeout)

    def _read(self, timeout: float) -> Any:
        assert self.process.stdout is not None
        timer = threading.Timer(timeout, self._kill)  # its death ends the line that we wait for
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
            timer.join()  # so that it cannot strike later, when this process serves another job
        if self.killed or not line.endswith(b"\n"):
            raise Lost
        return json.loads(line)

    def _kill(self) -> None:
        self.killed = True
        try:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()
        except ProcessLookupError:
            pass

    def stop(self) -> None:
        """End the process and all that it started."""
        self._kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()  # type: ignore[union-attr]
            except OSError:  # what was not yet written, into a pipe with no reader
                pass


def ask(kind: str, job: dict[str, Any], timeout: float) -> Any | None:
    """What a worker of `kind` answers to `job`, or None where it did not within `timeout` seconds, or broke. Any
    thread."""
    key = os.getpid(), kind
    with _lock:
        idle = _idle.setdefault(key, [])
        worker = idle.pop() if idle else None
    if worker is not None and worker.process.poll() is not None:  # someone ended it meanwhile
        worker.stop()
        worker = None
    worker = Worker(kind) if worker is None else worker
    try:
        reply = worker.ask(job, timeout)
    except BaseException as error:
        worker.stop()
        if isinstance(error, Lost):
            return None
        raise
    with _lock:
        idle.append(worker)
    return reply.get("is")


@atexit.register
def stop_all() -> None:
    """End all idle workers of this process."""
    with _lock:
        mine = [_idle.pop(key) for key in list(_idle) if key[0] == os.getpid()]
    for worker in (worker for workers in mine for worker in workers):
        worker.stop()
