"""Continuous batching: prompts are prefilled in blocks, then their rows join the batch until their texts end."""

import math
import time
import warnings
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..engine.call import Call, TokenLogprobs, insert, with_places, with_prompts
from ..engine.loop import decode, drop_finished, keep_rows, run_stages, start_round
from ..models.introspection import device_of
from ..models.prefix_cache import WORTH_COPYING, PrefixCache, state_of
from ..models.row_model import keeps_prompts
from ..stats.clock import Clock
from ..stats.speculation import RowStats, SpeculationStats
from .output import FinishedTexts, Result
from .prefill import call_context, read_prompts, read_some
from .preparation import Preparation, PromptBlock, TextRequest


# Prompt tokens to prefill between two rounds, and ahead of free rows. With fewer, the cost of a forward exceeds that of
# the tokens (docs/log.md); with more, running texts would stall.
AHEAD = 1024


class Scheduler:
    """A scheduler for up to `rows` texts at a time and `tokens` tokens in total, prompts included;
    a text that needs more runs alone."""

    def __init__(
        self, preparation: Preparation, rows: int, tokens: int | None = None, prefixes: PrefixCache | None = None
    ):
        """`prefixes`: a cache shared with other schedulers; None: a new one."""
        self.preparation, self.rows, self.most_rows, self.tokens = preparation, rows, rows, tokens
        self.target, self.policy = preparation.target, preparation.policy
        self.prefixes = PrefixCache() if prefixes is None else prefixes
        self.waiting: deque[TextRequest] = deque()
        self.block: PromptBlock | None = None
        self.running: dict[int, TextRequest] = {}  # by row of the call
        self.call: Call | None = None
        self.clock = Clock(device_of(self.target))
        self.stats = SpeculationStats([RowStats() for _ in range(rows)], 0, self.policy.lossless)
        self.finished = FinishedTexts(self.clock)
        self.reads_ahead = True  # until memory runs out
        self.escapes: bool | None = None  # one autograd mode for all texts, which share tensors
        self.disturbed = True  # something other than rounds has run
        self.states: list[Hashable] = []  # of the models, when they last began to read prompts
        self.looks = self.shown = self.drains = False  # see `_look_at_weights`
        self.announced: set[str] = set()

    # -- incoming requests --------------------------------------------------------------------------------------------

    @property
    def going(self) -> int:
        """The number of running and waiting texts."""
        return len(self.running) + len(self._ahead)

    @property
    def _ahead(self) -> list[TextRequest]:
        """The requests that have not joined the batch, in order."""
        return [*(self.block.requests.values() if self.block else ()), *self.waiting]

    def admit(self, request: TextRequest) -> bool:
        """Take a request if there is room for its text or its prompt; return whether it was taken."""
        ahead, prompts = self._ahead, sum(len(other.prompt) for other in self.waiting)
        soon = self.reads_ahead and self.running and len(self.running) + len(ahead) - len(self.waiting) < self.rows
        fits = self._fits(request, ahead) or (
            soon and len(ahead) < self.rows and prompts + len(request.prompt) <= AHEAD and request.row is not None
        )
        if fits:
            current = request.template is self.preparation.template
            self.waiting.append(
                request if current else self.preparation.prepare(request.index, request.prompt, request.settings)
            )
        return bool(fits)

    def _fits(self, request: TextRequest, beside: Sequence[TextRequest] = (), reserved: int = 0) -> bool:
        """Return whether a text fits beside the running ones, `beside` and `reserved` tokens; a single text does."""
        going = [*self.running.values(), *beside]
        return not going or (len(going) < self.rows and self._room([*going, request], reserved) >= 0)

    def _room(self, texts: Sequence[TextRequest], reserved: int) -> float:
        """Return the number of tokens left beside these texts and `reserved` tokens."""
        return math.inf if self.tokens is None else self.tokens - reserved - sum(request.longest for request in texts)

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Result]:
        """Prefill waiting prompts, let prefilled ones join, and run a round; return the finished texts."""
        if self.going and (self.looks or (self.block is None and self.waiting and self._fits(self.waiting[0]))):
            self._look_at_weights()
        first = self.waiting[0] if self.block is None and self.waiting else None
        if first is not None and self._fits(first) and self._is_alone(first):
            return [self._write_alone(self.waiting.popleft())]
        try:
            with self._mode():
                self._read()
        except torch.OutOfMemoryError:
            self._stop_reading()
            return []
        ended: list[Result] = []
        try:
            with self._mode():
                self._give_places()
                self._run_round()
                ended = self._ended()
        except torch.OutOfMemoryError:
            ended = self._ended()  # finished before memory ran out
            if self.running or self.block:
                self._restart(may_raise=not ended)
        self.call = self.call if self.going else None
        return ended

    def _read(self) -> None:
        """Continue the current block of prompts, or start the next one if its first text fits."""
        if self.block is None and self.waiting and not self.drains and self._fits(self.waiting[0]):
            self.block = self._next_block()
        block, self.disturbed = self.block, self.disturbed or self.block is not None
        if block is not None and not block.read:
            block.read = read_some(block.call, AHEAD)
            if block.read:
                block.call.drafter.prompts_are_read(block.call.rows)
                block.keep(self.prefixes, self._room(list(self.running.values()), block.tokens))

    def _next_block(self) -> PromptBlock:
        """Take the waiting prompts to prefill together; of prompts with a common prefix only the first, since the
        others can reuse it later."""
        root = None
        if self._with_prefixes(self.waiting[0].template.call):
            root = self.prefixes.root([*self.states, self.waiting[0].settings.get("tenant", "")])
        running, beginnings = [*self.running.values(), self.waiting[0]], set[tuple[int, ...]]()
        taken, width, missing = list[TextRequest](), 0, 0
        for request in self.waiting:
            ids = request.prompt
            cached = 0 if root is None else self.prefixes.count(root, ids)
            goes_on = root is not None and len(ids) > cached + WORTH_COPYING
            beginning = tuple(ids[: cached + WORTH_COPYING]) if goes_on else ()
            width, missing = max(width, len(ids)), max(missing, len(ids) - cached)
            count = len(taken) + 1
            if taken and (
                count > self.rows
                or count * missing > AHEAD
                or beginning in beginnings
                or (root is not None and request.settings.get("tenant") != taken[0].settings.get("tenant"))
                or self._is_alone(request, taken[0])
                or self._room(running, count * width) < 0
                or not (self.reads_ahead or self._fits(request, taken))
            ):
                break
            taken.append(request)
            beginnings |= {beginning} if beginning else set()
        self.prefixes.shrink(self._room(running, len(taken) * width))
        block = PromptBlock(
            with_prompts(self.call or taken[0].template.call, [request.row for request in taken if request.row]),
            dict(enumerate(taken)),
            root,
        )
        block.call.clock, block.call.name_row = self.clock, lambda row: f"prompt {taken[row].index}"
        block.take(self.prefixes)
        for _ in taken:
            self.waiting.popleft()
        return block

    def _give_places(self) -> None:
        """Let prefilled texts join the batch in order, as far as they fit."""
        block, taken = self.block, list[int]()
        if block is None or not block.read:
            return
        for row, request in block.requests.items():
            reserved = 0 if len(taken) + 1 == len(block.requests) else block.tokens
            if not self._fits(request, [block.requests[other] for other in taken], reserved):
                break
            taken.append(row)
        if not taken:
            return
        requests = [block.requests[row] for row in taken]
        reserved = block.tokens if len(taken) < len(block.requests) else 0
        self.prefixes.shrink(self._room([*self.running.values(), *requests], reserved))
        items = [request.row for request in requests if request.row is not None]
        if self.call is None or (not self.running and self.call.rows.eos != items[0].end_tokens):
            call = requests[0].template.call
            self.call = with_places(call, self.most_rows, items[0].ends.max_length, self.clock, items[0].end_tokens)
            self.call.name_row = lambda row_id: f"prompt {self.running[row_id].index}"
        began = time.perf_counter()
        for row_id, request in zip(insert(self.call, block.call, taken, items), requests, strict=True):
            request.began, self.running[row_id], self.stats.rows[row_id] = began, request, RowStats()
        block.requests = {row: request for row, request in block.requests.items() if row not in taken}
        self.block = block if block.requests else None

    def _run_round(self) -> None:
        call = self.call
        if call is None or not self.running:
            return
        if self.disturbed:
            call.stop.interrupted()
        if self.tokens is None:
            drop_finished(call)
        else:  # to free their storage
            keep_rows(call, [b for b, over in enumerate(call.rows.finished) if not over])
        run_stages(call, start_round(call), self.stats)
        call.rows.check_time()
        self.disturbed = False

    def _ended(self) -> list[Result]:
        """Remove and return the finished texts."""
        if self.call is None:
            return []
        rows, out = self.call.rows, list[Result]()
        for b, (row_id, over) in enumerate(zip(rows.row_id_list, rows.finished, strict=True)):
            if over and row_id in self.running:
                stats = self.call.make_stats([self.stats.rows[row_id]])
                self.finished.add(stats)
                out.append(self._result(self.running.pop(row_id), self.call, b, stats))
        return out

    def _result(self, request: TextRequest, call: Call, b: int, stats: SpeculationStats) -> Result:
        ids, seconds = call.rows.new_tokens(b).tolist(), time.perf_counter() - request.began
        self.disturbed = self.looks = True
        text = self.preparation.text(request.prompt, ids)
        return Result(request.index, ids, text, stats, seconds, call.logprobs_of(b), call.rows.finish_reason(b))

    # -- texts that cannot be batched ---------------------------------------------------------------------------------

    def _is_alone(self, request: TextRequest, beside: TextRequest | None = None) -> bool:
        """Return whether a text cannot be batched with the running texts and `beside`; warn once."""
        others = [*self.running.values(), *([] if beside is None else [beside])]
        reason = request.template.why_alone if request.row is None else None
        if request.row is not None and any(
            other.row and other.row.end_tokens != request.row.end_tokens for other in others
        ):
            reason = "texts with other end tokens"
        if reason is not None:
            self._warn_once(f"generate_many writes one text at a time here: {reason}")
        return reason is not None

    def _write_alone(self, request: TextRequest) -> Result:
        request.began = time.perf_counter()
        call = self.preparation.call_alone(request)
        with call, call_context(call, self.target, self._escapes(request)):
            read_prompts(call)
            stats = decode(call)
            self.finished.add(stats, apart=True)
            return self._result(request, call, 0, stats)

    def _with_prefixes(self, call: Call) -> bool:
        """Return whether cached prefixes of a call's models can be shared by prompts."""
        return self.reads_ahead and not call.drafter.reads_target and all(map(keeps_prompts, call.models))

    # -- other weights, out of memory, and the end ---------------------------------------------------------------------

    def _look_at_weights(self) -> None:
        """Restart unfinished texts if weights changed, or once those with shown tokens have ended (`drains`)."""
        call = next(iter((*self.running.values(), *self._ahead))).template.call
        states = [state_of(decoder.model) for decoder in call.models if hasattr(decoder, "model")]
        changed, running = self.states not in ([], states), list(self.running.values())
        self.drains = self.looks = changed and self.shown and bool(running)
        self.states = self.states if self.drains else states
        if changed and not self.drains:
            self.running.clear()
            self.preparation.template = None
            self.call = None
        if changed:
            self._requeue([] if self.drains else running)

    def _stop_reading(self) -> None:
        """Handle out of memory in prefill: first drop what texts outside the batch hold."""
        if not self.running or not (self.reads_ahead or self.prefixes.tokens):
            self._restart()
            return
        self._warn_once("generate_many: memory ran out; goes on without prompts that are read ahead")
        self._requeue([], frees=True)

    def _restart(self, may_raise: bool = True) -> None:
        """Restart all texts with half as many rows, since a forward that ran out of memory may have left inconsistent
        state.

        They use the same random numbers, hence give the same texts. Reraises the current error if nothing is left to
        drop.
        """
        texts = min(len(self.running) + len(self.block.requests if self.block else ()), self.rows)
        if texts <= 1 and not self.prefixes.tokens and may_raise:
            raise
        self.rows = max(texts // 2, 1)
        self._warn_once(f"generate_many: memory ran out with {texts} texts at a time; goes on with {self.rows}")
        running = list(self.running.values())
        self.running.clear()
        self.call = None
        self._requeue(running, frees=True)
        torch.cuda.empty_cache()

    def _requeue(self, running: Sequence[TextRequest], frees: bool = False) -> None:
        """Return the texts of the block and `running` to the queue, all prepared anew.
        `frees`: stop prefilling ahead, and drop the prefixes."""
        texts = *running, *self._ahead
        anew = [self.preparation.prepare(text.index, text.prompt, text.settings) for text in texts]
        self.waiting, self.block = deque(sorted(anew, key=lambda request: request.index)), None
        if frees:
            self.reads_ahead = False
            self.prefixes.shrink(0)

    def numbers(self) -> list[int]:
        """Return the indices of all running and waiting texts."""
        return [request.index for request in (*self.running.values(), *self._ahead)]

    def written(self) -> Iterator[tuple[int, list[int], list[TokenLogprobs] | None]]:
        """Yield, for each text in the batch, its index, its new tokens so far, and its log-probabilities as in
        `Result.logprobs`."""
        self.shown = True
        for b, row_id in enumerate([] if self.call is None else self.call.rows.row_id_list):
            if row_id in self.running and self.call is not None:
                yield self.running[row_id].index, self.call.rows.new_tokens(b).tolist(), self.call.logprobs_of(b)

    def cancel(self, index: int) -> None:
        """Cancel a text and free its row."""
        self.waiting = deque(request for request in self.waiting if request.index != index)
        if self.block is not None:
            left = {row: request for row, request in self.block.requests.items() if request.index != index}
            self.block = replace(self.block, requests=left) if left else None
        for row_id in [row_id for row_id, request in self.running.items() if request.index == index]:
            assert self.call is not None
            del self.running[row_id]
            self.call.rows.finished[self.call.rows.row_id_list.index(row_id)] = True
        if not self.running:
            self.call = None

    def close(self) -> None:
        """Release everything that is held for unfinished texts."""
        self.running.clear()
        self.waiting.clear()
        self.block = self.call = None
        self.prefixes = PrefixCache()

    def _escapes(self, request: TextRequest) -> bool:
        if self.escapes is None:
            self.escapes = self.preparation.runs_callers_code or request.template.escapes
        return self.escapes

    def _mode(self) -> AbstractContextManager[Any]:
        first = next(iter((*self.running.values(), *self._ahead)), None)
        return nullcontext() if first is None else call_context(first.template.call, self.target, self._escapes(first))

    def _warn_once(self, line: str) -> None:
        if line not in self.announced:
            self.announced.add(line)
            warnings.warn(line, stacklevel=5)
