"""Plots of a fitted verifier, as PNG files."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".figure-") as folder:
        draft = Path(folder) / path.name
        figure.savefig(draft, format="png", dpi=150)
        draft.replace(path)


def roc_figure(curves: Mapping[str, tuple[Any, Any, float]], path: Path) -> None:
    """The paper's Figure 3: of each verifier, by its name, false-positive and true-positive rates (arrays) and their AUROC."""
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(
        xlabel="false-positive rate $\\eta_{FP}$",
        ylabel="true-positive rate $\\eta_{TP}$",
        title="ROC of the verifier",
    )
    axes.plot([0, 1], [0, 1], "--", color="gray", label="chance (0.50)")
    for name, (false_positive, true_positive, auroc) in curves.items():
        axes.plot(false_positive, true_positive, label=f"{name} (AUROC {auroc:.2f})")
    axes.set(xlim=(0, 1), ylim=(0, 1.01), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    save(figure, path)


def reliability_figure(points: Sequence[tuple[float, float, int]], path: Path) -> None:
    """Whether V means what it says: of each bin, the mean of V, the share that was acceptable, and how many records it has."""
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(
        xlabel="mean V of the bin", ylabel="share acceptable", title="Reliability of the verifier"
    )
    axes.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
    axes.plot([v for v, _, _ in points], [share for _, share, _ in points], "o-", label="held-out prompts")
    for v, share, count in points:
        axes.annotate(str(count), (v, share), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    save(figure, path)
