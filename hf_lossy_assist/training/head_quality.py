"""Assess a head on held-out tokens: AUROC with intervals, warnings about small samples, ROC and reliability curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..stats.intervals import Estimate, wilson
from ..validation import check_int, check_number, shown


FEWEST = 50  # held-out tokens of the rarer label; a share of 50 is known to ± 14 points at worst
CHANCE = 0.5  # AUROC of a random guess


@dataclass(frozen=True)
class Evidence:
    """Held-out data behind a head's figures.

    Args:
        auroc: with an interval over whole texts (`stats.auroc.auroc`).
        texts: number of held-out problems or prompts; unit: the name for them.
        counts: held-out tokens by label; expected numbers if labels are probabilities.
        missing: by label, how to get more of them.
    """

    auroc: Estimate
    texts: int
    unit: str
    counts: dict[str, int]
    missing: dict[str, str]

    @property
    def rarer(self) -> str:
        """The label with fewer tokens."""
        return min(self.counts, key=lambda label: self.counts[label])

    @property
    def warning(self) -> str | None:
        """One line if the figures are based on few tokens, else None."""
        count = self.counts[self.rarer]
        if count >= FEWEST:
            return None
        return f"these figures are of {count} {self.rarer} tokens in {self._texts()}, fewer than {FEWEST}: {self.missing[self.rarer]}"

    @property
    def verdict(self) -> str | None:
        """One line if the held-out texts do not show that the head is better than chance, else None."""
        value, low, high = self.auroc
        if low is None or high is None:
            return (
                f"no better than chance as far as {self._texts()} tells: an AUROC of {value:.3f} has no interval; "
                f"{self.missing[self.rarer]}"
            )
        if low > CHANCE:
            return None
        return (
            f"no better than chance as far as {self._texts()} tell: AUROC {value:.3f}, 95 %: {low:.3f} to {high:.3f}; "
            f"{self.missing[self.rarer]}"
        )

    def metrics(self) -> dict[str, object]:
        """Return the entries for the head's config."""
        found: dict[str, object] = {
            "auroc": self.auroc.value,
            "auroc_low": self.auroc.low,
            "auroc_high": self.auroc.high,
        }
        found |= {f"held_out_{self.unit}s": self.texts}
        found |= {f"held_out_{label}": count for label, count in self.counts.items()}
        found |= {"verdict": self.verdict, "warning": self.warning}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        value, low, high = self.auroc
        between = "no interval" if low is None else f"95 %: {low:.3f} to {high:.3f}"
        return f"AUROC {value:.3f} ({between}, {self._texts()})"

    def _texts(self) -> str:
        return f"{self.texts} held-out {self.unit}" + ("s" if self.texts != 1 else "")


@dataclass
class HeadReport:
    """The figures of a fitted head on held-out texts that all methods have."""

    evidence: Evidence  # with the AUROC and its interval
    brier: float
    thresholds: list[dict[str, float]]  # a threshold and the method's figures there, with intervals

    @property
    def auroc(self) -> float:
        """The AUROC; with folds their mean, with soft labels that of outcomes drawn from them."""
        return self.evidence.auroc.value

    def row_at(self, threshold: float) -> dict[str, float]:
        """Return the row of the tabulated threshold nearest to `threshold`."""
        return min(self.thresholds, key=lambda row: abs(row["threshold"] - threshold))


def format_share(hits: int, count: int) -> str:
    """Return a share with its counts and Wilson's 95 % interval: "6 of 6 (100 %; 95 %: at least 61 %)"."""
    if not count:
        return "0 of 0"
    value, low, high = _wilson(hits, count)
    if hits == count:
        between = f"at least {_format_percent(low)}"
    elif hits == 0:
        between = f"at most {_format_percent(high)}"
    else:
        between = f"{_format_percent(low)} to {_format_percent(high)}"
    return f"{hits} of {count} ({_format_percent(value)}; 95 %: {between})"


def _wilson(hits: int, count: int) -> tuple[float, float, float]:
    value, low, high = wilson(hits, count)
    assert low is not None and high is not None, "Wilson's interval has both ends for any count"
    return value, low, high


def _format_percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def add_intervals(rows: Sequence[dict[str, float]], counts: dict[str, int]) -> list[dict[str, float]]:
    """Return rows of thresholds with Wilson's `…_low` and `…_high` of each share; `counts`: number of tokens behind each."""
    found = []
    for row in rows:
        more: dict[str, float] = {}
        for name, count in counts.items():
            if count:
                _, low, high = _wilson(round(row[name] * count), count)
                more |= {f"{name}_low": low, f"{name}_high": high}
        found.append(row | more)
    return found


