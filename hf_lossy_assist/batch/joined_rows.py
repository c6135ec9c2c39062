"""Rows of several calls in one batch, each with its own prompt, processors and criteria: as if it were alone.

The calls have one row each, prepared by `generate` with the same settings. A row's number in the joint call is its place: when its
text has ended, another call's row takes the place.
"""

from collections.abc import Sequence

import torch
from transformers import StoppingCriteriaList

from .logits_processing import Processing
from .randomness import Randomness
from .rows import Rows


class RowsTogether(Rows):
    """Texts of several one-row calls. `members[number]`: the rows of the call at this place."""

    def __init__(self, first: Rows, max_rows: int):
        """`first` is at place 0; there are `max_rows` places."""
        super().__init__(first.ids[:, : first.width], [0], StoppingCriteriaList(), first.max_length)
        self.finished_tokens, self._scores = [None] * max_rows, [[] for _ in range(max_rows)]
        self._ended = [None] * max_rows
        self.eos, self._eos = first.eos, first._eos
        self.members: list[Rows | None] = [None] * max_rows
        self.take(0, 0, first)

    @property
    def free(self) -> int | None:
        """Find a place that is free; None: there is none."""
        return next((number for number in range(len(self.members)) if number not in self.row_id_list), None)

    def take(self, b: int, number: int, member: Rows) -> None:
        """Row b, at place `number`, is `member`'s from now on; b may be one more than there are."""
        if b == len(self.row_id_list):
            self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, 1))
            self.row_ids = torch.nn.functional.pad(self.row_ids, (0, 1), value=number)
            for name in ("row_id_list", "pads", "lengths", "prompt_lengths", "max_lengths", "finished"):
                getattr(self, name).append(0)
        self.max_length = max(self.max_length, member.max_length)
        length = member.lengths[0]
        self._make_room(length + 1)
        self.ids[b, :length] = member.ids[0, :length]
        self.row_id_list[b], self.lengths[b] = number, length
        self.prompt_lengths[b], self.max_lengths[b] = member.width, member.max_length
        self.finished[b], self.members[number] = False, member
        self._texts.pop(number, None)
        self.runs_callers_code |= member.runs_callers_code

    def check_time(self) -> None:
        """End each row whose own `max_time` is over."""
        for b, number in enumerate(self.row_id_list):
            self.finished[b] |= self._member(number).is_out_of_time()

    def _criteria_stop(self, row: int, length: int) -> bool:
        """Ask the criteria of the row's own call, which are shown its text alone."""
        member = self._member(self.row_id_list[row])
        member.ids = self.ids[row : row + 1]
        return member._criteria_stop(0, length)

    def _member(self, number: int) -> Rows:
        member = self.members[number]
        assert member is not None, "the place of a row is taken"
        return member


class ProcessingTogether(Processing):
    """The logits processors of several one-row calls: one pass for all where they do not read the text, else each row's own."""

    def __init__(self, first: Processing, max_rows: int):
        """`first` is at place 0 of `max_rows`."""
        super().__init__(first.processors, max_rows)
        self.members = [first] * max_rows
        self.take(0, first)

    def take(self, number: int, member: Processing) -> None:
        """Place `number` is `member`'s from now on."""
        self.members[number] = member
        self.apart |= member.apart
        self.needs_prefix |= member.apart or member.needs_prefix
        self.runs_callers_code |= member.runs_callers_code
        self.may_forbid |= member.may_forbid

    def blame(self, ids: torch.Tensor, length: int, scores: torch.Tensor, row: int) -> str | None:
        return self.members[row].blame(ids, length, scores, 0)

    def commit(self, row: int, count: int) -> None:
        self.members[row].commit(0, count)

    def __call__(
        self,
        ids: torch.Tensor,
        lengths: Sequence[int],
        scores: torch.Tensor,
        row_ids: Sequence[int],
        active_positions: Sequence[int] | None = None,
    ) -> torch.Tensor:
        if not self.apart and (not self.processors or not self.needs_prefix):
            return super().__call__(ids, lengths, scores, row_ids, active_positions)
        rows = [
            self.members[number](
                ids[b : b + 1],
                lengths[b : b + 1],
                scores[b : b + 1],
                [0],
                None if active_positions is None else active_positions[b : b + 1],
            )
            for b, number in enumerate(row_ids)
        ]
        return torch.cat(rows)


class RandomnessTogether(Randomness):
    """Each place has its own call's random numbers."""

    def __init__(self, first: Randomness, max_rows: int):
        """`first` is at place 0 of `max_rows`."""
        super().__init__()
        assert first.rows is not None, "each call has a generator for its row"
        self.rows = first.rows * max_rows

    def take(self, number: int, member: Randomness) -> None:
        """Place `number` is `member`'s from now on."""
        assert self.rows is not None and member.rows is not None
        self.rows[number] = member.rows[0]
