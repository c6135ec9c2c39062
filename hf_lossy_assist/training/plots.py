"""Plots of fitted verifiers and judges, as PNG files."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".figure-") as folder:
        draft = Path(folder) / path.name
        figure.savefig(draft, format="png", dpi=150)
        draft.replace(path)


def roc_curve_of(said: Any, labels: Any, auroc: float) -> tuple[Any, Any, float]:
    """What `roc_figure` draws, of probabilities (N,) and labels (N,) bool; thinned, since a curve has few pixels."""
    from sklearn.metrics import roc_curve

    false_positive, true_positive, _ = roc_curve(labels, said)
    thin = np.unique(np.linspace(0, len(false_positive) - 1, 500).astype(int))
    return false_positive[thin], true_positive[thin], auroc


def roc_figure(
    curves: Mapping[str, tuple[Any, Any, float]],
    path: Path,
    title: str = "ROC of the verifier",
    xlabel: str = "false-positive rate $\\eta_{FP}$",
    ylabel: str = "true-positive rate $\\eta_{TP}$",
) -> None:
    """Of each classifier, by its name, false-positive and true-positive rates (arrays) and their AUROC.

    The defaults make the SPRINTER paper's Figure 3.
    """
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="chance (0.50)")
    for name, (false_positive, true_positive, auroc) in curves.items():
        axes.plot(false_positive, true_positive, label=f"{name} (AUROC {auroc:.2f})")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, path)


def reliability_figure(
    points: Sequence[tuple[float, float, int]],
    path: Path,
    ylabel: str = "share acceptable",
    title: str = "Reliability of the verifier",
) -> None:
    """Whether V means what it says: of each bin, the mean of V, the share that was acceptable, and how many records it has."""
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel="mean V of the bin", ylabel=ylabel, title=title)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
    axes.plot([v for v, _, _ in points], [share for _, share, _ in points], "o-", label="held-out prompts")
    for v, share, count in points:
        axes.annotate(str(count), (v, share), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    save(figure, path)
