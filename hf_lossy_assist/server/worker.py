"""The thread that writes all texts: requests arrive as jobs, and events of their texts are sent back."""

import asyncio
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch

from ..batch.suffix_memory import POOL_TOKENS, Hints, SuffixMemory
from ..drafters.auto import AutoDrafter
from ..drafters.base import Drafter, split_assistant_and_drafter
from ..drafters.suffix import SuffixDrafter
from ..engine.call import TokenLogprobs
from ..generation.many import generate_many
from ..generation.output import Result
from ..generation.preparation import Preparation, TextRequest
from ..generation.scheduler import Scheduler
from ..models.prefix_cache import PrefixCache
from ..text.structured import MatchedRow, StructuredOutput
from ..validation import one_line
from .bodies import RequestError
from .detokenize import EndAtStops
from .requests import CompletionRequest


MOST_TENANTS = 8  # whose finished texts are held, of about 32 MB each
NOT_WRITABLE = "response_format or tools: the schema asks for what the tokenizer of this model cannot write"


@dataclass(frozen=True)
class Progress:
    """New tokens of a text so far; `logprobs`: of these and possibly later ones, if requested."""

    ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


Event = Progress | Result | Exception  # the last: why a text will not be written


class LatestEvents:
    """The last event of each text of a request, on its way from the worker's thread to an event loop.

    It includes all earlier ones, so events do not pile up for a client that does not read.
    """

    def __init__(self) -> None:
        self._loop, self._came = asyncio.get_running_loop(), asyncio.Event()
        self._events: dict[int, Event] = {}  # by the text's index in the request

    def tell(self, index: int, event: Event) -> None:
        """Replace the text's last event; callable from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._put, index, event)

    def _put(self, index: int, event: Event) -> None:
        self._events[index] = event
        self._came.set()

    async def get(self) -> tuple[int, Event]:
        """Return the index and the event of the text that has waited longest."""
        while not self._events:
            self._came.clear()
            await self._came.wait()
        index = next(iter(self._events))
        return index, self._events.pop(index)


@dataclass
class Job:
    """A request and the receiver of its events. `tell` is called in the worker's thread, and must not block."""

    id: int
    request: CompletionRequest
    tell: Callable[[Event], None]
    prepared: TextRequest | None = None  # once its group is known


