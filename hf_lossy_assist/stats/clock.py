"""Count and time the forwards of a call, and estimate from them what the call would have taken without drafts."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch


KINDS = ("measured", "fitted", "at most")  # from the best to the weakest
ENOUGH = 8  # forwards through which a line is laid
SPREAD = 1.5  # the most tokens that one of them read, over the fewest


@dataclass(frozen=True)
class ForwardRecord:
    """One forward of the target over a round's tokens."""

    rows: int
    tokens: int  # that the rows fed it, all together
    seconds: float


@dataclass(frozen=True)
class TargetAlone:
    """Estimated seconds of the same texts, token by token by the target alone.

    `kind`: "measured", from rounds of this call without drafts, with at least half and at most twice as many rows; "fitted", from a line
    through the seconds of forwards that read more and fewer tokens; "at most", as if one token a row took as long as a whole block.
    """

    seconds: float
    kind: str

    @classmethod
    def sum(cls, parts: Sequence["TargetAlone | None"]) -> "TargetAlone | None":
        """Add the estimates of several calls; the sum's `kind` is the weakest, and None stands for a missing estimate."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return cls(sum(part.seconds for part in known), max((part.kind for part in known), key=KINDS.index))


def estimate_target_alone(
    reads: Sequence[ForwardRecord], new_tokens: Sequence[int], prefill: float = 0.0
) -> TargetAlone | None:
    """Return the estimate for rows that wrote `new_tokens[b]` tokens each; None where there was one round, which reads the prompt.

    The prompt costs what it cost here: `prefill` and the first forward. A row that has ended costs nothing any more.
    """
    if len(reads) < 2:
        return None
    seconds, worst = prefill + reads[0].seconds, 0
    one: dict[int, tuple[float, int]] = {}
    for written in range(1, max(new_tokens)):
        rows = sum(length > written for length in new_tokens)
        if rows not in one:
            one[rows] = _estimate_one_token(reads[1:], rows)
        seconds, worst = seconds + one[rows][0], max(worst, one[rows][1])
    return TargetAlone(seconds, KINDS[worst])


def estimate_in_flight(reads: Sequence[ForwardRecord], tokens: int, prefill: float = 0.0) -> TargetAlone | None:
    """Return the estimate for texts of `tokens` new tokens in all, of which as many were written at a time as `reads` had rows on average."""
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
    # A token costs no less than its share of a block, and not more than all of it.
    return float(np.clip(start + slope * rows, whole * min(rows / n, 1.0), whole)), 1


class Clock:
    """Counts the forwards of each part and the seconds they took.

    On a CUDA device the seconds are measured between events on the stream, and read only once, when the call ends.
    """

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.forwards: Counter[str] = Counter()
        # The target's forwards one by one; on a CUDA device when `seconds` has been asked.
        self.reads: list[ForwardRecord] = []
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event, tuple[int, int] | None]] = []

    @contextmanager
    def time(self, part: str, read: tuple[int, int] | None = None) -> Iterator[None]:
        """Count and time one forward of `part`; `read`: its rows and the tokens of all rows, where each forward is to be recorded."""
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
        """Count forwards of `part` that ran inside another part's time."""
        self.forwards[part] += forwards

    def add(self, other: "Clock") -> None:
        """Count what another clock has counted, which is not used any more."""
        self.forwards.update(other.forwards)
        for part, spent in other.seconds().items():
            self._seconds[part] += spent

    def _add(self, part: str, seconds: float, read: tuple[int, int] | None) -> None:
        self._seconds[part] += seconds
        if read is not None:
            self.reads.append(ForwardRecord(*read, seconds))

    def seconds(self) -> dict[str, float]:
        if self._events:
            torch.cuda.synchronize()
            for part, begin, end, read in self._events:
                self._add(part, begin.elapsed_time(end) / 1000, read)
            self._events.clear()
        return dict(self._seconds)


def wait_for(device: torch.device) -> None:
    """Wait until a CUDA device has finished its work; on others calls return no sooner."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
