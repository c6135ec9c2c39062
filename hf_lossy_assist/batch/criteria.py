"""Stopping criteria, each asked about one row at that row's own lengths."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .processor_kinds import PACKAGE, from_transformers


KNOWN = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # no subclass: it may stop elsewhere


class RowCriteria:
    """Criteria of a call with `rows` rows, each asked about one row at that row's own lengths.

    `generate` asks a criterion once a step, about all rows. So one of the caller's is shown the row in the place of every row, and what it
    remembers of each row, lists and tensors with an entry for each, is kept apart: one that notes which rows are done, as lm-eval's does,
    would take a row's end for the end of all. What has another length, such as a list of all that was seen, is the rows' in common.
    """

    def __init__(self, criteria: Sequence[Any], rows: int):
        self.criteria, self.rows = list(criteria), rows
        # Transformers' own and this package's keep nothing and read each row by itself.
        self.callers = [
            not from_transformers(c) and type(c).__module__.partition(".")[0] != PACKAGE for c in self.criteria
        ]
        self._memories: dict[tuple[int, int], dict[str, Any]] = {}  # of each criterion and row
        self._before = [
            self._of_each_row(c) if callers else {} for c, callers in zip(self.criteria, self.callers, strict=True)
        ]

    def stop(self, text: torch.Tensor, row: int, scores: Sequence[torch.Tensor] | None) -> bool:
        """Ask all criteria about `text` (1, n) of the call's row `row`; `scores`: (1, V) of each new token, where criteria read them."""
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
        """Copy the attributes that have an entry for each of several rows."""
        found = getattr(criterion, "__dict__", {}).items()
        lists = {name: x for name, x in found if type(x) is list or (isinstance(x, torch.Tensor) and x.dim())}
        return {name: _copy(x) for name, x in lists.items() if len(x) == self.rows > 1}


@dataclass(frozen=True)
class RowEnds:
    """Where a row that was inserted ends, besides the end tokens of its call.

    Args:
        max_length: tokens of prompt and text. clocks: criteria of `max_time`. others: the other criteria, which see this row alone.
    """

    max_length: int
    clocks: Sequence[MaxTimeCriteria]
    others: RowCriteria

    @classmethod
    def of(cls, criteria: Iterable[Any], max_length: int) -> "RowEnds":
        """Sort the criteria of one text."""
        rest, clocks = (
            [c for c in criteria if type(c) not in KNOWN],
            [c for c in criteria if type(c) is MaxTimeCriteria],
        )
        return cls(max_length, clocks, RowCriteria(rest, 1))

    def begin(self) -> None:
        """Let the clocks run that begin with the row, at infinity."""
        for clock in self.clocks:
            clock.initial_timestamp = min(clock.initial_timestamp, time.time())


def is_over(clocks: Sequence[MaxTimeCriteria]) -> bool:
    """Return whether the time of one of these criteria is over."""
    return any(bool(clock(torch.empty(1, 0), None).any()) for clock in clocks)


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else list(x) if type(x) is list else x


def _checked(criterion: Any, answer: Any, rows: int) -> torch.Tensor:
    """Return an answer about `rows` rows as a tensor, of one entry or one for each. Raises: `TypeError` or `ValueError` for anything else."""
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
