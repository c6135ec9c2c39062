"""P̂(accept | S, A) from samples, and how much S and A tell about acceptance (Kim et al., §7.4 and Definition D.8,
huggingface.co/papers/2509.24328)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...artifacts.profile_tables import Bins


LEVELS = 10  # equal cells of X = min(1, p/q) for its entropy
PRIOR = 8.0  # samples' worth of the row's mean in each cell; of the neighbours' distribution in each entropy


@dataclass(frozen=True)
class Samples:
    """Drafted tokens of many rounds, one entry each, (N,)."""

    s: np.ndarray  # float32   Σ min(q, c)
    a: np.ndarray  # float32   min(1, c(x)/q(x))
    x: np.ndarray  # float64   min(1, p(x)/q(x)), the probability that the target accepts
    similarity: np.ndarray  # float32   Σ min(q, p)
    place: np.ndarray  # int64   in its draft, from 0
    gamma: np.ndarray  # int64   the longest draft allowed in its round
    text: np.ndarray  # int64   number of the prompt
    round: np.ndarray  # int64   number of the round; its tokens stand together, in their order
    reached: np.ndarray  # float64   the probability that all tokens before it in the draft were accepted

    def of(self, mask: np.ndarray) -> "Samples":
        """Some of them."""
        return Samples(**{name: values[mask] for name, values in vars(self).items()})


def quantiles(values: np.ndarray, weights: np.ndarray, cells: int) -> np.ndarray:
    """The inner edges of `cells` cells of equal weight, (cells − 1,) float32."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / max(weights.sum(), 1e-300)
    at = np.searchsorted(share, np.arange(1, cells) / cells).clip(max=len(values) - 1)
    return values[order][at].astype(np.float32)


def edges(samples: Samples, rows: int, columns: int, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
    """Edges of S (rows − 1,) and, for each cell of S, of A (rows, columns − 1): equal in size, or with equal shares of the samples."""
    if not adaptive:
        even = [np.linspace(0, 1, n + 1)[1:-1].astype(np.float32) for n in (rows, columns)]
        return even[0], np.tile(even[1], (rows, 1))
    s_edges = quantiles(samples.s, samples.reached, rows)
    cell = np.searchsorted(s_edges, samples.s, side="right")
    everywhere = quantiles(samples.a, samples.reached, columns)
    a_edges = [
        quantiles(samples.a[cell == k], samples.reached[cell == k], columns) if (cell == k).any() else everywhere
        for k in range(rows)
    ]
    return s_edges, np.stack(a_edges)


def cells(s_edges: np.ndarray, a_edges: np.ndarray, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """The cell of S and the cell of A of each sample, (N,) each."""
    s = np.searchsorted(s_edges, samples.s, side="right")
    return s, (samples.a[:, None] >= a_edges[s]).sum(axis=1)


def build(samples: Samples, rows: int, columns: int, adaptive: bool) -> Bins:
    """P̂ of each cell: the mean of X over the samples, each as heavy as it is likely to be reached.

    A cell is pulled towards its row's mean as by `PRIOR` samples, so an empty one has it, and along A P̂ never falls.
    """
    from sklearn.isotonic import isotonic_regression

    s_edges, a_edges = edges(samples, rows, columns, adaptive)
    s, a = cells(s_edges, a_edges, samples)
    weight, total = np.zeros((rows, columns)), np.zeros((rows, columns))
    np.add.at(weight, (s, a), samples.reached)
    np.add.at(total, (s, a), samples.reached * samples.x)
    mean = float(total.sum() / weight.sum())
    by_s = (total.sum(axis=1) + PRIOR * mean) / (weight.sum(axis=1) + PRIOR)
    accept = (total + PRIOR * by_s[:, None]) / (weight + PRIOR)
    accept = np.stack([isotonic_regression(y, sample_weight=w + PRIOR) for y, w in zip(accept, weight, strict=True)])
    counts = np.zeros((rows, columns), dtype=np.int64)
    np.add.at(counts, (s, a), 1)
    return Bins(s_edges, a_edges, accept.clip(0.0, 1.0), by_s, counts)


def entropies(fitted: Samples, held: Samples, shapes: Sequence[tuple[str, int, int, bool]]) -> list[dict[str, Any]]:
    """H(X) and H(X | S, A) in bits at each resolution, of `held` by distributions counted on `fitted`.

    Both are cross-entropies of samples that the cells have not seen, so cells that are too fine lose. X is min(1, p/q) in
    `LEVELS` equal cells. The gain of S alone and of A alone has the same number of cells.
    """
    out = []
    nowhere = np.zeros(len(fitted.x), dtype=np.int64), np.zeros(len(held.x), dtype=np.int64)
    for name, rows, columns, adaptive in shapes:
        by_a = (
            quantiles(fitted.a, fitted.reached, rows * columns)
            if adaptive
            else np.linspace(0, 1, rows * columns + 1)[1:-1]
        )
        by_s = (
            quantiles(fitted.s, fitted.reached, rows * columns)
            if adaptive
            else np.linspace(0, 1, rows * columns + 1)[1:-1]
        )
        s_edges, a_edges = edges(fitted, rows, columns, adaptive)
        in_cells = [np.ravel_multi_index(cells(s_edges, a_edges, part), (rows, columns)) for part in (fitted, held)]
        known = {
            "x": nowhere,
            "x_sa": (in_cells[0], in_cells[1]),
            "x_s": (np.searchsorted(by_s, fitted.s, side="right"), np.searchsorted(by_s, held.s, side="right")),
            "x_a": (np.searchsorted(by_a, fitted.a, side="right"), np.searchsorted(by_a, held.a, side="right")),
        }
        h = {key: cross_entropy(fitted, held, seen, new, rows * columns) for key, (seen, new) in known.items()}
        out.append({
            "resolution": name, "cells": rows * columns, "entropy": h["x"], "conditional": h["x_sa"],
            "gain": h["x"] - h["x_sa"], "gain_s": h["x"] - h["x_s"], "gain_a": h["x"] - h["x_a"],
        })  # fmt: skip
    return out


def cross_entropy(fitted: Samples, held: Samples, of_fitted: np.ndarray, of_held: np.ndarray, count: int) -> float:
    """−E[log₂ P̂(X | cell)] of `held`; a cell is pulled towards the distribution of all as by `PRIOR` samples."""
    level = [np.minimum((part.x * LEVELS).astype(np.int64), LEVELS - 1) for part in (fitted, held)]
    table = np.zeros((count, LEVELS))
    np.add.at(table, (of_fitted, level[0]), fitted.reached)
    everywhere = (table.sum(axis=0) + 1.0) / (table.sum() + LEVELS)
    table = (table + PRIOR * everywhere) / (table.sum(axis=1, keepdims=True) + PRIOR)
    return float(-(held.reached * np.log2(table[of_held, level[1]])).sum() / held.reached.sum())
