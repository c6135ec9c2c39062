"""Store the answers of a comparison: in memory, or in a folder from which an interrupted run resumes."""

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path

from ..artifacts.files import format_json, name_full_disk, write_text
from ..training.processes import ALONE, Lock, Processes
from ..training.resumable import compute_key, folders, prepare, read_record, read_sealed_lines, seal_line
from .metrics import ArmMetrics
from .writer import ArmOutput


RECORD, BATCHES, ANSWERS, SUMMARY = "run.json", "batches{}.jsonl", "answers.jsonl", "summary.csv"
LONGEST = 2**30  # bytes of a batch's line, which has many rows and arms, each with tokens and their texts


class ResultStore:
    """The answers of finished batches."""

    def __init__(self, processes: Processes = ALONE) -> None:
        self.processes = processes
        self.answers: list[ArmOutput] = []
        self._done: set[tuple[int, int]] = set()

    def has(self, batch_size: int, unit: int) -> bool:
        """Return whether all arms have finished this batch."""
        return (batch_size, unit) in self._done

    def measures(self, arm: str) -> bool:
        """Return whether an arm is measured: one left out when the run was started stays out."""
        return not self.answers or any(answer.arm == arm for answer in self.answers)

    def add(self, batch_size: int, unit: int, answers: Sequence[ArmOutput]) -> None:
        """Store the answers of all arms to a batch."""
        self.take(batch_size, unit, answers)

    def take(self, batch_size: int, unit: int, answers: Sequence[ArmOutput]) -> None:
        """Take over the answers of a batch that another process ran and stores."""
        self.answers += answers
        self._done.add((batch_size, unit))


class ResultFolder(ResultStore):
    """A result store in a folder beside `out`, with one sealed line per batch; `finish` turns the folder into `out`.

    Args:
        facts: what determines the run; a folder with other facts is not resumed.
        processes: they share the batches; each writes a separate file, and reads all.

    Raises: `ValueError`, one line, if `out` exists, if there is an unfinished run and no `resume`, or one with other facts, or one that another
    process is running.
    """

    def __init__(self, out: Path, facts: dict[str, object], resume: bool, processes: Processes = ALONE):
        super().__init__(processes)
        self.out, self.part = folders(out)
        self._lock = Lock(self.part)
        processes.on_first(self._lock.acquire)
        try:
            processes.on_first(self._refuse_finished)
            processes.on_first(lambda: prepare(self.out, self.part, facts, resume, RECORD))
            self._file, self._key = self.part / BATCHES.format(processes.rank or ""), compute_key(self.part / RECORD)
            for file in sorted(self.part.glob(BATCHES.format("*"))):
                self._read(file)
        except BaseException:
            self.release()
            raise
        processes.wait()  # reading removes torn lines; nobody may write before all have read

    def _refuse_finished(self) -> None:
        """Refuse a finished run whose folder has the name of an unfinished one; a run killed at its end still has batch files."""
        if (self.part / ANSWERS).is_file() and not list(self.part.glob(BATCHES.format("*"))):
            raise ValueError(f"{self.part} is a finished run, and no unfinished one of {self.out}: pass another --out")

    def release(self) -> None:
        """Release the folder for other processes."""
        self._lock.release()

    def add(self, batch_size: int, unit: int, answers: Sequence[ArmOutput]) -> None:
        super().add(batch_size, unit, answers)
        line = {"batch_size": batch_size, "unit": unit, "answers": [answer.to_dict() for answer in answers]}
        with name_full_disk(self._file), open(self._file, "a", encoding="utf-8") as file:
            file.write(seal_line(line, self._key))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> None:
        for where, batch in read_sealed_lines(path, self._key, LONGEST):
            if self.has(batch["batch_size"], batch["unit"]):  # answers counted twice would narrow every bound
                raise ValueError(f"{where}: the batch stands here twice: delete {self.part} and start again")
            self.take(batch["batch_size"], batch["unit"], [ArmOutput.from_dict(entry) for entry in batch["answers"]])

    def finish(self, found: Sequence[ArmMetrics], trial: Sequence[ArmMetrics] = (), **more: object) -> None:
        """Write the answers in Spec-Bench's format and the figures, and rename the folder to `out`.

        Args:
            trial: figures on other problems, on which settings were chosen. more: stored in the record under "found".
        """
        ordered = sorted(self.answers, key=lambda a: (a.batch_size, a.arm, a.prompt))
        try:
            write_text(self.part / ANSWERS, "".join(seal_line(answer.to_dict(), self._key) for answer in ordered))
            write_text(self.part / SUMMARY, format_csv(found, trial))
            write_text(self.part / RECORD, format_json(read_record(self.part / RECORD) | {"found": more}))
            os.rename(self.part, self.out)
        finally:
            self.release()
        for file in self.out.glob(BATCHES.format("*")):
            file.unlink()  # after the rename, so a run killed in between loses nothing


def format_csv(found: Sequence[ArmMetrics], trial: Sequence[ArmMetrics] = ()) -> str:
    """Return the figures as CSV, a line per arm and batch size; with a trial, a first column names the part of the problems."""
    text, rows = io.StringIO(), [entry.to_dict() for entry in found]
    if trial:
        parts = {"trial": trial, "certificate": found}
        rows = [{"part": part, **entry.to_dict()} for part, figures in parts.items() for entry in figures]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
