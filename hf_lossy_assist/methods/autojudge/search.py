"""Algorithm 1 of AutoJudge: find the target's tokens whose replacement by the draft's changes the answer.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039). The search does not run the target itself:
it yields requests for continuations and answers, so that many problems can share one batch of a model.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Continue:
    """A request for the target's continuation (up to `budget` tokens) of the response that begins with `prefix`."""

    prefix: list[int]
    budget: int


@dataclass(frozen=True)
class Work:
    """A request for `run()`, which may be slow: a program."""

    run: Callable[[], object]


@dataclass(frozen=True)
class Mismatch:
    """One position where draft and target differ, and the effect of the draft's token on the answer."""

    position: int  # in the response, from 0
    target_token: int
    draft_token: int
    important: bool
    answer: str | None  # of the alternative response; None: it has none


@dataclass
class Mined:
    """The result of the search on one problem."""

    problem: int
    prompt: str
    prompt_ids: list[int]
    target_response: list[int]  # y of line 4
    response: list[int]  # the last y: unimportant tokens from the draft, important ones from the target
    target_answer: str | None
    mismatches: list[Mismatch] = field(default_factory=list)
    cut: str | None = None  # "mismatches" or "seconds": the limit that ended the search early
    continuations: int = 0
    new_tokens: int = 0  # written by the target


@dataclass(frozen=True)
class Limits:
    """Limits at which a search ends."""

    max_new_tokens: int  # T_max: of the whole response, including replacements
    max_mismatches: int | None = None
    late: Callable[[], bool] = lambda: False  # whether the time for this problem is over
    tell: Callable[[float], None] = lambda share: None  # called with the share of the response that is searched


Search = Generator[Continue | Work, Any, Mined]


def search(
    mined: Mined,
    predict: Callable[[list[int], int], list[int]],
    over: Callable[[Sequence[int]], bool],
    extract: Callable[[list[int]], str | None],
    same: Callable[[str, str], bool],
    limits: Limits,
) -> Search:
    """Run Algorithm 1 on one problem; fill and return `mined`.

    Args:
        predict: `predict(y, s)` returns the draft's tokens ỹ_s … after each prefix of y, from one parallel forward.
        over: whether a response has ended with its last token.
        extract, same: return a response's answer, and whether two answers are equivalent.

    A response without an answer is not equivalent to one with an answer. If the target's response has no answer, nothing is
    searched: no mismatch is labelled.
    """
    y = yield Continue([], limits.max_new_tokens)
    mined.target_response = mined.response = y
    reference = yield Work(partial(extract, y))
    mined.target_answer = reference
    if reference is None:
        return mined
    drafted, t = predict(y, 0), -1  # ỹ
    while (t := next((i for i in range(t + 1, len(y)) if y[i] != drafted[i]), -1)) >= 0:
        if limits.max_mismatches is not None and len(mined.mismatches) == limits.max_mismatches:
            mined.cut = "mismatches"
            break
        if limits.late():
            mined.cut = "seconds"
            break
        alternative = [*y[:t], drafted[t]]
        if not over(alternative) and (budget := limits.max_new_tokens - len(alternative)) > 0:
            alternative += yield Continue(alternative, budget)
        limits.tell(t / len(y))
        answer = yield Work(partial(extract, alternative))
        equal = answer is not None and (yield Work(partial(same, reference, answer)))
        mined.mismatches.append(Mismatch(t, y[t], drafted[t], not equal, answer))
        if equal:
            y = alternative  # continue from the new response
            drafted = [*drafted[: t + 1], *predict(y, t + 1)]
    mined.response = y
    return mined
