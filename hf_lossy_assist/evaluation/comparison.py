"""Run all arms on all prompts, batch by batch in rotating order, so that disturbances of the machine affect them equally."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..tasks.base import AnswerTask, Problem
from ..training.processes import TellUnit
from ..validation import MOST_ROWS, check_int, one_line
from .arms import Arm, Loaded
from .metrics import ArmMetrics, compute_metrics
from .results import ResultStore
from .writer import ArmOutput, TextWriter


Make: TypeAlias = Callable[[Loaded], tuple[TextWriter, list[Arm]]]
Measured: TypeAlias = tuple[list[ArmOutput], dict[str, str], dict[str, float]]
Batch = tuple[int, int, int]  # its size, its number among batches of this size, the index of its first prompt


@dataclass
class ComparisonResult:
    """Result of `compare_arms`.

    Args:
        left_out: arms that were not measured, and why. warm_up_seconds: duration of each arm's first batch, which is not counted.
    """

    answers: list[ArmOutput]
    metrics: list[ArmMetrics]
    left_out: dict[str, str] = field(default_factory=dict)
    warm_up_seconds: dict[str, float] = field(default_factory=dict)


def list_batches(prompts: int, sizes: Sequence[int], first: int = 0) -> list[Batch]:
    """Return full batches of prompts, so that all calls of a size are alike. first: the index of the first prompt to use."""
    for size in sizes:
        check_int("batch size", size, 1, MOST_ROWS)
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
    *,
    store: ResultStore | None = None,
    problems: Sequence[Problem] = (),
    loaded: tuple[Loaded, Make] | None = None,
    what: str = "comparing",
) -> ComparisonResult:
    """Measure `arms` side by side.

    Each arm first continues one batch as a warm-up. Then all arms continue each batch, one after the other, in rotating order. An optional arm that
    fails in its warm-up is left out.

    Args:
        store: stores the answers; batches it contains are not written again. Its processes share the other batches, and all return
            the combined results.
        problems: the prompts' problems, for the writer's task, which judges answers.
        loaded: the models, and what makes the writer and the arms of models: for workers that load them themselves.
        what: is being done, for the bar.
    """
    store = ResultStore() if store is None else store
    absent = [arm.name for arm in arms if arm.optional and not store.measures(arm.name)]
    left_out, seconds = dict.fromkeys(absent, "it failed when this run was begun"), dict[str, float]()
    arms = [arm for arm in arms if arm.name not in left_out]
    todo = [index for index, batch in enumerate(batches) if not store.has(*batch[:2])]
    models, make = ((), None) if loaded is None else loaded
    measuring = Measuring(writer, arms, make, prompts, batches, problems)
    measured: list[tuple[int, int, list[ArmOutput]]] = []

    def write(index: int, result: Measured) -> None:
        answers, left_out_there, seconds_there = result
        left_out.update(left_out_there)
        seconds.update(seconds_there | seconds)
        store.add(*batches[index][:2], answers)
        measured.append((*batches[index][:2], answers))

    store.processes.run(measuring, models, todo, write, (what, "batches"))
    for batches_of_other, others_out, others_seconds in store.processes.others((measured, left_out, seconds)):
        for size, unit, answers in batches_of_other:
            store.take(size, unit, answers)
        left_out, seconds = left_out | others_out, others_seconds | seconds
    arms = [arm for arm in arms if arm.name not in left_out]  # an arm that failed in any process is left out in all
    these = {batch[:2] for batch in batches}
    here = [a for a in store.answers if (a.batch_size, a.unit) in these and a.arm not in left_out]
    here.sort(key=lambda answer: (answer.batch_size, answer.unit, answer.prompt))
    return ComparisonResult(here, compute_metrics(here, arms), left_out, seconds)


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
        self.names, self.made, self.make = {arm.name for arm in arms}, (writer, list(arms)), make
        self.prompts, self.batches, self.problems = prompts, batches, problems
        self.warm, self.turn = set[int](), 0
        self.left_out, self.seconds = dict[str, str](), dict[str, float]()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "made"}

    def __call__(
        self, models: Loaded | tuple[()], indices: Sequence[int], tell: TellUnit
    ) -> Iterator[tuple[int, Measured]]:
        """Yield for each batch the answers, the arms left out here and why, and seconds of the warm-up."""
        if not hasattr(self, "made"):
            assert models and self.make is not None
            writer, arms = self.make(models)
            self.made = writer, [arm for arm in arms if arm.name in self.names]
        writer, arms = self.made
        batches = [(index, *self.batches[index]) for index in indices]
        for size in sorted({size for _, size, _, _ in batches} - self.warm):
            self.warm.add(size)
            self._warm_up(size, lambda arm: tell(indices[0], 0, f"warm-up: {arm}"))
        for index, size, unit, first in batches:
            shift, written = self.turn % len(arms), list[ArmOutput]()
            for done, arm in enumerate(arms[shift:] + arms[:shift]):
                tell(index, done / len(arms), arm.name)
                answers = writer.write(arm, list(self.prompts[first : first + size]), first, unit)
                for answer in answers:
                    answer.right = _is_right(writer.task, self.problems, answer)
                written += answers
            self.turn += 1
            yield index, (written, self.left_out, self.seconds)

    def _warm_up(self, size: int, say: Callable[[str], None]) -> None:
        """Continue a batch with each arm; leave out optional ones that fail."""
        writer, arms = self.made
        for arm in list(arms):
            say(arm.name)
            try:
                answers = writer.write(arm, list(self.prompts[:size]), 0, 0)
            except Exception as error:  # compilers and models raise errors of any type
                if not arm.optional:
                    raise
                self.left_out[arm.name] = f"{type(error).__name__}: {one_line(error, 200)}"
                arms.remove(arm)
                continue
            self.seconds[f"{arm.name}, batch {size}"] = answers[0].seconds


def _is_right(task: AnswerTask | None, problems: Sequence[Problem], answer: ArmOutput) -> bool | None:
    """Return whether the task judges an answer to be right; an answer not found in the text is wrong. None: unknown."""
    if task is None or problems[answer.prompt].gold is None:
        return None
    problem = problems[answer.prompt]
    return bool(task.right(problem, task.extract(problem, task.cut(answer.text))))
