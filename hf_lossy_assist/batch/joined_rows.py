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
    """Texts of several one-row calls. `guests[number]`: the rows of the call that sits at this place."""

    def __init__(self, first: Rows, seats: int):
        """`first` sits at place 0; there are `seats` places."""
        super().__init__(first.ids[:, : first.width], [0], StoppingCriteriaList(), first.max_length)
        self.finished_tokens, self._scores = [None] * seats, [[] for _ in range(seats)]
        self._ended = [None] * seats
        self.eos, self._eos = first.eos, first._eos
        self.guests: list[Rows | None] = [None] * seats
        self.take(0, 0, first)

    @property
    def free(self) -> int | None:
        """Find a place at which nobody sits; None: there is none."""
        return next((number for number in range(len(self.guests)) if number not in self.row_id_list), None)

    def take(self, b: int, number: int, guest: Rows) -> None:
        """Row b, at place `number`, is `guest`'s from now on; b may be one more than there are."""
        if b == len(self.row_id_list):
            self.ids = torch.nn.functional.pad(self.ids, (0, 0, 0, 1))
            self.row_ids = torch.nn.functional.pad(self.row_ids, (0, 1), value=number)
            for name in ("row_id_list", "pads", "lengths", "prompt_lengths", "max_lengths", "finished"):
                getattr(self, name).append(0)
        self.max_length = max(self.max_length, guest.max_length)
        length = guest.lengths[0]
        self._make_room(length + 1)
        self.ids[b, :length] = guest.ids[0, :length]
        self.row_id_list[b], self.lengths[b] = number, length
        self.prompt_lengths[b], self.max_lengths[b] = guest.width, guest.max_length
        self.finished[b], self.guests[number] = False, guest
        self.runs_callers_code |= guest.runs_callers_code

    def check_time(self) -> None:
        """End each row whose own `max_time` is over."""
        for b, number in enumerate(self.row_id_list):
            self.finished[b] |= self._guest(number).is_out_of_time()

    def _criteria_stop(self, row: int, length: int) -> bool:
        """Ask the criteria of the row's own call, which are shown its text alone."""
        guest = self._guest(self.row_id_list[row])
        guest.ids = self.ids[row : row + 1]
        return guest._criteria_stop(0, length)

    def _guest(self, number: int) -> Rows:
        guest = self.guests[number]
        assert guest is not None, "the place of a row is taken"
        return guest


class ProcessingTogether(Processing):
    """The logits processors of several one-row calls: one pass for all where they do not read the text, else each row's own."""

    def __init__(self, first: Processing, seats: int):
        """`first` sits at place 0 of `seats`."""
        super().__init__(first.processors, seats)
        self.guests = [first] * seats
        self.take(0, first)

    def take(self, number: int, guest: Processing) -> None:
        """Place `number` is `guest`'s from now on."""
        self.guests[number] = guest
        self.apart |= guest.apart
        self.needs_prefix |= guest.apart or guest.needs_prefix
        self.runs_callers_code |= guest.runs_callers_code
        self.may_forbid |= guest.may_forbid

    def blame(self, ids: torch.Tensor, length: int, scores: torch.Tensor, row: int) -> str | None:
        return self.guests[row].blame(ids, length, scores, 0)

    def commit(self, row: int, count: int) -> None:
        self.guests[row].commit(0, count)

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
            self.guests[number](
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

    def __init__(self, first: Randomness, seats: int):
        """`first` sits at place 0 of `seats`."""
        super().__init__()
        assert first.rows is not None, "each call has a generator for its row"
        self.rows = first.rows * seats

    def take(self, number: int, guest: Randomness) -> None:
        """Place `number` is `guest`'s from now on."""
        assert self.rows is not None and guest.rows is not None
        self.rows[number] = guest.rows[0]
