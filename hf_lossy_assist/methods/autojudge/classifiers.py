"""The classifier in AutoJudge's head: splits by problem, fitting, thresholds, and rescaling of its outputs.

scikit-learn's logistic regression with the settings of Garipov et al., Appendix B (huggingface.co/papers/2504.20039).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import numpy as np
import torch

from ...artifacts.features import FeatureSpec
from ...artifacts.head import Head, HeadConfig, LinearHead
from ...setting_fields import check_bounds
from ...training.head_training import FEWEST
from ...validation import MOST


if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

GRID = tuple(10.0**-i for i in range(8))
HELD_OUT = 0.1  # share of the problems, without folds
FEWEST_PROBLEMS = 8
FOLDS = 5  # if one split holds out too few tokens of a label
QUANTILES = 26  # of the held-out probabilities, used as thresholds
THRESHOLDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.5)

Splits = Sequence[tuple[np.ndarray, np.ndarray]]  # (training, held out), each (N,) bool


@dataclass(frozen=True)
class JudgeSettings:
    """Settings for fitting a judge; the defaults are the paper's."""

    model: Annotated[str, "hidden states that the head reads: of draft, target or both"] = "both"
    position: Annotated[str, "of the state: token (the drafted token) or predicting (the one before)"] = "token"
    grid: tuple[float, ...] = GRID  # of C, the inverse strength of the L2 penalty
    recall: Annotated[float, (0.0, 1.0), "share of important tokens that the head's threshold must reject"] = 0.90
    folds: Annotated[
        int | None,
        (0, MOST),
        "folds by problem for the figures; 0 for one 90/10 split (default: 5 if that has few tokens)",
    ] = 0
    seed: Annotated[int, (0, MOST), "random seed of the split"] = 0
    max_iter: Annotated[int, (1, MOST), "most steps of a fit"] = 500

    def __post_init__(self) -> None:
        check_bounds(self, "--")
        if self.folds == 1:
            raise ValueError("--folds: one fold leaves nothing to train on; pass 2 or more, or 0 for one split")
        if self.features.model == "companion":
            raise ValueError("--features: expected draft, target or both, got 'companion'")

    @property
    def features(self) -> FeatureSpec:
        """The state that the head reads. Raises: `ValueError`, one line."""
        return FeatureSpec(self.model, self.position)


PAPER = JudgeSettings()


def split(problem: np.ndarray, folds: int, seed: int, important: np.ndarray | None = None) -> Splits:
    """Return (training, held out) (N,) bool masks that share no problem: one pair, or one for each fold.

    `important` (N,) bool: distribute problems with and without an important token evenly over the folds.
    """
    names = np.unique(problem)
    if len(names) < max(FEWEST_PROBLEMS, folds):
        raise ValueError(
            f"the dataset has mismatches in {len(names)} problems; at least {max(FEWEST_PROBLEMS, folds)} are needed to split "
            "by problem: mine more"
        )
    shuffled = np.random.default_rng(seed).permutation(names)
    if folds and important is not None:
        without = ~np.isin(shuffled, problem[important])
        shuffled = shuffled[np.argsort(without, kind="stable")]
    groups = [shuffled[k::folds] for k in range(folds)] or [shuffled[: max(1, round(HELD_OUT * len(names)))]]
    held_out = [np.isin(problem, group) for group in groups]
    return [(~mask, mask) for mask in held_out]


def choose_folds(problem: np.ndarray, important: np.ndarray, seed: int) -> int:
    """Return 0 if one split holds out `FEWEST` tokens of each label, else `FOLDS`, or the number of problems with each label if that is smaller."""
    if len(np.unique(problem)) < FEWEST_PROBLEMS:
        return 0  # `split` refuses so few problems
    [(_, held_out)] = split(problem, 0, seed)
    if min(important[held_out].sum(), (~important[held_out]).sum()) >= FEWEST:
        return 0
    folds = min(FOLDS, *(len(np.unique(problem[mask])) for mask in (important, ~important)))
    return folds if folds > 1 else 0


def fit_classifier(x: np.ndarray, y: np.ndarray, c: float, settings: JudgeSettings) -> "Pipeline":
    """Fit a scikit-learn pipeline that standardises and classifies, whether it converges or not."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=settings.max_iter)).fit(x, y)


def fit_splits(
    x: np.ndarray, y: np.ndarray, splits: Splits, c: float, settings: JudgeSettings
) -> "tuple[list[Pipeline], float]":
    """Fit a classifier to the training side of each split; return them, and their mean AUROC on the held-out sides."""
    from sklearn.metrics import roc_auc_score

    fitted = [fit_classifier(x[training], y[training], c, settings) for training, _ in splits]
    scored = zip(fitted, splits, strict=True)
    aurocs = [roc_auc_score(y[test], pipeline.predict_proba(x[test])[:, 1]) for pipeline, (_, test) in scored]
    return fitted, float(np.mean(aurocs))


def fold_pipeline(pipeline: "Pipeline", config: HeadConfig) -> Head:
    """Return a head that computes a pipeline of scaler and classifier on raw features, with W·(x − mean)/scale + b as one layer."""
    scaler, model = pipeline
    weight = model.coef_.astype(np.float64) / scaler.scale_
    layer = {"linear.weight": weight, "linear.bias": model.intercept_ - weight @ scaler.mean_}
    head = LinearHead(config)
    head.load_state_dict({name: torch.from_numpy(values.astype(np.float32)) for name, values in layer.items()})
    return head.eval()


@torch.no_grad()
def measure_scale(head: Head, x: np.ndarray) -> tuple[float, float]:
    """Return mean and standard deviation of a head's log-odds over all rows, (N, H)."""
    logit = head.logit(torch.from_numpy(x)).double()
    return float(logit.mean()), max(float(logit.std(correction=0)), 1e-12)


def rescale(p: np.ndarray, scale: tuple[float, float], to: tuple[float, float]) -> np.ndarray:
    """Convert probabilities (N,) from one head's scale to another's: log-odds with the same distance from the mean, in standard deviations.

    A strong penalty leaves a head little but the share of important tokens in its training rows. That share differs between folds by more than the
    heads' outputs for a given token, so thresholds are comparable only on a common scale.
    """
    p = np.clip(p.astype(np.float64), 1e-12, 1 - 1e-12)
    z = (np.log(p) - np.log1p(-p) - scale[0]) / scale[1] * to[1] + to[0]
    return 1 / (1 + np.exp(-z)) if scale != to else p


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
