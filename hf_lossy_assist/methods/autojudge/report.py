"""Measure a fitted judge on held-out problems: thresholds and figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...stats.auroc import auroc
from ...training.head_quality import Evidence, HeadReport, add_intervals, format_share
from .classifiers import FOLDS, JudgeSettings, Parts, Trained
from .dataset import MinedTable


QUANTILES = 26  # of the held-out probabilities, used as thresholds
THRESHOLDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.5)


@dataclass
class JudgeReport(HeadReport):
    """The figures of a fitted judge on held-out problems; rows of `thresholds` have recall and accepted."""

    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    held_out: int  # mismatches that the figures are based on
    held_out_important: int
    threshold: float  # the head's default
    c: float
    grid: list[dict[str, float]]  # C, auroc, auroc_train for each C of the grid
    folds: int  # 0: one split
    unconverged: int  # fits of the head that did not converge

    def counted(self, threshold: float) -> tuple[str, str]:
        """Return `at` as text, each share with its counts and its interval."""
        counts = self.held_out_important, self.held_out - self.held_out_important
        recall, accepted = (
            format_share(round(share * count), count) for share, count in zip(self.at(threshold), counts, strict=True)
        )
        return recall, accepted

    def at(self, threshold: float) -> tuple[float, float]:
        """Return (recall of important tokens, share of unimportant ones accepted) at the tabulated threshold nearest to `threshold`."""
        row = self.row_at(threshold)
        return row["recall"], row["accepted"]


def make_report(
    mined: MinedTable,
    splits: Parts,
    outputs: Sequence[np.ndarray],
    aligned: np.ndarray,
    grid: dict[float, Trained],
    c: float,
    settings: JudgeSettings,
) -> JudgeReport:
    """Compute the figures of the heads' outputs on each part's held-out rows.

    Args:
        outputs: part by part, on each head's scale; `aligned`: all of them on the scale of the head that is saved.
        grid: the logistic regressions by C; `c`: the head's.
    """
    p, y, problem = (
        np.concatenate(outputs),
        *(
            np.concatenate([values.numpy()[held_out] for _, held_out in splits])
            for values in (mined.important, mined.problem)
        ),
    )
    table, threshold = tabulate_thresholds(aligned, y, settings.recall)
    evidence = make_evidence(outputs, y, problem)
    counts = evidence.counts
    return JudgeReport(
        evidence=evidence,
        brier=float(np.mean((p.astype(np.float64) - y) ** 2)),
        important=float(mined.important.float().mean()),
        problems=len(mined.texts),
        mismatches=len(mined),
        held_out=len(y),
        held_out_important=counts["important"],
        threshold=threshold,
        thresholds=add_intervals(table, {"recall": counts["important"], "accepted": counts["unimportant"]}),
        c=c,
        grid=[{"C": c, "auroc": t.auroc, "auroc_train": t.auroc_train} for c, t in grid.items()],
        folds=settings.folds or 0,
        unconverged=grid[c].unconverged,
    )


def make_evidence(outputs: Sequence[np.ndarray], important: np.ndarray, problem: np.ndarray) -> Evidence:
    """Describe the held-out rows (N,) on which the figures of heads' outputs, part by part, are based."""
    longer = "mine more problems, or longer answers (hf-lossy mine --limit, --max-new-tokens)"
    more = longer if len(outputs) > 1 else f"{longer}, or hold each problem out once (--folds {FOLDS})"
    fold = np.repeat(np.arange(len(outputs)), [len(fold_outputs) for fold_outputs in outputs])
    return Evidence(
        auroc=auroc(np.concatenate(outputs), important, problem, fold),
        texts=len(np.unique(problem)),
        unit="problem",
        counts={"important": int(important.sum()), "unimportant": int((~important).sum())},
        missing=dict.fromkeys(("important", "unimportant"), more),
    )


def tabulate_thresholds(p: np.ndarray, important: np.ndarray, goal: float) -> tuple[list[dict[str, float]], float]:
    """Return rows {threshold, recall, accepted}, ascending, and the head's default threshold, from probabilities (N,).

    The default maximises recall + accepted among thresholds with a recall of at least `goal`, since a good head need not give up the recall that
    the goal allows it to. Among equals it is the lowest.

    A token is accepted if P(important) < threshold: "recall" is the share of important tokens that are not accepted, "accepted" the share of
    unimportant tokens that are. Thresholds have four digits, or more if all probabilities are close together, and stay below 1, which would accept
    everything.
    """
    hits, others = np.sort(p[important]), np.sort(p[~important])
    spread = float(p.max() - p.min())
    lowest = np.array([_floor(t, spread) for t in hits[: len(hits) - max(1, math.ceil(goal * len(hits) - 1e-9)) + 1]])
    # At the i-th lowest score of an important token, i of them are lost.
    both = np.searchsorted(others, lowest) / len(others) - np.searchsorted(hits, lowest) / len(hits)
    default = float(lowest[both.argmax()])
    levels = (*THRESHOLDS, *np.quantile(p, np.linspace(0, 1, QUANTILES)))
    rows = [
        {
            "threshold": t,
            "recall": float(1 - np.searchsorted(hits, t) / len(hits)),
            "accepted": float(np.searchsorted(others, t) / len(others)),
        }
        for t in sorted({_floor(t, spread) for t in levels} | {default})
    ]
    return rows, default


def _floor(t: float, spread: float) -> float:
    """Round `t` down to four digits, or to as many as resolve a thousandth of the `spread` of all probabilities.

    The result is readable, and rounding does not let a token that the threshold rejects fall below it.
    """
    if t <= 0:
        return 0.0
    digits = max(3 - math.floor(math.log10(t)), -math.floor(math.log10(spread / 1000)) if spread > 0 else 0)
    return min(round(math.floor(float(t) * 10.0**digits) / 10.0**digits, digits), 0.9999)
