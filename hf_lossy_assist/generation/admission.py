"""The waiting requests of `generate_many`. Their prompts are read together, some of them ahead of time."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.row_model import RowModel, joins, keeps_prompts
from .call_factory import CallFactory
from .prefill import read_prompts_together


# Tokens of the prompts that are read before there is a place for their texts, and of a forward that reads several: in fewer, a machine spends
# more on the forward than on the tokens (docs/log.md).
AHEAD = 1024
WORTH_COPYING = 32  # tokens that two prompts have in common


@dataclass
class Capacity:
    """The most texts in flight, and the most tokens that they may come to."""

    rows: int
    tokens: int | None = None

    def fits(self, going: Sequence[int], more: int, held: int = 0) -> bool:
        """Return whether a text of `more` tokens fits beside those of `going` and `held` tokens of prompts read ahead. One text always does."""
        return not going or (len(going) < self.rows and self.holds([*going, more], held))

    def holds(self, going: Sequence[int], held: int) -> bool:
        """Return whether there is memory for the texts of `going` and `held` tokens beside them."""
        return self.tokens is None or sum(going) + held <= self.tokens

    def reads(self, going: Sequence[int], prompts: Sequence[int], most: int) -> bool:
        """Return whether `prompts` of so many tokens, `most` together and no more than there are places, can be held beside the texts of `going`."""
        return len(prompts) <= self.rows and sum(prompts) <= most and self.holds(going, sum(prompts))


@dataclass
class TextRequest:
    """A text that is to be written."""

    index: int  # of its prompt
    prompt: list[int]
    overrides: dict[str, Any]  # settings
    longest: int  # tokens that it can come to
    read: bool = False  # whether the models have read its prompt
    settled: bool = False  # whether what was read is in storage of its own
    began: float = 0.0  # when it was given a place, as `time.perf_counter` counts


class PrefixCache:
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
        """Copy to the models of a call what its prompt begins with; return whether there was any."""
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


class AdmissionQueue:
    """Requests that wait for a place, in their order."""

    def __init__(self, calls: CallFactory, capacity: Capacity):
        self.calls, self.capacity = calls, capacity
        self.pending: tuple[TextRequest, Call] | None = None  # prepared, and not admitted yet
        self.queue: list[tuple[TextRequest, Call]] = []
        self.prefixes = PrefixCache()
        self.reads_ahead = True  # until memory runs out

    def admit(
        self, index: int, ids: list[int], overrides: dict[str, Any], running: Sequence[int], ahead: bool
    ) -> bool:
        """Admit a prompt if there is room for its text, or, `ahead` of it, for the prompt; return whether there was.

        `running`: how many tokens each running text can come to. `overrides`: settings of this text.
        """
        if self.pending is None or self.pending[0].index != index:
            call = self.calls.make(index, ids, overrides)
            self.pending = TextRequest(index, ids, overrides, call.rows.max_length), call
        request, _ = self.pending
        running, behind = list(running), [other for other, _ in self.queue]
        while behind and self.capacity.fits(running, behind[0].longest, _count_read(behind[1:])):
            running.append(behind.pop(0).longest)
        fits = not behind and self.capacity.fits(running, request.longest)
        if not fits and ahead and self.reads_ahead:
            fits = self.capacity.reads(running, [len(other.prompt) for other in (*behind, request)], AHEAD)
        if fits:
            self.queue.append(self.pending)
            self.pending = None
        return fits

    def has_next(self, running: Sequence[int]) -> bool:
        """Return whether a request waits, and a place is free for it."""
        behind = [request for request, _ in self.queue[1:]]
        return bool(self.queue) and self.capacity.fits(running, self.queue[0][0].longest, _count_read(behind))

    def read(
        self, mode: Callable[[Call], AbstractContextManager[None]], running: Sequence[int], several: bool
    ) -> None:
        """Have the models read the first prompts that they have not read, `several` in one forward or one. The first has a place."""
        unread = [(request, call) for request, call in self.queue if not request.read]
        several &= not unread[0][1].drafter.reads_target  # whose hooks are of one text's forward
        taken = [*running, self.queue[0][0].longest]
        held, longest, count = _count_read([request for request, _ in self.queue[1:]]), 0, 0
        while count < len(unread):
            request = unread[count][0]
            longest, held = (
                max(longest, len(request.prompt)),
                held + len(request.prompt) * (request is not self.queue[0][0]),
            )
            padded = (count + 1) * longest  # what a forward computes
            if count and not (several and padded <= 2 * AHEAD and self.capacity.holds(taken, held)):
                break
            count += 1
        reading = [call for _, call in unread[:count]]
        with mode(reading[0]):
            anew = [call for call in reading if not self.prefixes.give(call)]
            read_prompts_together(reading)
            for call in reading:
                call.drafter.prompts_are_read(call.rows)
            if anew:
                self.prefixes.keep(anew[-1])
        for request, _ in unread[:count]:
            request.read = True

    def settle(self) -> None:
        """Copy the keys and values of prompts that wait on: one of a forward would hold those of all that it read."""
        for request, call in self.queue:
            if request.read and not request.settled:
                for model in filter(joins, cached_models(call)):
                    model.cache = model.cache.first(model.lengths[0])
                request.settled = True

    @property
    def holds_memory(self) -> bool:
        """Tell whether memory is held for prompts of texts that have no place."""
        return bool(self.prefixes.models) or any(request.read for request, _ in self.queue)

    def evict(self) -> list[TextRequest]:
        """Return all requests that wait, for memory ran out; nothing is held any more for texts that have no place."""
        self.reads_ahead = False
        self.prefixes.stop()
        gone, self.queue = self.queue, []
        return [request for request, _ in gone]

    def cancel(self, index: int) -> None:
        """Forget the request of this number."""
        if self.pending is not None and self.pending[0].index == index:
            self.pending = None
        self.queue = [(request, call) for request, call in self.queue if request.index != index]


def _count_read(texts: Sequence[TextRequest]) -> int:
    """Count the tokens of prompts that are read."""
    return sum(len(request.prompt) for request in texts if request.read)
