"""All arms on all prompts, batch by batch and in turns, so that what disturbs the machine disturbs them alike."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..tasks.base import AnswerTask, Problem
from ..validation import MOST_ROWS, check_int, one_line
from .arms import Arm
from .metrics import ArmMetrics, compute_metrics
from .results import ResultStore
from .writer import ArmOutput, Writer


Tell = Callable[[str], None]  # after each call, of which arm it was
Batch = tuple[int, int, int]  # its size, its number among those of this size, the place of its first prompt


@dataclass
class ComparisonResult:
    """Outcome of `compare_arms`.

    Args:
        left_out: arms that were not measured, and why. warm_up_seconds: of each arm's first batch, which is not counted.
    """

    answers: list[ArmOutput]
    metrics: list[ArmMetrics]
    left_out: dict[str, str] = field(default_factory=dict)
    warm_up_seconds: dict[str, float] = field(default_factory=dict)


def list_batches(prompts: int, sizes: Sequence[int], first: int = 0) -> list[Batch]:
    """List full batches of prompts, so that every call of a size is alike. first: the place of the first prompt that is used."""
    for size in sizes:
        check_int("batch size", size, 1, MOST_ROWS)
        if size > prompts:
            raise ValueError(
                f"batches of {size} need as many prompts, and there are {prompts}: pass more, or a smaller --batch-size"
            )
    return [(size, n, n * size) for size in sorted(set(sizes)) for n in range(-(-first // size), prompts // size)]


def compare_arms(
    writer: Writer,
    arms: Sequence[Arm],
    prompts: Sequence[str],
    batches: Sequence[Batch],
    *,
    store: ResultStore | None = None,
    problems: Sequence[Problem] = (),
    tell: Tell = lambda arm: None,
) -> ComparisonResult:
    """Measure `arms` side by side.

    Each arm continues one batch that is not counted. Then all arms continue each batch, one after the other, in an order that
    rotates. An optional arm that fails while it is warmed up is left out.

    Args:
        store: where answers are stored; batches that it has are not written again. Of its processes each measures its share of
            the others, and all return what all have found.
        problems: what the prompts ask, for the writer's task, which tells right answers.
    """
    store = ResultStore() if store is None else store
    left_out, seconds = dict[str, str](), dict[str, float]()
    for arm in arms:
        if arm.optional and not store.measures(arm.name):
            left_out[arm.name] = "it failed when this run was begun"
    arms = [arm for arm in arms if arm.name not in left_out]
    todo = store.processes.share([batch for batch in batches if not store.has(*batch[:2])])
    for size in sorted({size for size, _, _ in todo}):
        for arm in list(arms):
            try:
                answers = writer.write(arm, list(prompts[:size]), 0, 0)
            except Exception as error:  # what a compiler or a model raises is of any kind
                if not arm.optional:
                    raise
                left_out[arm.name] = f"{type(error).__name__}: {one_line(error, 200)}"
                arms.remove(arm)
                continue
            seconds[f"{arm.name}, batch {size}"] = answers[0].seconds
            tell(f"warm-up: {arm.name}")
    measured: list[tuple[int, int, list[ArmOutput]]] = []
    for turn, (size, unit, first) in enumerate(todo):
        shift, written = turn % len(arms), list[ArmOutput]()
        for arm in arms[shift:] + arms[:shift]:
            answers = writer.write(arm, list(prompts[first : first + size]), first, unit)
            for answer in answers:
                answer.right = _is_right(writer.task, problems, answer)
            written += answers
            tell(arm.name)
        store.add(size, unit, written)
        measured.append((size, unit, written))
    for batches_of_other, others_out, others_seconds in store.processes.others((measured, left_out, seconds)):
        for size, unit, answers in batches_of_other:
            store.take(size, unit, answers)
        left_out, seconds = left_out | others_out, others_seconds | seconds
    arms = [arm for arm in arms if arm.name not in left_out]  # what failed anywhere is compared nowhere
    these = {batch[:2] for batch in batches}
    found = [a for a in store.answers if (a.batch_size, a.unit) in these and a.arm not in left_out]
    found.sort(key=lambda answer: (answer.batch_size, answer.unit, answer.prompt))
    return ComparisonResult(found, compute_metrics(found, arms), left_out, seconds)


def _is_right(task: AnswerTask | None, problems: Sequence[Problem], answer: ArmOutput) -> bool | None:
    """Return whether the task calls an answer right; one that cannot be found in the text is wrong. None: it is not known."""
    if task is None or problems[answer.prompt].gold is None:
        return None
    problem = problems[answer.prompt]
    return bool(task.right(problem, task.extract(problem, task.cut(answer.text))))
