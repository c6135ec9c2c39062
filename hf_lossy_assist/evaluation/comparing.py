"""All arms on all prompts, batch by batch and in turns, so that what disturbs the machine disturbs them alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..tasks.base import AnswerTask, Problem
from ..validation import MOST_ROWS, check_int
from .arm_metrics import ArmMetrics, compute_metrics
from .arms import STATIC, Arm, format_failure
from .measuring import ArmOutput, Writer
from .results import ResultStore


Tell = Callable[[str, int], None]  # which call begins, with 0; which one is over, with 1


@dataclass
class Comparison:
    """Outcome of `compare`.

    Args:
        left_out: arms that were not measured, and why. warm_up_seconds: of each arm's first batch, which is not counted.
    """

    answers: list[ArmOutput]
    figures: list[ArmMetrics]
    left_out: dict[str, str] = field(default_factory=dict)
    warm_up_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """Batches of prompts: full ones only, so that every call of a size is alike.

    Args:
        prompts: how many there are. first: the place of the first that is used.
    """

    prompts: int
    sizes: Sequence[int]
    first: int = 0

    def __post_init__(self) -> None:
        for size in self.sizes:
            check_int("batch size", size, 1, MOST_ROWS)
            if size > self.prompts:
                raise ValueError(
                    f"batches of {size} need as many prompts, and there are {self.prompts}: pass more, or a smaller --batch-size"
                )

    def all(self) -> list[tuple[int, int, int]]:
        """(batch size, number of the batch, place of its first prompt) of each batch."""
        return [
            (size, unit, unit * size)
            for size in sorted(set(self.sizes))
            for unit in range(-(-self.first // size), self.prompts // size)
        ]


def compare(
    writer: Writer, arms: Sequence[Arm], prompts: Sequence[str], batches: Batches, *, store: ResultStore | None = None,
    task: AnswerTask | None = None, problems: Sequence[Problem] = (), tell: Tell = lambda what, done: None,
) -> Comparison:  # fmt: skip
    """Measure `arms` side by side.

    Each arm continues one batch that is not counted; then all arms continue each batch, one behind the other, in an order that
    rotates. An arm that fails while it is warmed up is left out, if it is not one that the others are compared with.

    Args:
        store: where answers are kept; batches that it has already are not written again. Of its processes each measures its share
            of the others, and all return what all have found.
        task, problems: what the prompts ask, to tell right answers.
        tell: called before each call, with 0, and behind it, with 1.
    """
    store = ResultStore() if store is None else store
    left_out, seconds = dict[str, str](), dict[str, float]()
    if not store.keeps(STATIC) and any(arm.name == STATIC for arm in arms):
        left_out[STATIC] = "it failed when this run was begun"
        arms = [arm for arm in arms if arm.name != STATIC]
    arms = list(arms)
    processes = store.processes
    todo = processes.share([batch for batch in batches.all() if not store.has(batch[0], batch[1])])
    for size in sorted({size for size, _, _ in todo}):
        for arm in list(arms):
            try:
                tell(f"warm-up: {arm.name}", 0)
                answers = writer.write(arm, list(prompts[:size]), 0, 0)
            except Exception as error:  # what a compiler or a model raises is of any kind
                if arm.name != STATIC:
                    raise
                left_out[arm.name] = format_failure(error)
                arms.remove(arm)
                continue
            seconds[f"{arm.name}, batch {size}"] = answers[0].seconds
            tell(f"warm-up: {arm.name}", 1)
    measured: list[tuple[int, int, list[ArmOutput]]] = []
    for turn, (size, unit, first) in enumerate(todo):
        shift, batch = turn % len(arms), list(prompts[first : first + size])
        written: list[ArmOutput] = []
        for arm in arms[shift:] + arms[:shift]:
            tell(arm.name, 0)
            answers = writer.write(arm, batch, first, unit)
            for answer in answers:
                answer.right = _is_right(task, problems, answer)
            written += answers
            tell(arm.name, 1)
        store.add(size, unit, written)
        measured.append((size, unit, written))
    for batches_of_other, others_out, others_seconds in processes.others((measured, left_out, seconds)):
        for size, unit, answers in batches_of_other:
            store.take(size, unit, answers)
        left_out, seconds = left_out | others_out, others_seconds | seconds
    arms = [arm for arm in arms if arm.name not in left_out]  # what failed anywhere is compared nowhere
    these = {(size, unit) for size, unit, _ in batches.all()}
    answers = [
        answer for answer in store.answers if (answer.batch_size, answer.unit) in these and answer.arm not in left_out
    ]
    answers.sort(key=lambda answer: (answer.batch_size, answer.unit, answer.prompt))
    return Comparison(answers, compute_metrics(answers, arms), left_out, seconds)


def _is_right(task: AnswerTask | None, problems: Sequence[Problem], answer: ArmOutput) -> bool | None:
    """Return whether the task calls an answer right; one that cannot be found in the text is wrong. None: the task does not know."""
    if task is None or problems[answer.prompt].gold is None:
        return None
    problem = problems[answer.prompt]
    return bool(task.right(problem, task.extract(problem, task.cut(answer.text))))
