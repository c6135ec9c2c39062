"""What a caller's criterion remembers of each row, kept apart for each row.

`generate` asks a criterion once a step, about all rows; here each row asks at its own lengths, and is shown in the place of every row. One that notes
which rows are done, as lm-eval's does, would take a row's end for the end of all.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Memories:
    """Attributes with an entry for each row of the call, as each row left them: lists and tensors that are of that length beforehand.

    What has another length, such as a list of all that was seen, is the rows' in common.
    """

    def __init__(self, criteria: Iterable[Any], rows: int):
        self._first = {id(criterion): _for_each_row(criterion, rows) for criterion in criteria}
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}

    @contextmanager
    def of(self, criterion: Any, row: int) -> Iterator[None]:
        """Inside, those attributes are what `row` left, or what was there before the call."""
        first = self._first[id(criterion)]
        for name, value in self._rows.get((id(criterion), row), first).items():
            setattr(criterion, name, _copied(value))
        yield
        if first:
            self._rows[id(criterion), row] = {name: _copied(getattr(criterion, name)) for name in first}


def _for_each_row(criterion: Any, rows: int) -> dict[str, Any]:
    found = getattr(criterion, "__dict__", {})
    return {name: _copied(value) for name, value in found.items() if _length(value) == rows}


def _length(value: Any) -> int | None:
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value) if type(value) is list else None


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else list(value) if type(value) is list else value


def checked_answer(criterion: Any, answer: Any, rows: int) -> torch.Tensor:
    """What a criterion says of the `rows` that it was shown, a tensor of one entry or one for each. Raises: `TypeError` or `ValueError` for anything else."""
    if answer is None:
        raise TypeError(
            f"stopping_criteria: {type(criterion).__name__} must return a bool for each of the {rows} rows, got None"
        )
    said = torch.as_tensor(answer)
    if said.shape not in ((), (1,), (rows,)):
        raise ValueError(
            f"stopping_criteria: {type(criterion).__name__} must return one entry for each of the {rows} rows that it "
            f"was given, and returned a tensor of shape {list(said.shape)}: return {rows} of them"
        )
    return said
