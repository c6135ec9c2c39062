"""Measure how much S and A tell of a drafted token's acceptance, in bits, on prompts that were held out.

Kim et al., Tables 1 and 2, huggingface.co/papers/2509.24328.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hf_lossy_assist.demo import Demo
from hf_lossy_assist.methods.sv.acceptance_table import (
    CELLS,
    PRIOR,
    Samples,
    compute_edges,
    compute_quantiles,
    find_cells,
    split_samples,
)
from hf_lossy_assist.methods.sv.collect_samples import STARTED, Profiled, ProfileSettings, collect
from hf_lossy_assist.training.run_folder import RunFolder


LEVELS = 10  # equal cells of X = min(1, p/q) for its entropy
SHAPES = (
    ("5 × 5", 5, 5, False),
    ("10 × 10", 10, 10, False),
    ("20 × 20", 20, 20, False),
    ("adaptive", *CELLS, True),
)
RESULT = "information.json"


def measure_information(
    models: Demo, texts: Sequence[str], settings: ProfileSettings, out: Path
) -> list[dict[str, Any]]:
    """Return the entropies at each resolution, from samples as `hf-lossy profile` collects them; they are stored in `out`."""
    if not out.exists():
        resume = out.with_name(out.name + ".partial").exists()
        with RunFolder.opened(out, STARTED, {"settings": asdict(settings)}, resume=resume) as run:
            profiled = Profiled(models.target, models.draft, models.companion, models.tokenizer, texts, settings)
            samples = collect(profiled, run)
            fitted, held, _ = split_samples(samples, settings.seed)
            with run.result() as folder:
                (folder / RESULT).write_text(json.dumps(measure_entropies(fitted, held, SHAPES)))
    found: list[dict[str, Any]] = json.loads((out / RESULT).read_text())
    return found


def measure_entropies(
    fitted: Samples, held: Samples, shapes: Sequence[tuple[str, int, int, bool]]
) -> list[dict[str, object]]:
    """Measure H(X) and H(X | S, A) in bits at each resolution, on `held` with distributions estimated from `fitted`.

    Both are cross-entropies on samples not used for the cells, so too fine cells lose. X is min(1, p/q) in
    `LEVELS` equal cells. The gains of S alone and of A alone use the same number of cells.
    """
    out = []
    nowhere = [np.zeros(len(part.x), dtype=np.int64) for part in (fitted, held)]
    for name, rows, columns, adaptive in shapes:
        even = np.linspace(0, 1, rows * columns + 1)[1:-1]
        by_s, by_a = (
            compute_quantiles(values, fitted.reached, rows * columns) if adaptive else even
            for values in (fitted.s, fitted.a)
        )
        s_edges, a_edges = compute_edges(fitted, rows, columns, adaptive)
        in_cells = [
            np.ravel_multi_index(find_cells(s_edges, a_edges, part), (rows, columns)) for part in (fitted, held)
        ]
        known = {
            "x": nowhere,
            "x_sa": in_cells,
            "x_s": [np.searchsorted(by_s, part.s, side="right") for part in (fitted, held)],
            "x_a": [np.searchsorted(by_a, part.a, side="right") for part in (fitted, held)],
        }
        h = {key: compute_cross_entropy(fitted, held, seen, new, rows * columns) for key, (seen, new) in known.items()}
        out.append(
            {
                "resolution": name,
                "cells": rows * columns,
                "entropy": h["x"],
                "conditional": h["x_sa"],
                "gain": h["x"] - h["x_sa"],
                "gain_s": h["x"] - h["x_s"],
                "gain_a": h["x"] - h["x_a"],
            }
        )
    return out


def compute_cross_entropy(
    fitted: Samples, held: Samples, fitted_cells: np.ndarray, held_cells: np.ndarray, count: int
) -> float:
    """Return −E[log₂ P̂(X | cell)] of `held`; `PRIOR` pseudo-samples pull a cell towards the overall distribution."""
    level = [np.minimum((part.x * LEVELS).astype(np.int64), LEVELS - 1) for part in (fitted, held)]
    table = np.zeros((count, LEVELS))
    np.add.at(table, (fitted_cells, level[0]), fitted.reached)
    everywhere = (table.sum(axis=0) + 1.0) / (table.sum() + LEVELS)
    table = (table + PRIOR * everywhere) / (table.sum(axis=1, keepdims=True) + PRIOR)
    return float(-(held.reached * np.log2(table[held_cells, level[1]])).sum() / held.reached.sum())
