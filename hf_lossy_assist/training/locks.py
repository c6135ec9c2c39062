"""One process at a time at a folder: a lock that the operating system releases when its process ends, however that ends."""

import json
import os
import platform
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ..artifacts.files import write_text
from ..artifacts.reading import read_object
from ..validation import one_line
from .jobs import prepare
from .processes import ALONE, Processes


class Lock:
    """The right to write a folder, held from `acquire` to `release`. Meanwhile two hidden files lie beside the folder: the lock, and who holds it."""

    def __init__(self, folder: Path):
        """`folder`: need not exist."""
        self.folder = folder
        self.file = folder.with_name(f".{folder.name}.lock")
        self.holder = folder.with_name(
            f"{self.file.name}.json"
        )  # another file: on Windows a locked one cannot be read
        self._lock = FileLock(self.file, thread_local=False)  # a finalizer may run in any thread

    def acquire(self) -> None:
        """Take the lock. Raises: `ValueError`, one line, where another process has it, with that process."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            holder = self._holder()
            there = f" ({holder})" if holder else ""
            raise ValueError(
                f"another process is at {self.folder}{there}: wait for it, or choose another --out"
            ) from None
        except NotImplementedError:
            warnings.warn(
                f"the file system of {self.folder.parent} has no locks: see to it that no other process writes {self.folder}",
                stacklevel=2,
            )
        facts = {
            "pid": os.getpid(),
            "host": platform.node(),
            "since": datetime.now().astimezone().isoformat(" ", "seconds"),
        }
        write_text(self.holder, json.dumps(facts) + "\n")

    def release(self) -> None:
        """Let others have it, without the files. Nothing, where it is not held."""
        if not self._lock.is_locked:
            return
        self.holder.unlink(missing_ok=True)
        with suppress(PermissionError):  # Windows deletes no open file
            self.file.unlink(missing_ok=True)
        self._lock.release()

    def _holder(self) -> str:
        """The process that holds the lock; nothing where it has not written that down yet."""
        try:
            facts = read_object(self.holder)
        except (OSError, ValueError):
            return ""
        return one_line(f"pid {facts.get('pid')} on {facts.get('host')}, since {facts.get('since')}")


@contextmanager
def begun(
    out: Path, part: Path, facts: dict[str, Any], record: str, *, resume: bool = False, processes: Processes = ALONE
) -> Iterator[bool]:
    """Hold the folder `part` of the unfinished run for the block, made or checked by the first of `processes`.

    Args:
        out: the folder of the run's outcome. facts: what the run is of. record: the file in `part` with `facts`.

    Yields: whether there is anything left to do.

    Raises: `ValueError`, one line, in all processes: another process is at it, `out` exists, or the unfinished run is of something else.
    """
    lock = Lock(part)
    try:
        processes.on_first(lock.acquire)
        processes.on_first(lambda: prepare(out, part, facts, resume, record))
        yield (part / record).is_file()
    finally:
        lock.release()
