"""A head's ROC and reliability on held-out tokens, short enough for its config: what `hf-lossy report` draws."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..stats.intervals import Estimate, wilson
from ..validation import check_int, check_number, shown


CURVES = "curves"  # the entry of a head's metrics
POINTS, BINS = 50, 10  # at most
DIGITS = 6


class Bin(NamedTuple):
    """Held-out tokens of about one probability: its mean, how many of them have the label, how many there are."""

    mean: float
    hits: int
    tokens: int

    @property
    def share(self) -> Estimate:
        """Of tokens that have the label, with Wilson's 95 % interval, as if the tokens of one text were independent."""
        return wilson(self.hits, self.tokens)


@dataclass(frozen=True)
class Curves:
    """What a head says of held-out tokens, beside what they are.

    Args:
        roc: (false-positive rate, true-positive rate) of thresholds from high to low, from (0, 0) to (1, 1); at most `POINTS`.
        reliability: `BINS` bins of equal width at most, from low to high, without empty ones.
    """

    roc: list[tuple[float, float]]
    reliability: list[Bin]

    @property
    def positives(self) -> int:
        """Held-out tokens that have the label."""
        return sum(its.hits for its in self.reliability)

    @property
    def negatives(self) -> int:
        """Held-out tokens that do not have it."""
        return sum(its.tokens - its.hits for its in self.reliability)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"roc": [list(point) for point in self.roc], "reliability": [list(its) for its in self.reliability]}

    @classmethod
    def from_dict(cls, given: Any) -> "Curves":
        """Read the JSON form, anybody's. Raises: `ValueError`, one line."""
        if not isinstance(given, Mapping):
            raise ValueError(f"{CURVES}: expected an object, got {shown(given)}")
        try:
            roc = [(a, b) for a, b in _rows("roc", given.get("roc"), 2, POINTS)]
            bins = [Bin(*row) for row in _rows("reliability", given.get("reliability"), 3, BINS)]
            for name, value in [("roc", share) for point in roc for share in point]:
                check_number(name, value, 0.0, 1.0)
            for its in bins:
                check_number("reliability: mean", its.mean, 0.0, 1.0)
                check_int("reliability: tokens", its.tokens, 1)
                check_int("reliability: hits", its.hits, 0, its.tokens)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{CURVES}: {error}") from None
        found = cls(roc, bins)
        if roc[0] != (0, 0) or roc[-1] != (1, 1) or not all(_rises(line) for line in zip(*roc, strict=True)):
            raise ValueError(f"{CURVES}: roc: expected rising rates from (0, 0) to (1, 1), got {shown(given['roc'])}")
        if not _rises([its.mean for its in bins]) or not found.positives or not found.negatives:
            raise ValueError(
                f"{CURVES}: reliability: expected rising bins with tokens of both labels, got {shown(given['reliability'])}"
            )
        return found


def curves_of(scores: np.ndarray, said: np.ndarray, positive: np.ndarray) -> Curves:
    """The curves of held-out tokens.

    Args:
        scores: (N,), what thresholds are compared with. said: (N,) the head's probabilities; those of several heads may be on
            another scale than `scores`.
        positive: (N,) bool, both labels among them.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, labels = scores[order], positive[order]
    ends = np.append(ranked[1:] != ranked[:-1], True)  # no threshold parts equal scores
    rates = [np.append(0.0, side.cumsum()[ends] / side.sum()) for side in (~labels, labels)]
    # As far apart along the curve as they can be: a curve of many tokens bends within few thresholds.
    along = rates[0] + rates[1]
    kept = np.unique([np.abs(along - place).argmin() for place in np.linspace(0, 2, POINTS)])
    # A probability on an edge belongs to the bin below.
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], said)
    return Curves(
        [(round(float(a), DIGITS), round(float(b), DIGITS)) for a, b in zip(*(rate[kept] for rate in rates), strict=True)],
        [
            Bin(round(float(said[mine].mean()), DIGITS), int(positive[mine].sum()), int(mine.sum()))
            for mine in (bins == b for b in np.unique(bins))
        ],
    )  # fmt: skip


def _rows(name: str, rows: Any, width: int, most: int) -> list[list[Any]]:
    """Refuse what is no list of 1 to `most` lists of `width` entries."""
    fit = isinstance(rows, list) and 1 <= len(rows) <= most
    if not fit or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"{name}: expected 1 to {most} lists of {width} numbers, got {shown(rows)}")
    return rows


def _rises(line: Any) -> bool:
    return all(a <= b for a, b in zip(line, line[1:], strict=False))
