"""Run all arms on all prompts, batch by batch in rotating order, so that disturbances affect them equally.

Answers are files of a run's folder, from which an interrupted run resumes.
"""

import csv
import io
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ..artifacts.files import format_json, parse_json, read_lines, read_object, write_text
from ..drafters.hidden_state import DraftModel
from ..models.introspection import device_of
from ..policy.policy import LossyPolicy, compute_fingerprint
from ..tasks.base import AnswerTask, Problem
from ..training.jobs import describe_run
from ..training.processes import ALONE, Processes, TellUnit
from ..training.run_folder import RunFolder
from ..validation import one_line
from .arms import Arm, Draft, Loaded
from .metrics import ArmMetrics, compute_metrics
from .writer import ArmOutput, TextWriter


ARM_FACTS = ("kind", "lossless", "draft")  # of an arm in the record
RECORD, ANSWERS, SUMMARY = "run.json", "answers.jsonl", "summary.csv"
Make: TypeAlias = Callable[[Loaded], tuple[TextWriter, list[Arm]]]
Batch = tuple[int, int, int]  # its size, its number among batches of this size, the index of its first prompt


@dataclass
class ComparisonResult:
    """Result of `compare_arms`.

    Args:
        left_out: arms that were not measured, and why. warm_up_seconds: duration of each arm's first batch, which is not counted.
    """

    answers: list[ArmOutput]
    metrics: list[ArmMetrics]
    left_out: dict[str, str]
    warm_up_seconds: dict[str, float]


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
        "arms": {
            arm.name: {name: getattr(arm, name) for name in ARM_FACTS} | _describe_policy(arm.policy) for arm in arms
        },
        "machine": processes.find_machine(device_of(writer.target)),
    }


def _describe_policy(policy: LossyPolicy | None) -> dict[str, object]:
    return {} if policy is None else {"policy": policy.to_dict(), "fingerprint": compute_fingerprint(policy)}


@contextmanager
def open_run(
    out: Path | None, facts: Mapping[str, object], resume: bool = False, processes: Processes = ALONE
) -> Iterator[RunFolder]:
    """Hold the folder of a run (see `RunFolder.opened`); without `out` a temporary one, which all `processes` share."""
    if out is not None:
        with RunFolder.opened(out, RECORD, facts, resume=resume, processes=processes) as run:
            yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(processes.all(folder)[0], "run")
        with RunFolder.opened(shared, RECORD, facts, processes=processes) as run:
            yield run


