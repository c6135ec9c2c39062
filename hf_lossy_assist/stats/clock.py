"""Counts the forwards of a call by part, and their seconds."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .estimate import Read


class Clock:
    """Counts the forwards of each part and the seconds they took.

    On a CUDA device the seconds are measured between events on the stream, and read only once, when the call ends.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.forwards: Counter[str] = Counter()
        self.reads: list[Read] = []  # the target's forwards one by one; on a CUDA device when `seconds` has been asked
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, Any, Any, tuple[int, int] | None]] = []

    @contextmanager
    def time(self, part: str, read: tuple[int, int] | None = None) -> Iterator[None]:
        """One forward of `part`; `read`: rows, and tokens of all of them, where each forward is to be remembered."""
        self.forwards[part] += 1
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((part, begin, end, read))
        else:
            began = time.perf_counter()
            yield
            self._add(part, time.perf_counter() - began, read)

    def count(self, part: str, forwards: int) -> None:
        """Forwards of `part` that ran inside another part's time."""
        self.forwards[part] += forwards

    def add(self, other: "Clock") -> None:
        """Count what another clock has counted, which is not used any more."""
        self.forwards.update(other.forwards)
        for part, spent in other.seconds().items():
            self._seconds[part] += spent

    def _add(self, part: str, seconds: float, read: tuple[int, int] | None) -> None:
        self._seconds[part] += seconds
        if read is not None:
            self.reads.append(Read(*read, seconds))

    def seconds(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
            for part, begin, end, read in self._events:
                self._add(part, begin.elapsed_time(end) / 1000, read)
            self._events.clear()
        return dict(self._seconds)


def wait_for(device: torch.device) -> None:
    """Until a CUDA device has done all that it was given; on others a call returns no sooner."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
