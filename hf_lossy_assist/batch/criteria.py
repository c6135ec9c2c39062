"""Stopping criteria, evaluated for one row at a time at that row's length."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .processor_kinds import PACKAGE, from_transformers


KNOWN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # not subclasses: they may stop elsewhere


class RowCriteria:
    """The criteria of a call with `rows` rows, evaluated for one row at a time at that row's length.

    `generate` calls a criterion once a step with all rows. A caller's criterion is therefore given `rows` copies of one row, and its per-row
    state (lists and tensors with an entry for each row) is saved separately for each row: otherwise a criterion that records finished rows,
    such as lm-eval's, would take one row's end for the end of all. State of any other length is shared by the rows.
    """

    def __init__(self, criteria: Sequence[Any], rows: int):
        self.criteria, self.rows = list(criteria), rows
        # Transformers' and this package's criteria are stateless and treat rows independently.
        self.callers = [
            not from_transformers(c) and type(c).__module__.partition(".")[0] != PACKAGE for c in self.criteria
        ]
        self._memories: dict[tuple[int, int], dict[str, Any]] = {}  # by criterion and row
        self._before = [
            self._of_each_row(c) if callers else {} for c, callers in zip(self.criteria, self.callers, strict=True)
        ]

    def stop(self, text: torch.Tensor, row: int, scores: Sequence[torch.Tensor] | None) -> bool:
        """Evaluate all criteria on `text` (1, n) of row `row`; `scores`: (1, V) of each new token, or None."""
        stop = False
        for i, (criterion, callers) in enumerate(zip(self.criteria, self.callers, strict=True)):
            shown, before = self.rows if callers else 1, self._before[i]
            for name, value in self._memories.get((i, row), before).items():
                setattr(criterion, name, _copy(value))
            shown_scores = None if scores is None else tuple(s.expand(shown, -1) for s in scores)
            answer = criterion(text.expand(shown, -1), shown_scores)
            if before:
                self._memories[i, row] = {name: _copy(getattr(criterion, name)) for name in before}
            answers = _checked(criterion, answer, shown)
            stop |= bool(answers.expand(shown)[row if callers else 0])
        return stop

    def _of_each_row(self, criterion: Any) -> dict[str, Any]:
        """Copy the attributes that have an entry for each row, if there are several rows."""
        found = getattr(criterion, "__dict__", {}).items()
        lists = {name: x for name, x in found if type(x) is list or (isinstance(x, torch.Tensor) and x.dim())}
        return {name: _copy(x) for name, x in lists.items() if len(x) == self.rows > 1}


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
    others: RowCriteria

    @classmethod
    def of(cls, criteria: Iterable[Any], max_length: int) -> "RowEnds":
        """Sort the criteria of one text by kind."""
        rest, clocks = (
            [c for c in criteria if type(c) not in KNOWN],
            [c for c in criteria if type(c) is MaxTimeCriteria],
        )
        return cls(max_length, clocks, RowCriteria(rest, 1))

    def begin(self) -> None:
        """Start clocks that are set to start with the row (initial timestamp: infinity)."""
        for clock in self.clocks:
            clock.initial_timestamp = min(clock.initial_timestamp, time.time())


def is_over(clocks: Sequence[MaxTimeCriteria]) -> bool:
    """Return whether one of these criteria is out of time."""
    return any(bool(clock(torch.empty(1, 0), None).any()) for clock in clocks)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else list(x) if type(x) is list else x


def _checked(criterion: Any, answer: Any, rows: int) -> torch.Tensor:
    """Return a criterion's answer as a tensor of 1 or `rows` entries. Raises: `TypeError` or `ValueError` for anything else."""
    if answer is None:
        raise TypeError(
            f"stopping_criteria: {type(criterion).__name__} must return a bool for each of the {rows} rows, got None"
        )
    found = torch.as_tensor(answer)
    if found.shape not in ((), (1,), (rows,)):
        raise ValueError(
            f"stopping_criteria: {type(criterion).__name__} must return one entry for each of the {rows} rows that it "
            f"was given, and returned a tensor of shape {list(found.shape)}: return {rows} of them"
        )
    return found