def list_batches(prompts: int, sizes: Sequence[int], first: int = 0) -> list[Batch]:
    """Return full batches of prompts, so that all calls of a size are alike. first: the index of the first prompt to use."""
    for size in sizes:
        if size > prompts:
            raise ValueError(
                f"batches of {size} need as many prompts, and there are {prompts}: pass more, or a smaller --batch-size"
            )
    return [(size, n, n * size) for size in sorted(set(sizes)) for n in range(-(-first // size), prompts // size)]


def compare_arms(
    writer: TextWriter,
    arms: Sequence[Arm],
    prompts: Sequence[str],
    batches: Sequence[Batch],
    run: RunFolder | None = None,
    *,
    problems: Sequence[Problem] = (),
    loaded: tuple[Loaded, Make] | None = None,
    what: str = "comparing",
) -> ComparisonResult:
    """Measure `arms` side by side.

    Each arm first continues one batch as a warm-up. Then all arms continue each batch, one after the other, in rotating order. An optional arm that
    fails in its warm-up is left out.

    Args:
        run: has a file for each batch; those that are there are not written again. Its processes share the other
            batches, and all return the combined results. None: a temporary one.
        problems: the prompts' problems, for the writer's task, which judges answers.
        loaded: the models, and what makes the writer and the arms of models: for workers that load them themselves.
        what: is being done, for the bar.
    """
    if run is None:
        with open_run(None, {}) as run:
            return compare_arms(writer, arms, prompts, batches, run, problems=problems, loaded=loaded, what=what)
    folder, names = run.part, [f"{size:05d}-{unit:06d}.json" for size, unit, _ in batches]
    left_out = {name: why for unit in _read_units(folder) for name, why in unit["left_out"].items()}
    models, make = ((), None) if loaded is None else loaded
    measured = [arm for arm in arms if arm.name not in left_out]  # an arm that failed when the run was begun stays out
    run.processes.run(
        Measuring(writer, measured, make, prompts, batches, problems),
        models,
        run.list_missing(names),
        lambda index, unit: write_text(folder / names[index], json.dumps(unit)),
        (what, "batches"),
    )
    units, seconds = [json.loads((folder / name).read_bytes()) for name in names], dict[str, float]()
    run.processes.wait()  # all have read them, before one removes them
    for unit in units:
        left_out |= unit["left_out"]  # an arm that failed in any process is left out in all
        seconds = unit["seconds"] | seconds
    answers = [ArmOutput(**line) for unit in units for line in unit["answers"] if line["arm"] not in left_out]
    answers.sort(key=lambda answer: (answer.batch_size, answer.unit, answer.prompt))
    metrics = compute_metrics(answers, [arm for arm in arms if arm.name not in left_out])
    return ComparisonResult(answers, metrics, left_out, seconds)


def _read_units(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_bytes()) for file in sorted(folder.glob("[0-9]*.json"))]


class Measuring:
    """Units of work: batches, which all arms continue. Each process warms up the arms once; one that loads the models itself makes them, too."""

    def __init__(
        self,
        writer: TextWriter,
        arms: Sequence[Arm],
        make: Make | None,
        prompts: Sequence[str],
        batches: Sequence[Batch],
        problems: Sequence[Problem],
    ):
        self.names, self.ready, self.make = {arm.name for arm in arms}, (writer, list(arms)), make
        self.prompts, self.batches, self.problems = prompts, batches, problems
        self.warm, self.turn = set[int](), 0
        self.left_out, self.seconds = dict[str, str](), dict[str, float]()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "ready"}

    def __call__(
        self, models: Loaded | tuple[()], indices: Sequence[int], tell: TellUnit
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield for each batch the answers, the arms left out here and why, and seconds of the warm-up, as JSON."""
        if not hasattr(self, "ready"):
            assert models and self.make is not None
            writer, arms = self.make(models)
            self.ready = writer, [arm for arm in arms if arm.name in self.names]
        writer, arms = self.ready
        batches = [(index, *self.batches[index]) for index in indices]
        for size in sorted({size for _, size, _, _ in batches} - self.warm):
            self.warm.add(size)
            self._warm_up(size, lambda arm: tell(indices[0], 0, f"warm-up: {arm}"))
        for index, size, unit, first in batches:
            shift, answers = self.turn % len(arms), list[ArmOutput]()
            for done, arm in enumerate(arms[shift:] + arms[:shift]):
                tell(index, done / len(arms), arm.name)
                answers += writer.write(arm, list(self.prompts[first : first + size]), first, unit)
            for answer in answers:
                answer.right = _is_right(writer.task, self.problems, answer)
            self.turn += 1
            lines = [asdict(answer) for answer in answers]
            yield index, {"answers": lines, "left_out": self.left_out, "seconds": self.seconds}

    def _warm_up(self, size: int, say: Callable[[str], None]) -> None:
        """Continue a batch with each arm; leave out optional ones that fail."""
        writer, arms = self.ready
        for arm in list(arms):
            say(arm.name)
            try:
                answers = writer.write(arm, list(self.prompts[:size]), 0, 0)
            except Exception as error:  # compilers and models raise errors of any type
                if not arm.optional:
                    raise
                self.left_out[arm.name] = f"{type(error).__name__}: {one_line(error, 200)}"
                arms.remove(arm)
            else:
                self.seconds[f"{arm.name}, batch {size}"] = answers[0].seconds


def _is_right(task: AnswerTask | None, problems: Sequence[Problem], answer: ArmOutput) -> bool | None:
    """Return whether the task judges an answer to be right; an answer that has none is wrong. None: unknown."""
    if task is None or problems[answer.prompt].gold is None:
        return None
    problem = problems[answer.prompt]
    return bool(task.right(problem, task.extract(problem, task.cut(answer.text))))


def finish_run(
    run: RunFolder,
    metrics: Sequence[ArmMetrics],
    trial: Sequence[ArmMetrics] = (),
    policy: LossyPolicy | None = None,
    **more: object,
) -> None:
    """Write the answers, a line each, the figures and the record to the run's `out`.

    Args:
        trial: figures on other problems, on which settings were chosen. policy: the recommended one.
        more: stored in the record under "found".
    """
    answers = [line for unit in _read_units(run.part) for line in unit["answers"]]
    answers.sort(key=lambda line: (line["batch_size"], line["arm"], line["prompt"]))
    with run.result() as folder:
        write_text(folder / ANSWERS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in answers))
        write_text(folder / SUMMARY, format_csv(metrics, trial))
        write_text(folder / RECORD, format_json(run.facts | {"found": more}))
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


def read_run(folder: Path) -> tuple[dict[str, Any], list[ArmOutput]]:
    """Return the record and the answers of a run. Raises: `OSError` or `ValueError`, one line, for another folder."""
    record = read_object(folder / RECORD)
    with open(folder / ANSWERS, "rb") as file:
        lines = [parse_json(line, where) for where, line in read_lines(file, str(folder / ANSWERS))]
    if not lines:
        raise ValueError(f"{folder / ANSWERS} is empty")
    try:
        return record, [ArmOutput(**line) for line in lines]
    except TypeError:
        raise ValueError(f"{folder} was not written by this version of compare or tune: run it again") from None
