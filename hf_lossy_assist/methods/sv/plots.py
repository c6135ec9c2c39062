"""Plots of a profile, as PNG files."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from ...artifacts.profile_tables import Bins, Latency
from ...filters.goodput import choose
from ...training.charts import save_figure


def cells_figure(bins: Bins, path: Path) -> None:
    """P̂(accept | S, A) as a heat map; every cell as wide and as high as its share of S and A."""
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.add_subplot(xlabel="S, agreement of draft and companion", ylabel="A, of the drafted token")
    s = np.concatenate([[0.0], bins.s_edges, [1.0]])
    mesh = None
    for k, row in enumerate(bins.accept):
        a = np.concatenate([[0.0], bins.a_edges[k], [1.0]])
        mesh = axes.pcolormesh(s[k : k + 2], a, row[:, None], vmin=0, vmax=1, cmap="viridis")
    assert mesh is not None, "a profile has at least one cell"
    figure.colorbar(mesh, label="$\\hat{P}$(accepted by the target)")
    save_figure(figure, path)


def goodput_figure(accept: np.ndarray, latency: Latency, path: Path) -> None:
    """One round of `accept` (B, γ): expected tokens, seconds, and their ratio over the tokens verified; and the choice (Figure 2)."""
    batch, gamma = accept.shape
    seconds = latency.of(batch, gamma)
    choice = choose(accept, seconds, float(batch))
    tokens = batch + np.concatenate([[0.0], choice.gains.reshape(-1)[choice.order].cumsum()])
    chosen = int(choice.kept.sum())
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    panels = (
        ("expected tokens", tokens),
        ("ms of the round", seconds * 1e3),
        ("expected tokens per second", tokens / seconds),
    )
    for axes, (label, values) in zip(figure.subplots(1, 3), panels, strict=True):
        axes.plot(range(len(values)), values)
        axes.axvline(chosen, color="gray", linestyle=":", label=f"chosen: {chosen} of {batch * gamma}")
        axes.set(xlabel="drafted tokens verified", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"one round of {batch} rows, γ = {gamma}")
    save_figure(figure, path)
