"""Run all arms on all prompts, batch by batch in rotating order, so that disturbances of the machine affect them equally."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..tasks.base import AnswerTask, Problem
from ..validation import MOST_ROWS, check_int, one_line
from .arms import Arm
from .metrics import ArmMetrics, compute_metrics
from .results import ResultStore
from .writer import ArmOutput, TextWriter


Tell = Callable[[str], None]  # called after each call with the arm's name
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
    tell: Tell = lambda arm: None,
) -> ComparisonResult:
    """Measure `arms` side by side.

    Each arm first continues one batch as a warm-up. Then all arms continue each batch, one after the other, in rotating order. An optional arm that
    fails in its warm-up is left out.

    Args:
        store: stores the answers; batches it contains are not written again. Its processes share the other batches, and all return
            the combined results.
        problems: the prompts' problems, for the writer's task, which judges answers.
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
            except Exception as error:  # compilers and models raise errors of any type
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
    arms = [arm for arm in arms if arm.name not in left_out]  # an arm that failed in any process is left out in all
    these = {batch[:2] for batch in batches}
    found = [a for a in store.answers if (a.batch_size, a.unit) in these and a.arm not in left_out]
    found.sort(key=lambda answer: (answer.batch_size, answer.unit, answer.prompt))
    return ComparisonResult(found, compute_metrics(found, arms), left_out, seconds)


def _is_right(task: AnswerTask | None, problems: Sequence[Problem], answer: ArmOutput) -> bool | None:
    """Return whether the task judges an answer to be right; an answer not found in the text is wrong. None: unknown."""
    if task is None or problems[answer.prompt].gold is None:
        return None
    problem = problems[answer.prompt]
    return bool(task.right(problem, task.extract(problem, task.cut(answer.text))))
