"""The texts that `generate_many` writes at a time: admitted, written round by round, given back as they end."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from typing import Any

import torch

from ..engine.call import Call
from ..engine.joining import drop, joined, seat
from ..engine.loop import decode, run_stages, start_round
from ..models.cached_model import NotJoined
from ..models.introspection import device_of
from ..stats.clock import Clock
from ..stats.speculation import RowStats, SpeculationStats
from ..stops.fallback import Fallback
from ..validation import one_line
from .ended import Ended, Result
from .entrance import Entrance, Room, Seated
from .guests import Guests
from .prefill import call_context, tensors_escape


class InFlight:
    """The texts that are being written."""

    def __init__(self, guests: Guests, room: Room):
        """`guests`: what prepares each prompt."""
        self.guests, self.room = guests, room
        self.target, self.policy = guests.target, guests.policy
        self.seats = room.rows
        self.call: Call | None = None
        self.clock = Clock(device_of(self.target))
        self.stats = SpeculationStats([RowStats() for _ in range(self.seats)], 0, self.policy.lossless)
        self.ended = Ended(self.clock)
        self.seated: dict[int, Seated] = {}  # by the place in the call
        self.alone: list[tuple[Seated, Call]] = []  # that cannot be joined to others
        self.again: list[Seated] = []  # that memory had no room for
        self.entrance = Entrance(guests, room)
        self.lasting: bool | None = None  # one mode of autograd for all texts, which share tensors
        self.announced: set[str] = set()

    @property
    def going(self) -> int:
        """How many texts are being written, or are to be written again."""
        return len(self.seated) + len(self.entrance.queue) + len(self.alone) + len(self.again)

    def admit(self, index: int, prompt: str | Sequence[int], **overrides: object) -> bool:
        """Take a prompt among the texts if there is room for it; returns whether there was. `overrides`: settings of its own, such as `max_new_tokens`."""
        return not self.again and self._admit(index, self.guests.ids(index, prompt), overrides)

    def _admit(self, index: int, ids: list[int], overrides: dict[str, Any]) -> bool:
        # Whether texts can be joined, the first one shows.
        return self.entrance.come(
            index, ids, overrides, self._sitting(), ahead=self.call is not None and not self.alone
        )

    def _sitting(self) -> list[int]:
        return [sequence.longest for sequence in (*self.seated.values(), *(sequence for sequence, _ in self.alone))]

    def _seat_queue(self) -> None:
        """Have the models read the prompts of those who have come, and give them their places."""
        seating = False
        try:
            while not self.alone and self.entrance.has_next(self._sitting()):
                sequence, guest = self.entrance.queue[0]
                if not sequence.read:
                    self.entrance.read(self._mode, self._sitting(), several=self.call is not None)
                seating = True
                self._seat(sequence, guest)
                seating = False
                self.entrance.queue.pop(0)
            if self.entrance.queue:
                with self._mode(self.entrance.queue[0][1]):
                    self.entrance.settle()
            return
        except torch.OutOfMemoryError:
            if not self._may_begin_again():
                raise
        if seating or not self.seated or not self.entrance.holds:
            self._begin_again()
        else:  # what is read ahead goes first; those who sit go on
            self._say("generate_many: memory ran out; goes on without prompts that are read ahead")
            self._come_again(self.entrance.send_away())

    def _seat(self, sequence: Seated, guest: Call) -> None:
        """Give a text whose prompt was read its place."""
        sequence.began = time.perf_counter()
        with self._mode(guest):
            try:
                if self.call is None:
                    self.call, place = joined(guest, self.seats, self.clock), 0
                else:
                    place = seat(self.call, guest)
            except NotJoined as reason:
                self._say(f"generate_many writes one text at a time here: {one_line(reason)}")
                self.alone.append((sequence, guest))
                return
        self.stats.rows[place] = RowStats()
        self.seated[place] = sequence

    def step(self, rounds: int | None = None) -> list[Result]:
        """Run rounds until a text has ended, at most `rounds`; return the texts that have."""
        if self.again and self._admit(self.again[-1].index, self.again[-1].prompt, self.again[-1].overrides):
            self.again.pop()
            return []
        self._seat_queue()
        if self.alone:
            result = self._finished_alone(*self.alone[0])
            self.alone.pop(0)
            return [result]
        call = self.call
        if call is None:  # there was no memory for what was admitted
            return []
        call.stop.interrupted()
        ran_out = False
        with self._mode(call):
            try:
                drop(call)  # places that nobody took
                for number in count():
                    if number == rounds or any(call.rows.finished):
                        break
                    run_stages(call, start_round(call), self.stats)
                    call.rows.check_time()
            except torch.OutOfMemoryError:
                ran_out = True
                if not any(call.rows.finished) and not self._may_begin_again():
                    raise
            out = self._results(call)  # also of texts that ended in the round before memory ran out
        if ran_out and self.seated:
            self._begin_again()
        if not self.seated:
            self.call = None
        return out

    def _results(self, call: Call) -> list[Result]:
        """Of the texts that have ended."""
        rows = zip(call.rows.row_id_list, call.rows.finished, strict=True)
        return [self._result(b) for b, (place, over) in enumerate(rows) if over and place in self.seated]

    def numbers(self) -> list[int]:
        """Of all texts that are being written, or are to be written again."""
        waiting = [sequence for sequence, _ in (*self.entrance.queue, *self.alone)]
        return [sequence.index for sequence in (*self.seated.values(), *waiting, *self.again)]

    def written(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each text that is being written together with others, and its new tokens so far."""
        rows = None if self.call is None else self.call.rows
        for b, place in enumerate([] if rows is None else rows.row_id_list):
            if rows is not None and place in self.seated:
                yield self.seated[place].index, rows.new_tokens(b).tolist()

    def cancel(self, index: int) -> None:
        """Give up a text: its place is free."""
        self.entrance.cancel(index)
        self.again = [sequence for sequence in self.again if sequence.index != index]
        self.alone = [(sequence, call) for sequence, call in self.alone if sequence.index != index]
        for place in [place for place, sequence in self.seated.items() if sequence.index == index]:
            assert self.call is not None
            del self.seated[place]
            self.call.rows.finished[self.call.rows.row_id_list.index(place)] = True
        if not self.seated:
            self.call = None

    def _may_begin_again(self) -> bool:
        """Whether it takes less memory to write the texts again: fewer at a time, or with nothing held beside them. The first one sits alone."""
        return (self.call is not None and self._at_a_time() > 1) or self.entrance.holds

    def _at_a_time(self) -> int:
        return min(len(self.seated) + len(self.entrance.queue), self.room.rows)

    def _begin_again(self) -> None:
        """Memory ran out: nothing that a forward may have left half done is kept. All texts are written from their beginning, half as many at a
        time; with the same random numbers, so that they are the same.
        """
        texts = self._at_a_time()
        self.room.rows = max(texts // 2, 1)
        self._say(f"generate_many: memory ran out with {texts} texts at a time; goes on with {self.room.rows}")
        self._come_again([*self.seated.values(), *self.entrance.send_away()])
        self.seated.clear()
        self.call = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _come_again(self, texts: Sequence[Seated]) -> None:
        """Put these texts back to be written later, the first of them first."""
        self.again = sorted([*self.again, *texts], key=lambda sequence: sequence.index, reverse=True)

    def close(self) -> None:
        """Give back what is held for texts that nobody will write."""
        self.seated.clear()
        self.alone.clear()
        self.again.clear()
        self.call = None
        self.entrance = Entrance(self.guests, self.room)

    def _result(self, b: int) -> Result:
        assert self.call is not None
        place = self.call.rows.row_id_list[b]
        row, self.stats.rows[place] = self.stats.rows[place], RowStats()
        settings = self.call.stop.settings
        stats = SpeculationStats(
            [row], settings.longest, self.policy.lossless, falls_back=isinstance(settings, Fallback)
        )
        self.ended.add(stats)
        result = self._made(self.seated[place], self.call.rows.new_tokens(b), stats)
        del self.seated[place]
        return result

    def _finished_alone(self, sequence: Seated, call: Call) -> Result:
        with closing(call), self._mode(call):
            stats = decode(call)
            self.ended.add(stats, apart=True)
            return self._made(sequence, call.rows.new_tokens(0), stats)

    def _made(self, sequence: Seated, tokens: torch.Tensor, stats: SpeculationStats) -> Result:
        ids = tokens.tolist()
        return Result(
            sequence.index, ids, self.guests.text(sequence.prompt, ids), stats, time.perf_counter() - sequence.began
        )

    def _mode(self, call: Call) -> Any:
        if self.lasting is None:
            self.lasting = self.guests.runs_callers_code or tensors_escape(call, self.target)
        return call_context(call, self.target, self.lasting)

    def _say(self, line: str) -> None:
        if line not in self.announced:
            self.announced.add(line)
            warnings.warn(line, stacklevel=5)
