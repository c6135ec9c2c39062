"""Plots of fitted verifiers and judges and of comparisons, as PNG files or for a page."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG."""
    figure.savefig(path, format="png", dpi=150)


def encode_as_uri(figure: Figure) -> str:
    """Return the figure as an SVG data URI, for a self-contained page."""
    text = io.BytesIO()
    with rc_context({"svg.hashsalt": "hf-lossy"}):  # equal figures give equal text
        figure.savefig(text, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(text.getvalue()).decode()


def draw_roc(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float], float]],
    title: str = "ROC of the verifier",
    xlabel: str = "false-positive rate $\\eta_{FP}$",
    ylabel: str = "true-positive rate $\\eta_{TP}$",
) -> Figure:
    """Plot the rates (two arrays) of classifiers by name, with their AUROC. The defaults match the SPRINTER paper's Figure 3."""
    figure, axes = _make_square(title, xlabel, ylabel)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="chance (0.50)")
    for name, (false_positive, true_positive, auroc) in curves.items():
        area = "" if np.isnan(auroc) else f" (AUROC {auroc:.2f})"
        axes.plot(false_positive, true_positive, label=name + area)
    axes.legend(loc="lower right")
    return figure


def draw_reliability(
    points: Sequence[tuple[float, float, int]],
    ylabel: str = "share acceptable",
    title: str = "Reliability of the verifier",
    intervals: Sequence[tuple[float, float]] = (),
) -> Figure:
    """Plot the calibration of probabilities: each bin's mean, share with the label, and number of records.

    `intervals`: (low, high) of the shares.
    """
    figure, axes = _make_square(title, "mean V of the bin", ylabel)
    axes.plot([0, 1], [0, 1], "--", color="gray", label="calibrated")
    axes.plot([v for v, _, _ in points], [share for _, share, _ in points], "o-", label="held-out prompts")
    for (v, _, _), (low, high) in zip(points, intervals, strict=False):
        axes.vlines(v, low, high, color="C0", alpha=0.6)
    for v, share, count in points:
        axes.annotate(str(count), (v, share), textcoords="offset points", xytext=(4, -10), fontsize=7)
    axes.legend(loc="upper left")
    return figure


def draw_speed_and_quality(
    points: Sequence[tuple[str, float, float, tuple[float, float] | None]], ylabel: str
) -> Figure:
    """Plot each policy's tokens per second against a share with its interval, with a legend below."""
    figure = Figure(figsize=(5, 3.4 + 0.22 * len(points)), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens per second", ylabel=ylabel)
    for number, (name, speed, share, interval) in enumerate(points):
        marker, colour = "osD^vP*X"[number % 8], f"C{number % 10}"
        if interval is not None:
            axes.vlines(speed, *interval, color=colour, alpha=0.6)
        axes.plot(speed, share, marker, color=colour, label=name.replace("$", "\\$"))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower left", frameon=False)
    return figure


def _make_square(title: str, xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), aspect="equal")
    axes.grid(alpha=0.3)
    return figure, axes
