"""Texts that `generate_many` was given and that have no place yet. Their prompts are read together, some of them ahead of time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.row_model import RowModel
from ..models.together import joins, keeps_prompts
from .guests import Guests
from .prefill import read_prompts_together


# Tokens of the prompts that are read before there is a place for their texts, and of a forward that reads several: in fewer, a machine spends
# more on the forward than on the tokens (docs/log.md).
AHEAD = 1024
WORTH_COPYING = 32  # tokens that two prompts have in common


@dataclass
class Room:
    """How many texts may be in flight, and how many tokens they may come to."""

    rows: int
    tokens: int | None = None

    def fits(self, going: Sequence[int], more: int, held: int = 0) -> bool:
        """Whether a text of `more` tokens fits beside those of `going` and `held` tokens of prompts read ahead. One text always does."""
        return not going or (len(going) < self.rows and self.holds([*going, more], held))

    def holds(self, going: Sequence[int], held: int) -> bool:
        """Whether there is memory for the texts of `going` and `held` tokens beside them."""
        return self.tokens is None or sum(going) + held <= self.tokens

    def reads(self, going: Sequence[int], prompts: Sequence[int], most: int) -> bool:
        """Whether `prompts` of so many tokens, `most` together and no more than there are places, can be held beside the texts of `going`."""
        return len(prompts) <= self.rows and sum(prompts) <= most and self.holds(going, sum(prompts))


@dataclass
class Seated:
    """A text in flight."""

    index: int  # of its prompt
    prompt: list[int]
    overrides: dict[str, Any]  # settings
    longest: int  # tokens that it can come to
    read: bool = False  # whether the models have read its prompt
    settled: bool = False  # whether what was read is in storage of its own
    began: float = 0.0  # when it was given a place, as `time.perf_counter` counts


class ReadBefore:
    """Keys and values of one prompt, in caches of its own."""

    def __init__(self) -> None:
        self.ids: torch.Tensor | None = None  # (n,)
        self.models: list[RowModel] = []
        self.keeps = True

    def keep(self, call: Call) -> None:
        """Keep what the models of a call of one row have read, where it is the same behind any prompt that begins alike."""
        models = cached_models(call)
        if self.keeps and not call.drafter.reads_target and all(map(keeps_prompts, models)):
            self.ids, self.models = None, []  # which make room for the copies
            self.models = [model.copy() for model in models]
            self.ids = call.rows.ids[0, : call.rows.width].clone()

    def give(self, call: Call) -> bool:
        """Copy to the models of a call what its prompt begins with; whether there was any."""
        ids, models = call.rows.ids[0, : call.rows.width], cached_models(call)
        if self.ids is None or call.drafter.reads_target or not all(map(keeps_prompts, models)):
            return False
        both = min(len(ids), len(self.ids))
        differ = (ids[:both] != self.ids[:both]).nonzero()
        common = min(int(differ[0]) if len(differ) else both, len(ids) - 1)
        if common < WORTH_COPYING:
            return False
        for model, source in zip(models, self.models, strict=True):
            model.take(0, source, min(common, source.lengths[0]))
        return True

    def stop(self) -> None:
        """Give the memory back, and keep nothing any more."""
        self.ids, self.models, self.keeps = None, [], False


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
