"""Texts that `generate_many` was given and that have no place yet. Their prompts are read together, some of them ahead of time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.together import joins
from .guests import Guests
from .places import Room, Seated
from .prefill import read_prompts_together
from .read_before import ReadBefore


# Tokens of the prompts that are read before there is a place for their texts, and of a forward that reads several: in fewer, a machine spends
# more on the forward than on the tokens (docs/log.md).
AHEAD = 1024


class Entrance:
    """Who has come, in their order."""

    def __init__(self, guests: Guests, room: Room):
        """`guests`: what prepares each prompt."""
        self.guests, self.room = guests, room
        self.pending: tuple[Seated, Call] | None = None  # prepared, and not let in yet
        self.queue: list[tuple[Seated, Call]] = []
        self.before = ReadBefore()
        self.reads_ahead = True  # until memory runs out

    def come(self, index: int, ids: list[int], overrides: dict[str, Any], sitting: Sequence[int], ahead: bool) -> bool:
        """Let a prompt in if there is room for its text, or, `ahead` of it, for the prompt; returns whether there was.

        `sitting`: how many tokens each text that has its place can come to. `overrides`: settings of this text.
        """
        if self.pending is None or self.pending[0].index != index:
            guest = self.guests.call(index, ids, overrides)
            self.pending = Seated(index, ids, overrides, guest.rows.max_length), guest
        sequence, _ = self.pending
        sitting, behind = list(sitting), [other for other, _ in self.queue]
        while behind and self.room.fits(sitting, behind[0].longest, _held(behind[1:])):
            sitting.append(behind.pop(0).longest)
        room = not behind and self.room.fits(sitting, sequence.longest)
        if not room and ahead and self.reads_ahead:
            room = self.room.reads(sitting, [len(other.prompt) for other in (*behind, sequence)], AHEAD)
        if room:
            self.queue.append(self.pending)
            self.pending = None
        return room

    def has_next(self, sitting: Sequence[int]) -> bool:
        """Whether there is somebody, and a place for them."""
        behind = [sequence for sequence, _ in self.queue[1:]]
        return bool(self.queue) and self.room.fits(sitting, self.queue[0][0].longest, _held(behind))

    def read(
        self, mode: Callable[[Call], AbstractContextManager[None]], sitting: Sequence[int], several: bool
    ) -> None:
        """Have the models read the first prompts that they have not read, `several` in one forward or one. The first has a place."""
        unread = [(sequence, guest) for sequence, guest in self.queue if not sequence.read]
        several &= not unread[0][1].drafter.reads_target  # whose hooks are of one text's forward
        taken = [*sitting, self.queue[0][0].longest]
        held, longest, count = _held([sequence for sequence, _ in self.queue[1:]]), 0, 0
        while count < len(unread):
            sequence = unread[count][0]
            longest, held = (
                max(longest, len(sequence.prompt)),
                held + len(sequence.prompt) * (sequence is not self.queue[0][0]),
            )
            padded = (count + 1) * longest  # what a forward computes
            if count and not (several and padded <= 2 * AHEAD and self.room.holds(taken, held)):
                break
            count += 1
        reading = [guest for _, guest in unread[:count]]
        with mode(reading[0]):
            anew = [guest for guest in reading if not self.before.give(guest)]
            read_prompts_together(reading)
            for guest in reading:
                guest.drafter.prompts_are_read(guest.rows)
            if anew:
                self.before.keep(anew[-1])
        for sequence, _ in unread[:count]:
            sequence.read = True

    def settle(self) -> None:
        """Those who wait on have keys and values of their own: one of a forward would hold those of all that it read."""
        for sequence, guest in self.queue:
            if sequence.read and not sequence.settled:
                for model in filter(joins, cached_models(guest)):
                    model.cache = model.cache.first(model.lengths[0])
                sequence.settled = True

    @property
    def holds(self) -> bool:
        """Whether memory is held for prompts of texts that have no place."""
        return bool(self.before.models) or any(sequence.read for sequence, _ in self.queue)

    def send_away(self) -> list[Seated]:
        """Memory ran out: all are to come again, and nothing is held any more for texts that have no place."""
        self.reads_ahead = False
        self.before.stop()
        gone, self.queue = self.queue, []
        return [sequence for sequence, _ in gone]

    def cancel(self, index: int) -> None:
        """Who had come with this number does not any more."""
        if self.pending is not None and self.pending[0].index == index:
            self.pending = None
        self.queue = [(sequence, guest) for sequence, guest in self.queue if sequence.index != index]


def _held(texts: Sequence[Seated]) -> int:
    """Tokens of their prompts that are read."""
    return sum(len(sequence.prompt) for sequence in texts if sequence.read)
