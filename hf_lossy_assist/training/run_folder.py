"""Run long jobs that can be killed and resumed: a folder with a record and a file for each unit.

A result may be a folder of the `datasets` package, which is written and read here too.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from filelock import FileLock, Timeout

from ..artifacts.files import JSONObject, check_new, format_json, read_object, write_bytes, write_text
from ..tensors import fork_random
from ..validation import one_line, shown
from .processes import ALONE, Models, Processes, TellUnit


if TYPE_CHECKING:
    from datasets import Dataset


FREE = "source", "settings"  # entries of a record that may differ in a resumed run; settings are compared one by one
Tell = Callable[[float], None]  # called with the share of a unit that is done


def folders(out: str | Path) -> tuple[Path, Path]:
    """Return the folder of a run's result and that of the unfinished run."""
    out = Path(out)
    if out.name in ("", "..") or out.suffix == ".partial":
        raise ValueError(f"--out: expected the name of a new folder, and not one in .partial, got {shown(str(out))}")
    return out, out.with_name(out.name + ".partial")


def name_units(count: int, ending: str) -> list[str]:
    """Return the file names of the units of a run."""
    return [f"{index:05d}.{ending}" for index in range(count)]


class RunFolder:
    """The folder `out`.partial of an unfinished run, open for one job at a time.

    A unit that exists is whole: it is written under a temporary name.
    """

    def __init__(self, out: str | Path, record: str, facts: Mapping[str, object], processes: Processes = ALONE):
        """Take `facts`: all that determines the result, for the file `record`. Other `facts` do not resume the run."""
        self.out, self.part = folders(out)
        self.record, self.processes = record, processes
        self.facts: JSONObject = json.loads(json.dumps(facts))
        # A finalizer may run in any thread.
        self._lock = FileLock(self.part.with_name(f".{self.part.name}.lock"), thread_local=False)

    @classmethod
    @contextmanager
    def opened(
        cls,
        out: str | Path,
        record: str,
        facts: Mapping[str, object],
        *,
        resume: bool = False,
        processes: Processes = ALONE,
    ) -> Iterator["RunFolder"]:
        """Hold the folder within the context, created or checked by the first of `processes`.

        Raises: `ValueError` in all processes if it cannot be this run's, or another process has it.
        """
        run = cls(out, record, facts, processes)
        with processes.connected():
            try:
                processes.on_first(lambda: run._start(resume))
                yield run
            finally:
                run._release()

    def _start(self, resume: bool) -> None:
        check_new(self.out)
        self.part.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            busy = Path(self._lock.lock_file).exists()
            why = f"another process is at {self.part}: wait for it" if busy else f"{self.part} cannot be written"
            raise ValueError(f"{why}, or choose another --out") from None
        record = self.part / self.record
        if record.is_file():
            if not resume:
                raise ValueError(f"{self.part} holds an unfinished run: pass --resume to go on, or delete it")
            self._refuse_other_run(record)
            return
        self.part.mkdir(exist_ok=True)
        if any(file.name[0] != "." for file in self.part.iterdir()):
            raise ValueError(
                f"{self.part} is to hold the unfinished run, and holds files of none: move it, or choose another --out"
            )
        write_text(record, format_json(self.facts))

    def _refuse_other_run(self, record: Path) -> None:
        """Refuse to resume a run with another record."""
        before, here = ({**facts, **facts.get("settings", {})} for facts in (read_object(record), self.facts))
        for name in here:
            if name not in FREE and here[name] != before.get(name):
                raise ValueError(
                    f"{self.part} was made with {name} {shown(before.get(name), 300)}, this run has {shown(here[name], 300)}: "
                    "use the same, or delete it"
                )

    def _release(self) -> None:
        """Release the lock and remove its file; do nothing if it is not held."""
        if self._lock.is_locked:
            with suppress(PermissionError):  # Windows does not delete open files
                Path(self._lock.lock_file).unlink(missing_ok=True)
            self._lock.release()

    def list_missing(self, names: Sequence[str]) -> list[int]:
        """Return the indices of missing units, the same in all processes, before any of them writes."""
        return self.processes.all([i for i, name in enumerate(names) if not (self.part / name).is_file()])[0]

    def write_units(
        self,
        names: Sequence[str],
        make: Callable[[Models, int, Tell], bytes],
        models: Models,
        seed: int,
        named: tuple[str, str] = ("collecting", "batches"),
    ) -> None:
        """Write the units `names`, except existing ones; `make(models, index, tell)` returns the bytes of one.

        Random numbers depend only on `seed` and the index. `tell` moves the bar within a unit.
        """
        self.processes.run(
            partial(_make_units, make, seed),
            models,
            self.list_missing(names),
            lambda index, data: write_bytes(self.part / names[index], data),
            named,
        )

    @contextmanager
    def result(self) -> Iterator[Path]:
        """Yield a new folder; without an error it becomes `out`, and the unfinished run is removed."""
        folder = self.part / "0-result"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        yield folder
        os.rename(folder, self.out)
        self.clear()

    def clear(self) -> None:
        """Remove what the run wrote, its record last; then the folder, if it has no other files."""
        for file in (*self.part.glob("[0-9]*"), *self.part.glob(".[0-9]*")):
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        (self.part / self.record).unlink()
        with suppress(OSError):
            self.part.rmdir()


def _make_units(
    make: Callable[[Models, int, Tell], bytes], seed: int, models: Models, indices: Sequence[int], tell: TellUnit
) -> Iterator[tuple[int, bytes]]:
    device = models[0].device
    for index in indices:
        with fork_random(device):
            torch.manual_seed(seed * 1_000_003 + index)
            data = make(models, index, partial(tell, index))
        yield index, data


def finish_dataset(
    run: RunFolder,
    facts: JSONObject,
    make: Callable[[Path], "Dataset"],
    card: Callable[[JSONObject, "Dataset"], str],
    **saving: object,
) -> None:
    """Write the dataset that `make(cache)` returns, with the record `facts` and its card, as the result of `run`."""
    with run.result() as folder:
        data = make(folder / "cache")
        data.save_to_disk(str(folder), **saving)
        write_text(folder / run.record, format_json(facts))
        write_text(folder / "README.md", card(facts, data))
        shutil.rmtree(folder / "cache", ignore_errors=True)


def open_dataset(folder: Path, record: str, command: str) -> JSONObject:
    """Read the record of a finished dataset made by `command`."""
    if not (folder / record).is_file():
        unfinished = Path(f"{folder}.partial").is_dir()
        hint = f" ({folder}.partial is unfinished: {command.partition(' --')[0]} --resume)" if unfinished else ""
        raise ValueError(f"{folder} is no dataset of {command}: no {record} in it{hint}")
    return read_object(folder / record)


@contextmanager
def name_unreadable(folder: Path) -> Iterator[None]:
    """Turn any error of reading a dataset, since damaged files raise many types, into one that names `folder`."""
    try:
        yield
    except Exception as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"{folder} cannot be read ({reason}): make it again") from None


def load_rows(folder: Path) -> "Dataset":
    """Load the rows of a finished dataset."""
    from datasets import load_from_disk

    with name_unreadable(folder):
        try:
            return load_from_disk(str(folder))
        except IndexError:  # raised by `datasets` for a dataset that was saved without rows
            return []
