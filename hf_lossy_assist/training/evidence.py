"""How much stands behind a head's figures: their intervals, and what is said where too few texts or tokens were held out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..stats.intervals import Estimate, wilson


FEWEST = 50  # held-out tokens of the rarer label; a share of 50 is known to ± 14 points at worst
CHANCE = 0.5  # AUROC of a coin


@dataclass(frozen=True)
class Evidence:
    """What a head was judged on.

    Args:
        auroc: with an interval over whole texts (`stats.separation.auroc`).
        texts: held-out problems or prompts, and `unit` what they are called.
        counts: held-out tokens by label; where labels are probabilities, how many are expected.
        missing: what gives more of them, by label.
    """

    auroc: Estimate
    texts: int
    unit: str
    counts: dict[str, int]
    missing: dict[str, str]

    @property
    def rarer(self) -> str:
        """The label that fewer tokens have."""
        return min(self.counts, key=lambda label: self.counts[label])

    @property
    def warning(self) -> str | None:
        """One line where the figures are of few tokens."""
        count = self.counts[self.rarer]
        if count >= FEWEST:
            return None
        return f"these figures are of {count} {self.rarer} tokens in {self._texts()}, fewer than {FEWEST}: {self.missing[self.rarer]}"

    @property
    def verdict(self) -> str | None:
        """One line where the held-out texts do not show that the head is better than a coin."""
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

    def metrics(self) -> dict[str, Any]:
        """What the head's config keeps."""
        found: dict[str, Any] = {"auroc": self.auroc.value, "auroc_low": self.auroc.low, "auroc_high": self.auroc.high}
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


def share(hits: int, count: int) -> str:
    """A share with its counts and Wilson's 95 % interval: "6 of 6 (100 %; 95 %: at least 61 %)"."""
    if not count:
        return "0 of 0"
    value, low, high = _wilson(hits, count)
    if hits == count:
        between = f"at least {_percent(low)}"
    elif hits == 0:
        between = f"at most {_percent(high)}"
    else:
        between = f"{_percent(low)} to {_percent(high)}"
    return f"{hits} of {count} ({_percent(value)}; 95 %: {between})"


def _wilson(hits: int, count: int) -> tuple[float, float, float]:
    value, low, high = wilson(hits, count)
    assert low is not None and high is not None, "Wilson's interval has both ends for any count"
    return value, low, high


def _percent(part: float) -> str:
    return f"{100 * part:.3g} %"


def with_intervals(rows: Sequence[dict[str, float]], counts: dict[str, int]) -> list[dict[str, float]]:
    """Rows of thresholds with `…_low` and `…_high`, Wilson's, of each share; `counts`: of how many tokens each one is."""
    found = []
    for row in rows:
        more: dict[str, float] = {}
        for name, count in counts.items():
            if count:
                _, low, high = _wilson(round(row[name] * count), count)
                more |= {f"{name}_low": low, f"{name}_high": high}
        found.append(row | more)
    return found
