"""Stopping criteria, called as `generate` calls them: once for each new token, with the whole text."""

import math
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria

from .processor_kinds import PACKAGE, from_transformers


MOST_ENTRIES = 4096  # of an array or container that is compared by value
KNOWN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # not subclasses: they may stop elsewhere


def is_callers(criterion: object) -> bool:
    """Return whether a criterion is the caller's. Transformers' and this package's are stateless and treat rows independently."""
    ours = from_transformers(criterion) or type(criterion).__module__.partition(".")[0] == PACKAGE
    return not ours or isinstance(criterion, SharedCriterion)


def ends_at(
    criteria: Iterable[StoppingCriteria], texts: torch.Tensor, scores: Sequence[torch.Tensor] | None
) -> list[bool]:
    """Call every criterion with `texts` (B, n); return which rows end. `scores`: (B, V) of each new token, or None."""
    over, shown = torch.zeros(len(texts), dtype=torch.bool), None if scores is None else tuple(scores)
    for criterion in criteria:
        over |= _checked(criterion, criterion(texts, shown), len(texts)).cpu()
    out: list[bool] = over.tolist()
    return out


class BatchCriteria:
    """The caller's criteria in a call with several rows, called as `generate` does: with all rows, which have as many new tokens.

    Rows proceed at different speeds, so a token is judged when every row that goes on has it. A row may be further by then.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], texts: torch.Tensor, pad: int | None):
        """`texts` (B, n): the prompts. `pad`: the token after a row's end; None: rows are continued there."""
        self.criteria, self.texts, self.pad = criteria, texts, pad
        self.step = 0  # new tokens that have been judged
        self.tokens: list[list[int]] = [[] for _ in texts]  # all new tokens
        self.scores: list[torch.Tensor] = []  # (B, V) of each judged token

    def advance(self, ends: list[int | None], scores: Sequence[Sequence[torch.Tensor]] | None) -> None:
        """Judge the tokens that all rows have; lower `ends`, the number of each row's new tokens at its end, None while it goes on.

        `scores`: of each row, (1, V) of each token; zeros stand for those after its end.
        """
        while True:
            going = [end is None or end > self.step for end in ends]
            needed = going if self.pad is not None else [True] * len(going)
            short = (need and len(row) <= self.step for need, row in zip(needed, self.tokens, strict=True))
            if not any(going) or any(short):
                return
            column = [row[self.step] if need else self.pad for need, row in zip(needed, self.tokens, strict=True)]
            self.texts = torch.cat([self.texts, torch.tensor(column, device=self.texts.device)[:, None]], dim=1)
            if scores is not None:
                size = next(row[self.step] for row, need in zip(scores, needed, strict=True) if need)
                rows = zip(scores, needed, strict=True)
                self.scores.append(
                    torch.cat([row[self.step] if need else torch.zeros_like(size) for row, need in rows])
                )
            self.step += 1
            for row, over in enumerate(ends_at(self.criteria, self.texts, None if scores is None else self.scores)):
                if going[row] and over:
                    ends[row] = self.step


class SharedCriterion(StoppingCriteria):
    """A caller's criterion for several texts of `generate_many`, which are written side by side."""

    def __init__(self, criterion: StoppingCriteria):
        self.criterion = criterion

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...], **kwargs: object) -> torch.Tensor:
        """Call the criterion. Raises: `ValueError` if that changes its attributes: it would mix the texts."""
        before = _contents(vars(self.criterion)) if hasattr(self.criterion, "__dict__") else None
        answer = self.criterion(input_ids, scores, **kwargs)
        if before is not None and before != _contents(vars(self.criterion)):
            raise ValueError(
                f"stopping_criteria: {type(self.criterion).__name__} remembers something from token to token, and one object serves several "
                "texts: pass a function of a prompt's token ids that makes one for each, stopping_criteria=lambda ids: […]"
            )
        return answer


class CriteriaOfTexts:
    """The criteria that the caller gives `generate_many`: those that serve several texts are `SharedCriterion`s."""

    def __init__(self) -> None:
        # By id: a criterion that the caller's function returned, and the prompt that it was returned for.
        self._made: dict[int, tuple[weakref.ref[StoppingCriteria], int]] = {}

    def shared(self, criteria: Iterable[StoppingCriteria]) -> list[StoppingCriteria]:
        """Return the criteria of all texts."""
        return [SharedCriterion(each) if callable(each) and is_callers(each) else each for each in criteria]

    def made(self, criteria: Iterable[StoppingCriteria], index: int) -> list[StoppingCriteria]:
        """Return the criteria of prompt `index`, some of which the caller's function may have returned for other prompts, too."""
        return [
            each
            if isinstance(each, SharedCriterion) or self._first_prompt(each, index) == index
            else self.shared([each])[0]
            for each in criteria
        ]

    def _first_prompt(self, criterion: StoppingCriteria, index: int) -> int:
        key = id(criterion)
        first = weakref.ref(criterion, lambda _: self._made.pop(key, None)), index
        return self._made.setdefault(key, first)[1]


def _contents(x: object) -> object:
    """Return a copy of numbers, strings, small arrays and containers that compares by value; the identity of any other object."""
    if isinstance(x, torch.Tensor | np.ndarray):
        return (x.shape, x.tolist()) if math.prod(x.shape) <= MOST_ENTRIES else id(x)
    if isinstance(x, dict | list | tuple | set | deque):
        if len(x) > MOST_ENTRIES:
            return id(x), len(x)
        return [(_contents(key), _contents(x[key]) if isinstance(x, dict) else None) for key in x]
    return x if isinstance(x, bool | int | float | str | bytes | np.generic | None) else id(x)


@dataclass(frozen=True)
class RowEnds:
    """The end of an inserted row, besides the end tokens of its call.

    Args:
        max_length: tokens of prompt and text.
        clocks: `max_time` criteria.
        others: the remaining criteria, for this row alone.
    """

    max_length: int
    clocks: Sequence[MaxTimeCriteria]
    others: Sequence[StoppingCriteria]

    @classmethod
    def of(cls, criteria: Iterable[StoppingCriteria], max_length: int) -> "RowEnds":
        """Sort the criteria of one text by kind."""
        rest, clocks = (
            [c for c in criteria if type(c) not in KNOWN],
            [c for c in criteria if type(c) is MaxTimeCriteria],
        )
        return cls(max_length, clocks, rest)

    def begin(self) -> None:
        """Start clocks that are set to start with the row (initial timestamp: infinity)."""
        for clock in self.clocks:
            clock.initial_timestamp = min(clock.initial_timestamp, time.time())


def is_over(clocks: Sequence[MaxTimeCriteria]) -> bool:
    """Return whether one of these criteria is out of time."""
    return any(bool(clock(torch.empty(1, 0), None).any()) for clock in clocks)


def _checked(criterion: object, answer: object, rows: int) -> torch.Tensor:
    """Return a criterion's answer as a tensor of 1 or `rows` entries. Raises: `TypeError` or `ValueError` for anything else."""
    name = type(getattr(criterion, "criterion", criterion)).__name__
    if answer is None:
        raise TypeError(f"stopping_criteria: {name} must return a bool for each of the {rows} rows, got None")
    result = torch.as_tensor(answer)
    if result.shape not in ((), (1,), (rows,)):
        raise ValueError(
            f"stopping_criteria: {name} must return one entry for each of the {rows} rows that it "
            f"was given, and returned a tensor of shape {list(result.shape)}: return {rows} of them"
        )
    return result.bool()
