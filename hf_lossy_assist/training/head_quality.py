"""Assess a head on held-out tokens: AUROC with intervals, warnings about small samples, and plots."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..stats.intervals import Estimate, wilson


FEWEST = 50  # held-out tokens of the rarer label; a share of 50 is known to ± 14 points at worst
CHANCE = 0.5  # AUROC of a random guess
BINS = 10  # of probabilities, at most


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
    share, low, high = (f"{100 * value:.3g} %" for value in _wilson(hits, count))
    return f"{hits} of {count} ({share}; 95 %: {low} to {high})"


def _wilson(hits: int, count: int) -> tuple[float, float, float]:
    value, low, high = wilson(hits, count)
    assert low is not None and high is not None, "Wilson's interval has both ends for any count"
    return value, low, high


def add_intervals(rows: Sequence[dict[str, float]], counts: dict[str, int]) -> list[dict[str, float]]:
    """Return rows of thresholds with Wilson's `…_low` and `…_high` of each share; `counts`: number of tokens behind each."""
    intervals = []
    for row in rows:
        more: dict[str, float] = {}
        for name, count in counts.items():
            if count:
                _, low, high = _wilson(round(row[name] * count), count)
                more |= {f"{name}_low": low, f"{name}_high": high}
        intervals.append(row | more)
    return intervals


def bin_probabilities(probabilities: np.ndarray, labels: np.ndarray) -> list[tuple[float, float, int]]:
    """Return each tenth of [0, 1] that has tokens: their mean probability, their mean label, and how many there are.

    A probability on an edge belongs to the bin below.
    """
    bins = np.searchsorted(np.linspace(0, 1, BINS + 1)[1:-1], probabilities)
    inside = [bins == index for index in np.unique(bins)]
    return [(float(probabilities[some].mean()), float(labels[some].mean()), int(some.sum())) for some in inside]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png", dpi=150)


def draw_roc(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray, float]],
    title: str = "ROC of the verifier",
    xlabel: str = "false-positive rate $\\eta_{FP}$",
    ylabel: str = "true-positive rate $\\eta_{TP}$",
) -> Figure:
    """Plot classifiers by name: their scores and labels, and their AUROC. The defaults match the SPRINTER paper's Figure 3."""
    from sklearn.metrics import roc_curve

    figure, axes = _make_square(title, xlabel, ylabel)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="chance (0.50)")
    for name, (scores, labels, auroc) in curves.items():
        area = "" if np.isnan(auroc) else f" (AUROC {auroc:.2f})"
        axes.plot(*roc_curve(labels, scores)[:2], label=name + area)
    axes.legend(loc="lower right")
    return figure


def draw_reliability(
    points: Sequence[tuple[float, float, int]],
    ylabel: str = "share acceptable",
    title: str = "Reliability of the verifier",
) -> Figure:
    """Plot the calibration of probabilities: each bin's mean, share with the label, and number of records."""
    figure, axes = _make_square(title, "mean V of the bin", ylabel)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
    axes.plot([v for v, _, _ in points], [share for _, share, _ in points], "o-", label="held-out prompts")
    for v, share, count in points:
        axes.annotate(str(count), (v, share), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.legend(loc="upper left")
    return figure


def _make_square(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    axes.grid(alpha=0.3)
    return figure, axes
