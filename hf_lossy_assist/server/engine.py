"""The thread in which all texts are written: requests come in, each as a job, and what becomes of them goes out."""

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ..drafters.base import apart
from ..generation.ended import Result
from ..generation.guests import Guests
from ..generation.in_flight import InFlight
from ..generation.places import Room
from .questions import Question
from .texts import EndsAt


@dataclass(frozen=True)
class Written:
    """New tokens of a text so far."""

    ids: list[int]


@dataclass(frozen=True)
class Failed:
    """A text that will not be written, and why."""

    error: Exception


Event = Written | Result | Failed


class Latest:
    """The last event of a text, on its way from the engine's thread to an event loop.

    It says all that those before it did, so that nothing piles up for a client that does not read.
    """

    def __init__(self) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        self.get = self._events.get

    def tell(self, event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody hears it
            self._loop.call_soon_threadsafe(self._put, event)

    def _put(self, event: Event) -> None:
        if not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(event)


@dataclass(frozen=True)
class Job:
    """A question and who hears of it. `tell` is called in the engine's thread, and must not wait."""

    number: int
    question: Question
    tell: Callable[[Event], None]
    began: float


class Full(Exception):
    """There are as many requests as there may be."""


class Engine(threading.Thread):
    """Writes up to `rows` texts at a time. Those with the same policy and the same sampling settings share their rounds."""

    def __init__(self, models: tuple[Any, Any, Any], policies: Mapping[str, Any], rows: int, waiting: int):
        """`models`: target, draft (a model, or a drafter in its place) and tokenizer. `waiting`: how many requests may wait for a place."""
        super().__init__(name="hf-lossy-serve", daemon=True)
        self.target, self.draft, self.tokenizer = models
        self.policies, self.rows, self.most = policies, rows, rows + waiting
        self._inbox: queue.SimpleQueue[Job | int | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # not over yet; the event loop adds, this thread removes
        self._lock = threading.Lock()
        self._waiting: deque[Job] = deque()
        self._groups: dict[Any, InFlight] = {}
        self._numbers = 0
        self.error: BaseException | None = None

    # -- what others call ---------------------------------------------------------------------------------------------

    def ask(self, question: Question, tell: Callable[[Event], None]) -> int:
        """Have a text written; returns the job's number. Raises: `Full`."""
        with self._lock:
            if len(self._jobs) >= self.most:
                raise Full
            self._numbers += 1
            job = Job(self._numbers, question, tell, time.perf_counter())
            self._jobs[job.number] = job
        self._inbox.put(job)
        return job.number

    def cancel(self, number: int) -> None:
        """Give up a job; one that is over is none."""
        self._inbox.put(number)

    def check_settings(self) -> None:
        """Prepare a text of one token for each policy. Raises: `ValueError` or `TypeError`, one line, where every request would be refused."""
        draft, drafter = apart(self.draft, None)
        settings = {"assistant_model": draft, "drafter": drafter, "max_new_tokens": 1}
        for policy in self.policies.values():
            Guests(self.target, policy, self.tokenizer, 0, settings).call(
                0, self.tokenizer("a")["input_ids"] or [0], {}
            )

    def give_up(self, error: Exception) -> None:
        """Fail all jobs."""
        self._fail(list(self._jobs), error)

    def stop(self, seconds: float | None = None) -> None:
        """End once all jobs are over, and wait for it, at most so many seconds: a round that has begun is computed to its end."""
        self._inbox.put(None)
        self.join(seconds)

    @property
    def load(self) -> tuple[int, int]:
        """How many texts are being written, and how many requests wait."""
        with self._lock:
            jobs = len(self._jobs)
        writing = sum(its.going for its in list(self._groups.values()))
        return writing, max(jobs - writing, 0)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            going = True
            while going or self._jobs:
                going &= self._read(wait=not self._waiting and not self._busy)
                self._admit()
                for key in [key for key, its in self._groups.items() if its.going]:
                    self._step(key)
        except Exception as error:
            self.error = error
            self._fail(list(self._jobs), error)
            raise

    @property
    def _busy(self) -> bool:
        return any(its.going for its in self._groups.values())

    def _read(self, wait: bool) -> bool:
        """Take what came in; False: no more will come."""
        while True:
            try:
                came = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if came is None:
                return False
            if isinstance(came, Job):
                self._waiting.append(came)
            else:
                self._forget(came)

    def _forget(self, number: int) -> None:
        job = self._pop(number)
        if job is None:
            return
        self._waiting = deque(its for its in self._waiting if its.number != number)
        for its in self._groups.values():
            its.cancel(number)

    def _admit(self) -> None:
        """Give places to those who wait, in their order; where a group has no room, to those of other groups."""
        full: list[InFlight] = []
        for job in list(self._waiting):
            if sum(its.going for its in self._groups.values()) >= self.rows:
                return
            question = job.question
            try:
                group = self._group(question)
                if group in full:
                    continue
                if not group.admit(job.number, question.ids, **question.own, **self._stops(question)):
                    full.append(group)
                    continue
            except Exception as error:  # what `generate` refuses, or a model raises
                self._fail([job.number], error)
                _refuse_broken_device(error)
            self._waiting.remove(job)

    def _stops(self, question: Question) -> dict[str, Any]:
        stops = question.stops
        return {"stopping_criteria": lambda ids: [EndsAt(self.tokenizer, stops, ids)]} if stops else {}

    def _group(self, question: Question) -> InFlight:
        key = question.policy, tuple(sorted(question.settings.items()))
        if key in self._groups and not self._groups[key].going:
            self._groups[key].room.rows = self.rows  # fewer where memory had run out
        if key not in self._groups:
            for empty in [its for its, group in self._groups.items() if not group.going]:
                del self._groups[empty]  # clients name any temperature
            draft, drafter = apart(self.draft, None)
            settings = question.settings | {"assistant_model": draft, "drafter": drafter}
            guests = Guests(self.target, self.policies[question.policy], self.tokenizer, None, settings)
            self._groups[key] = InFlight(guests, Room(self.rows))
        return self._groups[key]

    def _step(self, key: Any) -> None:
        """One round of a group."""
        group = self._groups[key]
        numbers = group.numbers()
        try:
            results, written = group.step(rounds=1), list(group.written())
        except Exception as error:
            del self._groups[key]
            self._fail(numbers, error)
            _refuse_broken_device(error)
            return
        for result in results:
            job = self._pop(result.index)
            if job is not None:
                job.tell(result)
        for number, ids in written:
            job = self._jobs.get(number)
            if job is not None and job.question.stream:
                job.tell(Written(ids))

    def _fail(self, numbers: list[int], error: Exception) -> None:
        for number in numbers:
            job = self._pop(number)
            if job is not None:
                job.tell(Failed(error))

    def _pop(self, number: int) -> Job | None:
        with self._lock:
            return self._jobs.pop(number, None)


def _refuse_broken_device(error: Exception) -> None:
    """End the engine where its device is lost, on which nothing can be written any more."""
    if isinstance(error, getattr(torch, "AcceleratorError", ())):
        raise error
