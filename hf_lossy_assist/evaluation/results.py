"""Store the answers of a comparison: in memory, or in a folder from which an interrupted run resumes."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..artifacts.files import format_json, write_text
from ..drafters.hidden_state import DraftModel
from ..models.introspection import device_of
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..tasks.base import Problem
from ..training.jobs import describe_run
from ..training.processes import ALONE, Processes
from ..training.run_folder import RunFolder
from .arms import Arm, Draft
from .metrics import ArmMetrics
from .writer import ArmOutput, TextWriter


RECORD, ANSWERS, SUMMARY = "run.json", "answers.jsonl", "summary.csv"


def describe_comparison(
    writer: TextWriter,
    draft: Draft,
    arms: Sequence[Arm],
    texts: Sequence[str],
    source: str,
    sizes: Sequence[int],
    problems: Sequence[Problem] = (),
    processes: Processes = ALONE,
) -> dict[str, Any]:
    """Return a comparison's record: a run resumes only if all of it is the same. Of drafters without weights it has the class."""
    named = draft if isinstance(draft, Mapping) else {"": draft}
    drafts = {f"draft {name}" if len(named) > 1 else "draft": model for name, model in named.items()}
    models = {role: model if isinstance(model, DraftModel) else None for role, model in drafts.items()}
    settings = asdict(writer.decoding) | {"batch_sizes": list(sizes)}
    right = [[problem.gold, dict(problem.extra)] for problem in problems]
    units = list(zip(texts, right, strict=True)) if right else texts
    facts: dict[str, Any] = describe_run(settings, {"target": writer.target} | models, writer.tokenizer, units, source)
    facts |= {role: {"id": type(model).__name__} for role, model in drafts.items() if models[role] is None}
    return facts | {
        "drafts": list(named) if len(named) > 1 else [facts["draft"]["id"]],
        "arms": {arm.name: _describe_arm(arm) for arm in arms},
        "machine": processes.find_machine(device_of(writer.target)),
    }


def _describe_arm(arm: Arm) -> dict[str, object]:
    facts: dict[str, object] = {"kind": arm.kind, "lossless": arm.lossless, "draft": arm.draft}
    if arm.policy is None:
        return facts
    return facts | {"policy": arm.policy.to_dict(), "fingerprint": compute_fingerprint(arm.policy)}


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
    """A result store in a run's folder, with a file for each batch; `finish` turns the folder into `out`. See `RunFolder.opened`.

    Args:
        facts: what determines the run. processes: they share the batches, and all read those that are there.
    """

    def __init__(self, out: Path, facts: dict[str, object], resume: bool, processes: Processes = ALONE):
        super().__init__(processes)
        self.out, self._open = out, ExitStack()
        self.run = self._open.enter_context(RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes))
        for file in sorted(self.run.part.glob("[0-9]*.json")):
            batch = json.loads(file.read_bytes())
            self.take(batch["batch_size"], batch["unit"], [ArmOutput.from_dict(spec) for spec in batch["answers"]])
        processes.wait()  # nobody may write before all have read

    def release(self) -> None:
        """Release the folder for other processes."""
        self._open.close()

    def add(self, batch_size: int, unit: int, answers: Sequence[ArmOutput]) -> None:
        super().add(batch_size, unit, answers)
        batch = {"batch_size": batch_size, "unit": unit, "answers": [answer.to_dict() for answer in answers]}
        write_text(self.run.part / f"{batch_size:05d}-{unit:06d}.json", json.dumps(batch))

    def finish(
        self,
        metrics: Sequence[ArmMetrics],
        trial: Sequence[ArmMetrics] = (),
        policy: LossyPolicy | None = None,
        **more: object,
    ) -> None:
        """Write the answers in Spec-Bench's format, the figures and the record to `out`.

        Args:
            trial: figures on other problems, on which settings were chosen. policy: the recommended one. more: stored in the record under "found".
        """
        ordered = sorted(self.answers, key=lambda answer: (answer.batch_size, answer.arm, answer.prompt))
        lines = [json.dumps(answer.to_dict(), ensure_ascii=False) + "\n" for answer in ordered]
        with self._open, self.run.result() as folder:
            write_text(folder / ANSWERS, "".join(lines))
            write_text(folder / SUMMARY, format_csv(metrics, trial))
            write_text(folder / RECORD, format_json(self.run.facts | {"found": more}))
            if policy is not None:
                policy.save_pretrained(folder / "policy")


def format_csv(metrics: Sequence[ArmMetrics], trial: Sequence[ArmMetrics] = ()) -> str:
    """Return the figures as CSV, a line per arm and batch size; with a trial, a first column names the part of the problems."""
    text, rows = io.StringIO(), [entry.to_dict() for entry in metrics]
    if trial:
        stages = {"trial": trial, "certificate": metrics}
        rows = [{"part": stage, **entry.to_dict()} for stage, figures in stages.items() for entry in figures]
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
