"""What a call would have taken without drafts: an estimate from the forwards that it made, and how good an estimate it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np


KINDS = ("measured", "fitted", "at most")  # from the best to the weakest
ENOUGH = 8  # forwards through which a line is laid
SPREAD = 1.5  # the most tokens that one of them read, over the fewest


@dataclass(frozen=True)
class Read:
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
        """Of several calls, as good as the weakest of them; None where one has no estimate."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        return cls(sum(part.seconds for part in known), max((part.kind for part in known), key=KINDS.index))


def target_alone(reads: Sequence[Read], new_tokens: Sequence[int], prefill: float = 0.0) -> TargetAlone | None:
    """The estimate for rows that wrote `new_tokens[b]` tokens each; None where there was one round, which reads the prompt.

    The prompt costs what it cost here: `prefill` and the first forward. A row that has ended costs nothing any more.
    """
    if len(reads) < 2:
        return None
    seconds, worst = prefill + reads[0].seconds, 0
    one: dict[int, tuple[float, int]] = {}
    for written in range(1, max(new_tokens)):
        rows = sum(length > written for length in new_tokens)
        if rows not in one:
            one[rows] = _of_one_token(reads[1:], rows)
        seconds, worst = seconds + one[rows][0], max(worst, one[rows][1])
    return TargetAlone(seconds, KINDS[worst])


def alone_in_flight(reads: Sequence[Read], tokens: int, prefill: float = 0.0) -> TargetAlone | None:
    """The estimate for texts of `tokens` new tokens in all, of which as many were written at a time as `reads` had rows on average."""
    if len(reads) < 2:
        return None
    rows = max(round(sum(read.rows for read in reads) / len(reads)), 1)
    seconds, kind = _of_one_token(reads, rows)
    return TargetAlone(prefill + seconds * tokens / rows, KINDS[kind])


def _of_one_token(reads: Sequence[Read], rows: int) -> tuple[float, int]:
    """Seconds of a forward over one token of each of `rows` rows, and the index of its kind."""
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
