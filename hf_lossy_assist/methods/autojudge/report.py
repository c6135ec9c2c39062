"""What a fitted judge does on the problems it has not seen, as figures."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...stats.auroc import auroc
from ...training.head_quality import Curves, Evidence, add_intervals, compute_curves, format_share
from .classifiers import JudgeSettings, Trained, threshold_table
from .hidden_states import MinedTable
from .splits import FOLDS, Parts


@dataclass
class JudgeReport:
    """What a fitted judge does on the problems it has not seen."""

    evidence: (
        Evidence  # what the figures are of, and the AUROC with its interval: the mean of the folds, if there are any
    )
    brier: float
    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    held_out: int  # mismatches that the figures are of
    held_out_important: int
    threshold: float  # the head's own
    thresholds: list[dict[str, float]]  # threshold, recall, accepted, and both ends of their intervals
    curves: Curves
    c: float | None  # None for an MLP
    curve: list[dict[str, float]]  # C, auroc, auroc_train, of the grid
    folds: int  # 0: one split
    unconverged: int  # of the head's own fits, those that ended before they converged
    comparison: list[dict[str, Any]] = field(default_factory=list)  # group, input, auroc, auroc_train

    @property
    def auroc(self) -> float:
        """Mean of the folds, if there are any."""
        return self.evidence.auroc.value

    def counted(self, threshold: float) -> tuple[str, str]:
        """`at`, each share with its counts and its interval."""
        counts = self.held_out_important, self.held_out - self.held_out_important
        recall, accepted = (
            format_share(round(part * count), count) for part, count in zip(self.at(threshold), counts, strict=True)
        )
        return recall, accepted

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
    y = mined.important.numpy()
    says, held_y = np.concatenate(said), held_rows(y, parts)
    table, threshold = threshold_table(aligned, held_y, settings.recall)
    evidence = evidence_of(said, held_y, held_rows(mined.problem.numpy(), parts))
    return JudgeReport(
        evidence=evidence,
        brier=float(np.mean((says.astype(np.float64) - held_y) ** 2)),
        important=float(mined.important.float().mean()),
        problems=len(mined.texts),
        mismatches=len(mined),
        held_out=len(held_y),
        held_out_important=int(held_y.sum()),
        threshold=threshold,
        thresholds=add_intervals(
            table, {"recall": evidence.counts["important"], "accepted": evidence.counts["unimportant"]}
        ),
        curves=compute_curves(aligned, says, held_y),
        c=c,
        curve=[{"C": c, "auroc": t.auroc, "auroc_train": t.auroc_train} for c, t in grid.items()],
        folds=settings.folds or 0,
        unconverged=trained.unconverged,
    )


def evidence_of(said: Sequence[np.ndarray], important: np.ndarray, problem: np.ndarray) -> Evidence:
    """What stands behind the figures of what was said, part after part, of held-out rows (N,)."""
    longer = "mine more problems, or longer answers (hf-lossy mine --limit, --max-new-tokens)"
    more = longer if len(said) > 1 else f"{longer}, or hold each problem out once (--folds {FOLDS})"
    return Evidence(
        auroc=auroc(np.concatenate(said), important, problem, np.repeat(np.arange(len(said)), [len(s) for s in said])),
        texts=len(np.unique(problem)),
        unit="problem",
        counts={"important": int(important.sum()), "unimportant": int((~important).sum())},
        missing=dict.fromkeys(("important", "unimportant"), more),
    )
