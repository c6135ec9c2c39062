"""Algorithm 1 of AutoJudge: which of the target's tokens change the answer when the draft's stand in their place.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039). Nothing here runs the target: the search
asks for continuations and answers by `yield`, so that many problems can wait on one batch of a model, or on a server.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass(frozen=True)
class Continue:
    """Asks for the target's own continuation, (tokens,), of the response that begins with `prefix`."""

    prefix: list[int]


@dataclass(frozen=True)
class Work:
    """Asks for `run()`, which may take long: a program, another server."""

    run: Callable[[], Any]


@dataclass(frozen=True)
class Mismatch:
    """One position where draft and target differ, and what putting the draft's token there did to the answer."""

    position: int  # in the response, from 0
    target_token: int
    draft_token: int
    important: bool
    answer: str | None  # of the alternative response; None: it has none


@dataclass
class Mined:
    """What the search found out about one problem."""

    problem: int
    prompt: str
    prompt_ids: list[int]
    target_response: list[int]  # y of line 4
    response: list[int]  # the last y: unimportant tokens from the draft, important ones from the target
    target_answer: str | None
    mismatches: list[Mismatch] = field(default_factory=list)
    cut: str | None = None  # "mismatches" or "seconds": the cap that ended the search early
    continuations: int = 0
    new_tokens: int = 0  # that the target wrote
    retokenised: int = 0  # continuations whose text has another spelling in tokens (a target behind a server)


@dataclass(frozen=True)
class Limits:
    """Where a search ends."""

    max_new_tokens: int  # T_max: of the whole response, whatever is replaced
    max_mismatches: int | None = None
    late: Callable[[], bool] = lambda: False  # the time for this problem is over
    tell: Callable[[float], None] = lambda share: None  # is given the share of the response that is searched


Search = Generator[Continue | Work, Any, Mined]


def search(
    mined: Mined, draft: Callable[[list[int], int], list[int]], over: Callable[[Sequence[int]], bool],
    extract: Callable[[list[int]], str | None], same: Callable[[str, str], bool], limits: Limits,
    *, against_running: bool = False, naive: bool = False,
) -> Search:  # fmt: skip
    """Algorithm 1 on one problem; `mined` is filled and returned.

    Args:
        draft: `draft(y, s)` are the draft's own choices ỹ_s … after each prefix of y, from one parallel forward.
        over: whether a response ends with its last token.
        extract, same: the answer of a response, and whether two answers are equivalent.
        against_running: compare with the response as it stands (Appendix L), not with the target's first one.
        naive: replace each mismatch of the target's response alone, and keep none (Appendix A's simpler variant).

    A response without an answer is not equivalent to one with an answer. A target without an answer gives nothing to search
    for: no mismatch is labelled.
    """
    y = yield Continue([])
    mined.target_response = mined.response = y
    reference = yield Work(partial(extract, y))
    mined.target_answer = reference
    if reference is None:
        return mined
    own, t = draft(y, 0), -1  # ỹ
    while (t := next((i for i in range(t + 1, len(y)) if y[i] != own[i]), -1)) >= 0:
        if limits.max_mismatches is not None and len(mined.mismatches) == limits.max_mismatches:
            mined.cut = "mismatches"
            break
        if limits.late():
            mined.cut = "seconds"
            break
        alternative = [*y[:t], own[t]]
        if not over(alternative) and len(alternative) < limits.max_new_tokens:
            alternative += yield Continue(alternative)
        limits.tell(t / len(y))
        answer = yield Work(partial(extract, alternative))
        equal = answer is not None and (yield Work(partial(same, reference, answer)))
        mined.mismatches.append(Mismatch(t, y[t], own[t], not equal, answer))
        if equal and not naive:
            y = alternative  # go on from the new response
            own = [*own[: t + 1], *draft(y, t + 1)]
            reference = answer if against_running else reference
    mined.response = y
    return mined
