"""What a fitted judge does on the problems it has not seen, as figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .classifiers import JudgeSettings, Parts, Trained, threshold_table
from .hidden_states import MinedTable


@dataclass
class JudgeReport:
    """What a fitted judge does on the problems it has not seen."""

    auroc: float  # mean of the folds, if there are any
    brier: float
    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    held_out: int  # mismatches that the figures are of
    held_out_important: int
    threshold: float  # the head's own
    thresholds: list[dict[str, float]]  # threshold, recall, accepted
    c: float | None  # None for an MLP
    curve: list[dict[str, float]]  # C, auroc, auroc_train, of the grid
    unconverged: int  # of the head's own fits, those that ended before they converged
    comparison: list[dict[str, Any]] = field(default_factory=list)  # group, input, auroc, auroc_train

    def at(self, threshold: float) -> tuple[float, float]:
        """(recall of important tokens, share of unimportant ones accepted) at the tabled threshold nearest to `threshold`."""
        row = min(self.thresholds, key=lambda r: abs(r["threshold"] - threshold))
        return row["recall"], row["accepted"]


def held_rows(values: np.ndarray, parts: Parts) -> np.ndarray:
    """The held-out rows' values, part after part."""
    return np.concatenate([values[held] for _, held in parts])


def report_of(
    mined: MinedTable, parts: Parts, said: Sequence[np.ndarray], aligned: np.ndarray, trained: Trained,
    grid: dict[float, Trained], c: float | None, settings: JudgeSettings,
) -> JudgeReport:  # fmt: skip
    """The figures of what the heads said of each part's held-out rows.

    Args:
        said: part after part, in each head's own words; `aligned`: all of it on the scale of the head that is saved.
        grid: the logistic regressions by C, where any were fitted; `c`: the head's own, None for an MLP.
    """
    from sklearn.metrics import roc_auc_score

    y = mined.important.numpy()
    says, held_y = np.concatenate(said), held_rows(y, parts)
    table, threshold = threshold_table(aligned, held_y, settings.recall)
    return JudgeReport(
        auroc=float(np.mean([roc_auc_score(y[held], s) for s, (_, held) in zip(said, parts, strict=True)])),
        brier=float(np.mean((says.astype(np.float64) - held_y) ** 2)),
        important=float(mined.important.float().mean()),
        problems=len(mined.texts),
        mismatches=len(mined),
        held_out=len(held_y),
        held_out_important=int(held_y.sum()),
        threshold=threshold,
        thresholds=table,
        c=c,
        curve=[{"C": c, "auroc": t.auroc, "auroc_train": t.auroc_train} for c, t in grid.items()],
        unconverged=trained.unconverged,
    )
