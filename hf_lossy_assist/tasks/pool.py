"""Several servers of one model, asked as if they were one: those that fail rest for a while, and are tried again."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .endpoint import Completion, Endpoint


T = TypeVar("T")
FAILURES = 3  # of each server, before a request is given up
LONGEST_REST = 60.0  # seconds; each failure behind another doubles a server's rest


@dataclass
class Seat:
    """One server. busy: its requests under way; failed: how often in a row; back: when it is asked again, as `time.monotonic` counts."""

    endpoint: Endpoint
    busy: int = 0
    failed: int = 0
    back: float = 0.0
    slept: float = 0.0  # when its last rest began


class Pool:
    """What an `Endpoint` is, over several: each request goes to the one with the fewest under way that does not rest.

    A server that cannot be reached, does not answer or fails rests for `rest` seconds, twice as long each time, at most a minute; the request
    goes to another. What is wrong with the request itself, or with the key, is raised at once, as by an `Endpoint`.

    Raises: `ValueError` for servers of different models. Of a request, what the last server raised, once each has failed three times.
    """

    def __init__(self, endpoints: Sequence[Endpoint], rest: float = 1.0):
        models = {endpoint.model for endpoint in endpoints}
        if len(models) != 1:
            raise ValueError(
                f"a pool needs servers of one model, got {len(models)}: {', '.join(sorted(models)) or 'none'}"
            )
        self.model, self.rest = models.pop(), rest
        self._seats = [Seat(endpoint) for endpoint in endpoints]
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are kept open; requests that wait for a server are given up."""
        self._closed.set()
        for seat in self._seats:
            seat.endpoint.close()

    @property
    def url(self) -> str:
        """The addresses, in alphabetical order, with commas between them."""
        return ",".join(sorted(seat.endpoint.url for seat in self._seats))

    @property
    def requests(self) -> int:
        """How many were sent to all of them, repeated ones included."""
        return sum(seat.endpoint.requests for seat in self._seats)

    @property
    def tokens(self) -> int:
        """Completion tokens that all of them reported."""
        return sum(seat.endpoint.tokens for seat in self._seats)

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        temperature: float = 0.0,
        stop: Sequence[str] | None = None,
        seed: int | None = None,
    ) -> Completion:
        """As `Endpoint.complete`."""
        return self._ask(lambda its: its.complete(prompt, max_tokens, temperature, stop, seed))

    def chat(self, messages: Iterable[dict[str, str]], max_tokens: int, temperature: float = 0.0) -> str:
        """As `Endpoint.chat`."""
        messages = list(messages)
        return self._ask(lambda its: its.chat(messages, max_tokens, temperature))

    def check(self) -> None:
        """Raise where one of them does not list the model, or none can be reached; those that cannot rest for now."""
        errors = []
        for seat in self._seats:
            try:
                seat.endpoint.check()
            except PermissionError:
                raise
            except OSError as error:
                self._failed(seat, time.monotonic())
                errors.append(error)
        if len(errors) == len(self._seats):
            raise errors[0]

    def _ask(self, send: Callable[[Endpoint], T]) -> T:
        failures: Counter[str] = Counter()
        while True:
            seat, asked = self._take(), time.monotonic()
            try:
                out = send(seat.endpoint)
            except PermissionError:
                raise
            except OSError:
                self._failed(seat, asked)
                failures[seat.endpoint.url] += 1
                if all(failures[its.endpoint.url] >= FAILURES for its in self._seats):
                    raise
            else:
                seat.failed = 0
                return out
            finally:
                with self._lock:
                    seat.busy -= 1

    def _take(self) -> Seat:
        """The server that is asked next; waits where all rest. Raises: `ConnectionError` where the pool is closed meanwhile."""
        while True:
            with self._lock:
                now = time.monotonic()
                awake = [seat for seat in self._seats if seat.back <= now]
                if awake:
                    seat = min(awake, key=lambda its: its.busy)
                    seat.busy += 1
                    return seat
                wait = min(seat.back for seat in self._seats) - now
            if self._closed.wait(wait):
                raise ConnectionError(f"{self.url}: closed before a server could be asked again")

    def _failed(self, seat: Seat, asked: float) -> None:
        with self._lock:
            if seat.slept > asked:  # with others that were under way: one failure
                return
            seat.slept = time.monotonic()
            seat.back = time.monotonic() + min(self.rest * 2**seat.failed, LONGEST_REST)
            seat.failed = min(seat.failed + 1, 16)


def served(target: Any) -> bool:
    """Whether a target stands behind an API."""
    return isinstance(target, Endpoint | Pool)