class Worker(threading.Thread):
    """Writes up to `rows` texts at a time. Texts with the same policy and sampling settings share their rounds."""

    def __init__(
        self,
        models: tuple[Any, Any, Any],
        policies: Mapping[str, Any],
        rows: int,
        waiting: int,
        drafter: Drafter | None = None,
    ):
        """`models`: target, draft (a model or a drafter) and tokenizer. `waiting`: how many texts may wait beside the rows.

        `drafter`: what drafts in place of the draft alone; if it searches texts, it searches the finished ones of a request's tenant, too.
        """
        super().__init__(name="hf-lossy-serve", daemon=True)
        self.target, _, self.tokenizer = models
        self.draft, self.drafter = split_assistant_and_drafter(models[1], drafter)
        self._pools: OrderedDict[str, SuffixMemory] = OrderedDict()  # finished texts by tenant
        self.policies, self.rows, self.most = policies, rows, rows + waiting
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()  # an id cancels its job
        self._jobs: dict[int, Job] = {}  # unfinished ones; the event loop adds, this thread removes
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._groups: dict[Any, Scheduler] = {}
        self._prefixes = PrefixCache()  # of all groups
        self._last_id = 0
        self.error: BaseException | None = None

    # -- what others call ---------------------------------------------------------------------------------------------

    def check_room(self, texts: int) -> None:
        """Refuse so many more texts if there is no room for them to wait. Raises: `RequestError`, one line."""
        if len(self._jobs) + texts > self.most:
            raise RequestError("too many requests are waiting: try again later", 429)

    def submit(self, requests: Sequence[CompletionRequest], tell: Callable[[int, Event], None]) -> list[int]:
        """Queue texts, all or none; return the ids of their jobs. `tell` is also called with the index of the text. Raises: as `check_room`."""
        with self._lock:
            self.check_room(len(requests))
            first = self._last_id + 1
            self._last_id += len(requests)
            jobs = [Job(first + n, request, partial(tell, n)) for n, request in enumerate(requests)]
            self._jobs |= {job.id: job for job in jobs}
        for job in jobs:
            self._inbox.put(job)
        return [job.id for job in jobs]

    def cancel(self, job_id: int) -> None:
        """Cancel a job, if it is not finished."""
        self._inbox.put(job_id)

    def check_settings(self) -> None:
        """Write a token with each policy, so that a server whose every request would fail does not start. Errors: those of the models."""
        settings: dict[str, Any] = {"tokenizer": self.tokenizer, "max_new_tokens": 1, "seed": 0}
        settings |= {"assistant_model": self.draft, "drafter": self.drafter}
        for policy in self.policies.values():
            prompt = self.tokenizer("a")["input_ids"] or [0]
            next(generate_many(self.target, [prompt], lossy_policy=policy, **settings))

    def give_up(self) -> None:
        """End the texts being written, and tell their clients."""
        self._fail(list(self._jobs), RequestError("the server ended before the text did: ask again", 503))

    def stop(self, seconds: float | None = None) -> None:
        """Stop once all jobs are finished, and wait for it, at most so many seconds: a round that has begun is completed."""
        self._inbox.put(None)
        self.join(seconds)

    @property
    def load(self) -> tuple[int, int]:
        """Return how many texts are being written, and how many wait."""
        going = self._going
        return going, max(len(self._jobs) - going, 0)

    @property
    def _going(self) -> int:
        return sum(group.going for group in list(self._groups.values()))

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            going = True
            while going or self._jobs:
                going &= self._read(wait=not self._waiting and not self._going)
                self._admit()
                for key in [key for key, group in self._groups.items() if group.going]:
                    self._step(key)
        except Exception as error:
            self.error = error
            self._fail(list(self._jobs), error)
            raise

    def _read(self, wait: bool) -> bool:
        """Process the inbox; return False if no more will come."""
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if item is None:
                return False
            if isinstance(item, Job):
                self._waiting.append(item)
            elif self._pop(item) is not None:
                self._waiting = deque(job for job in self._waiting if job.id != item)
                for group in self._groups.values():
                    group.cancel(item)

    def _admit(self) -> None:
        """Admit waiting jobs in order; if a group has no room, those of other groups."""
        full: list[Scheduler] = []
        for job in list(self._waiting):
            if self._going >= self.rows:
                return
            try:
                group = self._get_group(job.request)
                if group in full:
                    continue
                job.prepared = job.prepared or self._prepare(job, group.preparation)
                if not group.admit(job.prepared):
                    full.append(group)
                    continue
            except (ValueError, TypeError) as error:
                self._fail([job.id], error if _is_of_a_model(error) else RequestError(one_line(error, 400)))
            except Exception as error:
                self._fail([job.id], error)
            self._waiting.remove(job)

    def _prepare(self, job: Job, preparation: Preparation) -> TextRequest:
        request, stops, grammar = job.request, job.request.stops, job.request.grammar
        settings: dict[str, Any] = dict(request.arguments)
        if stops.texts:
            settings["stopping_criteria"] = lambda ids: [EndAtStops(self.tokenizer, stops, ids)]
        if grammar is not None:  # a text that is stuck ends, since an error in a round would fail all its texts
            settings["logits_processor"] = lambda _: [StructuredOutput([grammar], ends_stuck=True)]
        memories = self._find_memories(request)
        return preparation.request(job.id, request.ids, memories=memories, tenant=request.tenant, **settings)

    def _find_memories(self, request: CompletionRequest) -> list[SuffixMemory]:
        """Return the texts from which a text may be drafted: its prediction, and the finished texts of its tenant.

        These only where they cannot change the text that a seed repeats, or that a lossy policy writes.
        """
        if not isinstance(getattr(self.drafter, "first", self.drafter), SuffixDrafter):
            return []
        hints: list[SuffixMemory] = [Hints([request.prediction])] if request.prediction else []
        if request.repeatable or not self.policies[request.policy].lossless:
            return hints
        pool = self._pools.setdefault(request.tenant, SuffixMemory(POOL_TOKENS))
        self._pools.move_to_end(request.tenant)
        if len(self._pools) > MOST_TENANTS:
            self._pools.popitem(last=False)
        return [*hints, pool]

    def _get_group(self, request: CompletionRequest) -> Scheduler:
        drafter = self.drafter
        if isinstance(drafter, AutoDrafter) and request.repeatable:
            drafter = drafter.without_choice(self.draft is not None)
        key = request.policy, drafter is self.drafter, tuple(sorted(request.sampling.items()))
        if key in self._groups and not self._groups[key].going:
            group = self._groups[key]
            group.rows, group.reads_ahead = self.rows, True  # may have been changed when memory ran out
        if key not in self._groups:
            # Drop groups without a text, since clients may send any temperature.
            self._groups = {other: group for other, group in self._groups.items() if group.going}
            settings = request.sampling | {"assistant_model": self.draft, "drafter": drafter}
            preparation = Preparation(self.target, self.policies[request.policy], self.tokenizer, None, settings)
            self._groups[key] = Scheduler(preparation, self.rows, prefixes=self._prefixes)
        return self._groups[key]

    def _step(self, key: Any) -> None:
        """Run one round of a group."""
        group = self._groups[key]
        ids = group.numbers()
        try:
            group.disturbed |= sum(other.going > 0 for other in self._groups.values()) > 1
            results, written = group.step(), list(group.written())
        except Exception as error:
            del self._groups[key]
            self._fail(ids, error)
            return
        for result in results:
            if (job := self._pop(result.index)) is not None:
                job.tell(RequestError(NOT_WRITABLE) if _is_stuck(job.request, result) else result)
        for job_id, tokens, logprobs in written:
            job = self._jobs.get(job_id)
            if job is not None and job.request.stream:
                job.tell(Progress(tokens, logprobs))

    def _fail(self, job_ids: list[int], error: Exception) -> None:
        """Tell clients of the error; end the thread if its device is lost, since nothing can be written any more."""
        for job_id in job_ids:
            if (job := self._pop(job_id)) is not None:
                job.tell(error)
        if self.error is None and isinstance(error, getattr(torch, "AcceleratorError", ())):
            raise error

    def _pop(self, job_id: int) -> Job | None:
        with self._lock:
            return self._jobs.pop(job_id, None)


def _is_of_a_model(error: BaseException | None) -> bool:
    """Return whether a model raised an error, or one that led to it; otherwise `generate` refused its arguments."""
    while error is not None:
        if any(frame.f_code is torch.nn.Module._call_impl.__code__ for frame, _ in walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_stuck(request: CompletionRequest, result: Result) -> bool:
    """Return whether a text ended because the tokenizer cannot write what its grammar requires."""
    grammar, ids = request.grammar, result.token_ids
    if grammar is None or not ids or ids[-1] not in grammar.tokenizer_info.stop_token_ids:
        return False
    return not MatchedRow(grammar).is_whole(ids)
