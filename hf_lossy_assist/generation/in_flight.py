"""The texts that `generate_many` writes at a time: admitted, written round by round, returned as they end."""

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from ..engine.call import Call
from ..engine.joining import add_row, drop, joined
from ..engine.loop import decode, run_stages, start_round
from ..models.cached_model import NotJoined
from ..models.introspection import device_of
from ..stats.clock import Clock, estimate_in_flight
from ..stats.speculation import RowStats, SpeculationStats
from ..stops.fallback import Fallback
from ..validation import one_line
from .admission import AdmissionQueue, Capacity, TextRequest
from .call_factory import CallFactory
from .prefill import call_context, tensors_escape


LATEST = 4096  # forwards that the estimate of the target alone looks at


@dataclass(frozen=True)
class Result:
    """One finished text.

    Args:
        index: which prompt it is of, from 0.
        token_ids: new tokens, the end token with them.
        text: what they add to the prompt's text, its first space with it, without special tokens; None where no tokenizer was given.
        speculation (`SpeculationStats`): of this text alone; seconds of forwards, which texts share, are not in it.
        seconds: from the moment that it was given a place until it ended.
    """

    index: int
    token_ids: list[int]
    text: str | None
    speculation: SpeculationStats
    seconds: float


class FinishedTexts:
    """Statistics of all texts that have ended, in as much memory however many they are."""

    def __init__(self, clock: Clock):
        """`clock`: of the rounds in which texts are written together."""
        self.clock = clock
        self.together: SpeculationStats | None = None
        self.apart: SpeculationStats | None = None

    def add(self, text: SpeculationStats, apart: bool = False) -> None:
        """Count a text; `apart`: it was written alone, and has seconds of its own."""
        if apart:
            self.apart = _summed(self.apart, text)
        else:
            self.together = _summed(self.together, text)
            self.clock.seconds()  # on a CUDA device: what was measured since the last text
            del self.clock.reads[:-LATEST]

    def stats(self) -> SpeculationStats | None:
        """Return those of all texts, with the seconds of all forwards so far; None: no text has ended."""
        together = self.together
        if together is not None:
            seconds = self.clock.seconds()
            alone = estimate_in_flight(self.clock.reads, together.rows[0].num_new_tokens, seconds.get("prefill", 0.0))
            together = replace(together, forwards=dict(self.clock.forwards), seconds=seconds, alone=alone)
        return _summed(together, self.apart)


def _summed(*calls: SpeculationStats | None) -> SpeculationStats | None:
    """Return their sum as one row, which does not know the source of each token."""
    known = [call for call in calls if call is not None]
    if not known:
        return None
    out = SpeculationStats.merge(known)
    return replace(out, rows=[out.total()])


