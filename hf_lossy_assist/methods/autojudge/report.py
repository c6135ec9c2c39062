"""Measure a fitted judge on held-out problems: thresholds, figures and the paper's ablations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ...stats.auroc import auroc
from ...training.head_quality import Curves, Evidence, HeadReport, add_intervals, compute_curves, format_share
from .classifiers import FOLDS, SOURCES, JudgeSettings, Parts, Trained, make_inputs, train
from .dataset import MinedTable


QUANTILES = 26  # of the held-out probabilities, used as thresholds
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the training problems
THRESHOLDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.5)
CLASSIFIERS = {"linear": "logistic regression", "mlp": "MLP", "forest": "random forest"}
TOKENS = {
    "before the mismatch": ("predicting",),
    "draft's token": ("token",),
    "target's token": ("target_token",),
    "both tokens": ("token", "target_token"),
}


@dataclass
class JudgeReport(HeadReport):
    """The figures of a fitted judge on held-out problems; rows of `thresholds` have recall and accepted."""

    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    held_out: int  # mismatches that the figures are based on
    held_out_important: int
    threshold: float  # the head's default
    curves: Curves
    c: float | None  # None for an MLP
    grid: list[dict[str, float]]  # C, auroc, auroc_train for each C of the grid
    folds: int  # 0: one split
    unconverged: int  # fits of the head that did not converge
    comparison: list[dict[str, str | float]] = field(default_factory=list)  # group, input, auroc, auroc_train

    def counted(self, threshold: float) -> tuple[str, str]:
        """Return `at` as text, each share with its counts and its interval."""
        counts = self.held_out_important, self.held_out - self.held_out_important
        recall, accepted = (
            format_share(round(part * count), count) for part, count in zip(self.at(threshold), counts, strict=True)
        )
        return recall, accepted

    def at(self, threshold: float) -> tuple[float, float]:
        """Return (recall of important tokens, share of unimportant ones accepted) at the tabulated threshold nearest to `threshold`."""
        row = self.row_at(threshold)
        return row["recall"], row["accepted"]


def make_report(
    mined: MinedTable,
    parts: Parts,
    outputs: Sequence[np.ndarray],
    aligned: np.ndarray,
    trained: Trained,
    grid: dict[float, Trained],
    c: float | None,
    settings: JudgeSettings,
) -> JudgeReport:
    """Compute the figures of the heads' outputs on each part's held-out rows.

    Args:
        outputs: part by part, on each head's scale; `aligned`: all of them on the scale of the head that is saved.
        grid: the logistic regressions by C, if any were fitted; `c`: the head's, None for an MLP.
    """
    p, y, problem = (
        np.concatenate(outputs),
        *(np.concatenate([values.numpy()[held] for _, held in parts]) for values in (mined.important, mined.problem)),
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
        curves=compute_curves(aligned, p, y),
        c=c,
        grid=[{"C": c, "auroc": t.auroc, "auroc_train": t.auroc_train} for c, t in grid.items()],
        folds=settings.folds or 0,
        unconverged=trained.unconverged,
    )


def make_evidence(outputs: Sequence[np.ndarray], important: np.ndarray, problem: np.ndarray) -> Evidence:
    """Describe the held-out rows (N,) on which the figures of heads' outputs, part by part, are based."""
    longer = "mine more problems, or longer answers (hf-lossy mine --limit, --max-new-tokens)"
    more = longer if len(outputs) > 1 else f"{longer}, or hold each problem out once (--folds {FOLDS})"
    fold = np.repeat(np.arange(len(outputs)), [len(part) for part in outputs])
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


def compare_variants(
    states: dict[str, dict[str, torch.Tensor]],
    y: np.ndarray,
    problem: np.ndarray,
    parts: Parts,
    settings: JudgeSettings,
    grid: dict[float, Trained],
    c: float,
) -> dict[str, dict[str, Trained]]:
    """Fit the ablations of Appendix B, Figures 6 and 7 (huggingface.co/papers/2504.20039), by group and name, on the same split.

    The group "data" has the head fitted to a part of the training problems: whether mining more would help.

    Args:
        states: for "draft" and "target", the states (N, H) of every place.
        grid, c: the logistic regressions on the head's input, and the chosen C, which Figure 7's variants also use.
    """
    place = settings.position
    fitted: dict[tuple[str, tuple[str, ...]], Trained] = {(settings.model, (place,)): grid[c]}

    def fit(model: str, places: tuple[str, ...]) -> Trained:
        if (model, places) not in fitted:
            fitted[model, places] = train(make_inputs(states, model, places), y, parts, settings, "linear", c)
        return fitted[model, places]

    x = make_inputs(states, settings.model, [place])
    return {
        "regularisation": {f"C = {c:g}": trained for c, trained in grid.items()},
        "classifier": {
            name: grid[c] if kind == "linear" else train(x, y, parts, settings, kind)
            for kind, name in CLASSIFIERS.items()
        },
        "token": {name: fit(settings.model, places) for name, places in TOKENS.items()},
        "model": {model: fit(model, (place,)) for model in SOURCES},
        "data": {
            f"{round(float(np.mean([some.sum() for some, _ in fewer])))} mismatches": train(
                x, y, fewer, settings, "linear", c
            )
            for fewer in (keep_problems(parts, problem, share, settings.seed) for share in SHARES)
            if all(0 < y[some].sum() < some.sum() for some, _ in fewer)
        },
    }


def keep_problems(parts: Parts, problem: np.ndarray, share: float, seed: int) -> Parts:
    """Return the parts with a share of the training problems, nested: a larger share has all of a smaller one's."""
    out = []
    for training, held in parts:
        shuffled = np.random.default_rng(seed).permutation(np.unique(problem[training]))
        out.append((training & np.isin(problem, shuffled[: max(1, round(share * len(shuffled)))]), held))
    return out
