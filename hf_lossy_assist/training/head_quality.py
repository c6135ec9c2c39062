"""Assess a head on held-out tokens: AUROC with intervals, and warnings about small samples."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..stats.intervals import Estimate, wilson


FEWEST = 50  # held-out tokens of the rarer label; a share of 50 is known to ± 14 points at worst
CHANCE = 0.5  # AUROC of a random guess


@dataclass(frozen=True)
class Evidence:
    """Held-out data behind a head's figures.

    Args:
        auroc: with an interval over whole texts (`stats.intervals.auroc`).
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
    def warning(self) -> str | None:
        """One line if the figures are based on few tokens, else None."""
        rarer = self._find_rarer()
        if self.counts[rarer] >= FEWEST:
            return None
        few = f"{self.counts[rarer]} {rarer} tokens in {self._texts()}, fewer than {FEWEST}"
        return f"these figures are of {few}: {self.missing[rarer]}"

    @property
    def verdict(self) -> str | None:
        """One line if the held-out texts do not show that the head is better than chance, else None."""
        if self.auroc.low is not None and self.auroc.low > CHANCE:
            return None
        return f"no better than chance as far as is known: {self}; {self.missing[self._find_rarer()]}"

    def metrics(self) -> dict[str, object]:
        """Return the entries for the head's config."""
        figures: dict[str, object] = dict(zip(("auroc", "auroc_low", "auroc_high"), self.auroc, strict=True))
        figures |= {f"held_out_{self.unit}s": self.texts}
        figures |= {f"held_out_{label}": count for label, count in self.counts.items()}
        figures |= {"verdict": self.verdict, "warning": self.warning}
        return {name: value for name, value in figures.items() if value is not None}

    def __str__(self) -> str:
        value, low, high = self.auroc
        between = "no interval" if low is None else f"95 %: {low:.3f} to {high:.3f}"
        return f"AUROC {value:.3f} ({between}, {self._texts()})"

    def _find_rarer(self) -> str:
        """Return the label with fewer tokens."""
        return min(self.counts, key=lambda label: self.counts[label])

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

    def metrics(self) -> dict[str, object]:
        """Return the entries for the head's config."""
        return {**self.evidence.metrics(), "brier": self.brier, "thresholds": self.thresholds}

    def row_at(self, threshold: float) -> dict[str, float]:
        """Return the row of the tabulated threshold nearest to `threshold`."""
        return min(self.thresholds, key=lambda row: abs(row["threshold"] - threshold))


def format_share(hits: int, count: int) -> str:
    """Return a share with its counts and Wilson's 95 % interval: "6 of 6 (100 %; 95 %: 61 % to 100 %)"."""
    if not count:
        return "0 of 0"
    share, low, high = (f"{100 * (value or 0):.3g} %" for value in wilson(hits, count))
    return f"{hits} of {count} ({share}; 95 %: {low} to {high})"


def add_intervals(rows: Sequence[dict[str, float]], counts: dict[str, int]) -> list[dict[str, float]]:
    """Return rows of thresholds with Wilson's `…_low` and `…_high` of each share; `counts`: number of tokens behind each."""
    out = [dict(row) for row in rows]
    for row in out:
        for name, count in counts.items():
            if count:
                _, low, high = wilson(round(row[name] * count), count)
                row |= {f"{name}_low": low or 0.0, f"{name}_high": high or 0.0}
    return out
