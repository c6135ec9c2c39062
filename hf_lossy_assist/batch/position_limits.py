"""Models with a table of positions, such as GPT-2: a text cannot grow past it, and a draft stops guessing at the end of its own."""

from typing import Any

from ..models.introspection import learned_positions
from ..models.quirks.cache_positions import PositionSources
from .rows import Rows


class PositionLimits:
    """The tables of a call's models: what the rows may draft, and where the target's ends."""

    def __init__(self, target: Any, *others: Any):
        """Transformers models; None among `others` is passed over."""
        self.target = learned_positions(target)
        self._columns = bool(PositionSources.of(target).tables)  # hidden tokens have positions of the target's, too
        tables = [learned_positions(its) for its in others if its is not None]
        self._shortest = min((size for size in tables if size is not None), default=None)

    def _last(self, rows: Rows) -> list[int]:
        """The target's position of each row's last token."""
        return [length - 1 for length in rows.lengths] if self._columns else rows.cached_lengths()

    def room(self, rows: Rows, limits: list[int]) -> list[int]:
        """`limits`, the drafted tokens of each row, where the tables end no sooner."""
        for size, last in ((self.target, self._last), (self._shortest, Rows.cached_lengths)):
            if size is not None:
                limits = [max(min(n, size - place - 1), 0) for n, place in zip(limits, last(rows), strict=True)]
        return limits

    def check(self, rows: Rows) -> None:
        """Raise `ValueError` where a row needs a position that the target does not have."""
        if self.target is None:
            return
        for row, last, finished in zip(rows.row_id_list, self._last(rows), rows.finished, strict=True):
            if not finished and last >= self.target:
                raise ValueError(
                    f"the target has {self.target} positions, and row {row} needs more: its text has {last + 1} tokens and no end. "
                    f"Pass a smaller max_new_tokens or a shorter prompt"
                )
