"""Count and time the forwards of a call, and estimate the time of the target alone."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch


KINDS = ("measured", "fitted", "at most")  # from best to weakest
ENOUGH = 8  # forwards needed to fit a line
SPREAD = 1.5  # required ratio between the most and the fewest tokens of a forward


@dataclass(frozen=True)
class ForwardRecord:
    """One forward of the target over a round's tokens."""

    rows: int
    tokens: int  # of all rows together
    seconds: float


@dataclass(frozen=True)
class TargetAlone:
    """The estimated seconds of the target alone for the same texts, token by token.

    `kind`: "measured", from rounds of this call without drafts, with at least half and at most twice as many rows; "fitted", from a line
    through the seconds of forwards with different numbers of tokens; "at most", as if one token a row took as long as a whole block.
    """

    seconds: float
    kind: str

    @classmethod
    def sum(cls, calls: Sequence["TargetAlone | None"]) -> "TargetAlone | None":
        """Add the estimates of several calls; the sum has the weakest `kind`, and is None if an estimate is missing."""
        measured = [call for call in calls if call is not None]
        if not measured or len(measured) < len(calls):
            return None
        return cls(sum(call.seconds for call in measured), max((call.kind for call in measured), key=KINDS.index))


def estimate_target_alone(
    reads: Sequence[ForwardRecord], new_tokens: Sequence[int], prefill: float = 0.0
) -> TargetAlone | None:
    """Return the estimate for rows with `new_tokens[b]` new tokens; None after a single round, since that also reads the prompt.

    The prompt costs `prefill` and the first forward. Finished rows cost nothing.
    """
    if len(reads) < 2:
        return None
    forwards = Counter(sum(length > written for length in new_tokens) for written in range(1, max(new_tokens)))
    one = {rows: _estimate_one_token(reads[1:], rows) for rows in forwards}
    seconds = prefill + reads[0].seconds + sum(one[rows][0] * count for rows, count in forwards.items())
    return TargetAlone(seconds, KINDS[max((kind for _, kind in one.values()), default=0)])


def estimate_in_flight(reads: Sequence[ForwardRecord], tokens: int, prefill: float = 0.0) -> TargetAlone | None:
    """Return the estimate for `tokens` new tokens in total, at a constant number of rows, the mean of `reads`."""
    if len(reads) < 2:
        return None
    rows = max(round(sum(read.rows for read in reads) / len(reads)), 1)
    seconds, kind = _estimate_one_token(reads, rows)
    return TargetAlone(prefill + seconds * tokens / rows, KINDS[kind])


def _estimate_one_token(reads: Sequence[ForwardRecord], rows: int) -> tuple[float, int]:
    """Return the seconds of a forward over one token of each of `rows` rows, and the index of its kind."""
    plain = [r.seconds for r in reads if r.tokens == r.rows and r.rows <= 2 * rows and rows <= 2 * r.rows]
    if plain:
        return median(plain), 0
    tokens, seconds = np.array([r.tokens for r in reads], float), np.array([r.seconds for r in reads])
    n, whole = float(np.median(tokens)), float(np.median(seconds))
    if len(reads) < ENOUGH or tokens.max() < SPREAD * tokens.min():
        return whole, 2
    slope, start = np.polyfit(tokens, seconds, 1)
    # A token costs at least its share of a block, and at most the whole block.
    return float(np.clip(start + slope * rows, whole * min(rows / n, 1.0), whole)), 1


class Clock:
    """A counter and timer of forwards by part.

    On a CUDA device, seconds are measured between events on the stream and read once, at the end of the call.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.forwards: Counter[str] = Counter()
        # The target's forwards; on a CUDA device only after `seconds` was called.
        self.reads: list[ForwardRecord] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event, tuple[int, int] | None]] = []

    @contextmanager
    def time(self, stage: str, read: tuple[int, int] | None = None) -> Iterator[None]:
        """Count and time one forward of `stage`; `read`: its rows and total tokens, to record the forward."""
        self.forwards[stage] += 1
        if self.cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((stage, begin, end, read))
        else:
            began = time.perf_counter()
            yield
            self._add(stage, time.perf_counter() - began, read)

    def add(self, other: "Clock") -> None:
        """Add the counts and seconds of another clock, which must not be used any more."""
        self.forwards.update(other.forwards)
        for stage, spent in other.seconds().items():
            self._seconds[stage] += spent

    def _add(self, stage: str, seconds: float, read: tuple[int, int] | None) -> None:
        self._seconds[stage] += seconds
        if read is not None:
            self.reads.append(ForwardRecord(*read, seconds))

    def seconds(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
            for stage, begin, end, read in self._events:
                self._add(stage, begin.elapsed_time(end) / 1000, read)
            self._events.clear()
        return dict(self._seconds)


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