class InFlight:
    """The texts that are being written."""

    def __init__(self, calls: CallFactory, capacity: Capacity):
        self.calls, self.capacity = calls, capacity
        self.target, self.policy = calls.target, calls.policy
        self.max_rows = capacity.rows
        self.call: Call | None = None
        self.clock = Clock(device_of(self.target))
        self.stats = SpeculationStats([RowStats() for _ in range(self.max_rows)], 0, self.policy.lossless)
        self.finished = FinishedTexts(self.clock)
        self.running: dict[int, TextRequest] = {}  # by the place in the call
        self.alone: list[tuple[TextRequest, Call]] = []  # that cannot be joined to others
        self.requeued: list[TextRequest] = []  # that memory had no room for
        self.admission = AdmissionQueue(calls, capacity)
        self.lasting: bool | None = None  # one mode of autograd for all texts, which share tensors
        self.announced: set[str] = set()

    @property
    def going(self) -> int:
        """The number of texts that are being written, or are to be written again."""
        return len(self.running) + len(self.admission.queue) + len(self.alone) + len(self.requeued)

    def admit(self, index: int, prompt: str | Sequence[int], **overrides: object) -> bool:
        """Take a prompt among the texts if there is room for it; return whether there was. `overrides`: settings of this text, such as `max_new_tokens`."""
        return not self.requeued and self._admit(index, self.calls.ids(index, prompt), overrides)

    def _admit(self, index: int, ids: list[int], overrides: dict[str, Any]) -> bool:
        # Whether texts can be joined, the first one shows.
        return self.admission.admit(
            index, ids, overrides, self._running_lengths(), ahead=self.call is not None and not self.alone
        )

    def _running_lengths(self) -> list[int]:
        return [request.longest for request in (*self.running.values(), *(request for request, _ in self.alone))]

    def _start_waiting(self) -> None:
        """Have the models read the prompts that wait, and give them their places."""
        starting = False
        try:
            while not self.alone and self.admission.has_next(self._running_lengths()):
                request, call = self.admission.queue[0]
                if not request.read:
                    self.admission.read(self._mode, self._running_lengths(), several=self.call is not None)
                starting = True
                self._start(request, call)
                starting = False
                self.admission.queue.pop(0)
            if self.admission.queue:
                with self._mode(self.admission.queue[0][1]):
                    self.admission.settle()
            return
        except torch.OutOfMemoryError:
            if not self._may_restart():
                raise
        if starting or not self.running or not self.admission.holds_memory:
            self._restart()
        else:  # what is read ahead goes first; running texts go on
            self._warn_once("generate_many: memory ran out; goes on without prompts that are read ahead")
            self._requeue(self.admission.evict())

    def _start(self, request: TextRequest, call: Call) -> None:
        """Give a text whose prompt was read its place."""
        request.began = time.perf_counter()
        with self._mode(call):
            try:
                if self.call is None:
                    self.call, place = joined(call, self.max_rows, self.clock), 0
                else:
                    place = add_row(self.call, call)
            except NotJoined as reason:
                self._warn_once(f"generate_many writes one text at a time here: {one_line(reason)}")
                self.alone.append((request, call))
                return
        self.stats.rows[place] = RowStats()
        self.running[place] = request

    def step(self, rounds: int | None = None) -> list[Result]:
        """Run rounds until a text has ended, at most `rounds`; return the texts that have."""
        if self.requeued and self._admit(
            self.requeued[-1].index, self.requeued[-1].prompt, self.requeued[-1].overrides
        ):
            self.requeued.pop()
            return []
        self._start_waiting()
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
                if not any(call.rows.finished) and not self._may_restart():
                    raise
            out = self._results(call)  # also of texts that ended in the round before memory ran out
        if ran_out and self.running:
            self._restart()
        if not self.running:
            self.call = None
        return out

    def _results(self, call: Call) -> list[Result]:
        """Return those of the texts that have ended."""
        rows = zip(call.rows.row_id_list, call.rows.finished, strict=True)
        return [self._result(b) for b, (place, over) in enumerate(rows) if over and place in self.running]

    def numbers(self) -> list[int]:
        """Return those of all texts that are being written, or are to be written again."""
        waiting = [request for request, _ in (*self.admission.queue, *self.alone)]
        return [request.index for request in (*self.running.values(), *waiting, *self.requeued)]

    def written(self) -> Iterator[tuple[int, list[int]]]:
        """Yield the number of each text that is being written together with others, and its new tokens so far."""
        rows = None if self.call is None else self.call.rows
        for b, place in enumerate([] if rows is None else rows.row_id_list):
            if rows is not None and place in self.running:
                yield self.running[place].index, rows.new_tokens(b).tolist()

    def cancel(self, index: int) -> None:
        """Give up a text: its place is free."""
        self.admission.cancel(index)
        self.requeued = [request for request in self.requeued if request.index != index]
        self.alone = [(request, call) for request, call in self.alone if request.index != index]
        for place in [place for place, request in self.running.items() if request.index == index]:
            assert self.call is not None
            del self.running[place]
            self.call.rows.finished[self.call.rows.row_id_list.index(place)] = True
        if not self.running:
            self.call = None

    def _may_restart(self) -> bool:
        """Return whether it takes less memory to write the texts again: fewer at a time, or with nothing held beside them. The first one runs alone."""
        return (self.call is not None and self._at_a_time() > 1) or self.admission.holds_memory

    def _at_a_time(self) -> int:
        return min(len(self.running) + len(self.admission.queue), self.capacity.rows)

    def _restart(self) -> None:
        """Begin all texts anew, half as many at a time: a forward that ran out of memory may have left anything half done.

        They have the same random numbers, and so are the same.
        """
        texts = self._at_a_time()
        self.capacity.rows = max(texts // 2, 1)
        self._warn_once(
            f"generate_many: memory ran out with {texts} texts at a time; goes on with {self.capacity.rows}"
        )
        self._requeue([*self.running.values(), *self.admission.evict()])
        self.running.clear()
        self.call = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _requeue(self, texts: Sequence[TextRequest]) -> None:
        """Put these texts back to be written later, the first of them first."""
        self.requeued = sorted([*self.requeued, *texts], key=lambda request: request.index, reverse=True)

    def close(self) -> None:
        """Give back what is held for texts that nobody will write."""
        self.running.clear()
        self.alone.clear()
        self.requeued.clear()
        self.call = None
        self.admission = AdmissionQueue(self.calls, self.capacity)

    def _result(self, b: int) -> Result:
        assert self.call is not None
        place = self.call.rows.row_id_list[b]
        row, self.stats.rows[place] = self.stats.rows[place], RowStats()
        settings = self.call.stop.settings
        stats = SpeculationStats(
            [row], settings.longest, self.policy.lossless, falls_back=isinstance(settings, Fallback)
        )
        self.finished.add(stats)
        result = self._made(self.running[place], self.call.rows.new_tokens(b), stats)
        del self.running[place]
        return result

    def _finished_alone(self, request: TextRequest, call: Call) -> Result:
        with closing(call), self._mode(call):
            stats = decode(call)
            self.finished.add(stats, apart=True)
            return self._made(request, call.rows.new_tokens(0), stats)

    def _made(self, request: TextRequest, tokens: torch.Tensor, stats: SpeculationStats) -> Result:
        ids = tokens.tolist()
        return Result(
            request.index, ids, self.calls.text(request.prompt, ids), stats, time.perf_counter() - request.began
        )

    def _mode(self, call: Call) -> AbstractContextManager[None]:
        if self.lasting is None:
            self.lasting = self.calls.runs_callers_code or tensors_escape(call, self.target)
        return call_context(call, self.target, self.lasting)

    def _warn_once(self, line: str) -> None:
        if line not in self.announced:
            self.announced.add(line)
            warnings.warn(line, stacklevel=5)
