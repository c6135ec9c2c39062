"""Plots of fitted verifiers and judges, as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure


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