CURVES = "curves"  # the entry in a head's metrics
POINTS, BINS = 50, 10  # at most
DIGITS = 6


class Bin(NamedTuple):
    """Held-out tokens of similar probability: its mean, how many of them have the label, how many there are."""

    mean: float
    hits: int
    tokens: int

    @property
    def share(self) -> Estimate:
        """Share of tokens with the label, with Wilson's 95 % interval, as if the tokens of one text were independent."""
        return wilson(self.hits, self.tokens)


@dataclass(frozen=True)
class Curves:
    """ROC and reliability of a head on held-out tokens.

    Args:
        roc: (false-positive rate, true-positive rate) for thresholds from high to low, from (0, 0) to (1, 1); at most `POINTS`.
        reliability: at most `BINS` bins of equal width, from low to high, without empty ones.
    """

    roc: list[tuple[float, float]]
    reliability: list[Bin]

    @property
    def positives(self) -> int:
        """Number of held-out tokens with the label."""
        return sum(bin.hits for bin in self.reliability)

    @property
    def negatives(self) -> int:
        """Number of held-out tokens without the label."""
        return sum(bin.tokens - bin.hits for bin in self.reliability)

    def rates(self) -> tuple[list[float], list[float]]:
        """Return the false-positive and the true-positive rates of `roc`."""
        return [a for a, _ in self.roc], [b for _, b in self.roc]

    def to_dict(self) -> dict[str, list[list[float]]]:
        """Return the JSON form."""
        return {"roc": [list(point) for point in self.roc], "reliability": [list(bin) for bin in self.reliability]}

    @classmethod
    def from_dict(cls, given: object) -> "Curves":
        """Read the JSON form, which may be from an untrusted source. Raises: `ValueError`, one line."""
        if not isinstance(given, Mapping):
            raise ValueError(f"{CURVES}: expected an object, got {shown(given)}")
        try:
            roc = [(a, b) for a, b in _check_rows("roc", given.get("roc"), 2, POINTS)]
            bins = [Bin(*row) for row in _check_rows("reliability", given.get("reliability"), 3, BINS)]
            for name, value in [("roc", share) for point in roc for share in point]:
                check_number(name, value, 0.0, 1.0)
            for bin in bins:
                check_number("reliability: mean", bin.mean, 0.0, 1.0)
                check_int("reliability: tokens", bin.tokens, 1)
                check_int("reliability: hits", bin.hits, 0, bin.tokens)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{CURVES}: {error}") from None
        found = cls(roc, bins)
        if roc[0] != (0, 0) or roc[-1] != (1, 1) or not all(_is_rising(line) for line in zip(*roc, strict=True)):
            raise ValueError(f"{CURVES}: roc: expected rising rates from (0, 0) to (1, 1), got {shown(given['roc'])}")
        if not _is_rising([bin.mean for bin in bins]) or not found.positives or not found.negatives:
            raise ValueError(
                f"{CURVES}: reliability: expected rising bins with tokens of both labels, got {shown(given['reliability'])}"
            )
        return found


def compute_curves(scores: np.ndarray, probabilities: np.ndarray, positive: np.ndarray) -> Curves:
    """Return the curves of held-out tokens.

    Args:
        scores: (N,), compared with thresholds. probabilities: (N,) from the head; with several heads, `scores` may be on another scale.
        positive: (N,) bool, with both labels present.
    """
    order = np.argsort(-scores, kind="stable")
    ranked, labels = scores[order], positive[order]
    ends = np.append(ranked[1:] != ranked[:-1], True)  # no threshold separates equal scores
    rates = [np.append(0.0, side.cumsum()[ends] / side.sum()) for side in (~labels, labels)]
    # Evenly spaced along the curve, since a curve of many tokens bends within few thresholds.
    along = rates[0] + rates[1]
    shown = np.unique([np.abs(along - place).argmin() for place in np.linspace(0, 2, POINTS)])
    # A probability on an edge belongs to the bin below.
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probabilities)
    return Curves(
        [
            (round(float(a), DIGITS), round(float(b), DIGITS))
            for a, b in zip(*(rate[shown] for rate in rates), strict=True)
        ],
        [
            Bin(round(float(probabilities[inside].mean()), DIGITS), int(positive[inside].sum()), int(inside.sum()))
            for inside in (bins == b for b in np.unique(bins))
        ],
    )


def _check_rows(name: str, rows: Any, width: int, most: int) -> list[list[Any]]:
    """Refuse anything but a list of 1 to `most` lists of `width` entries."""
    fit = isinstance(rows, list) and 1 <= len(rows) <= most
    if not fit or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ValueError(f"{name}: expected 1 to {most} lists of {width} numbers, got {shown(rows)}")
    return rows


def _is_rising(line: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(line, line[1:], strict=False))
