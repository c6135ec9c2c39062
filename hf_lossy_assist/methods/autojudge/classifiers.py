"""The classifier in AutoJudge's head: splits by problem, fitting, and rescaling of its outputs.

scikit-learn's logistic regression with the settings of Garipov et al., Appendix B (huggingface.co/papers/2504.20039).
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...artifacts.features import POSITIONS
from ...artifacts.head import Head, LinearHead
from ...artifacts.head_config import HeadConfig
from ...training.head_quality import FEWEST
from ...validation import check_int, check_number, shown


if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

# In the order of concatenation.
SOURCES = {"draft": ("draft",), "target": ("target",), "both": ("draft", "target")}
GRID = tuple(10.0**-i for i in range(8))
HELD_OUT = 0.1  # share of the problems, without folds
FEWEST_PROBLEMS = 8
FOLDS = 5  # if one split holds out too few tokens of a label

Parts = Sequence[tuple[np.ndarray, np.ndarray]]  # (training, held out), each (N,) bool


@dataclass(frozen=True)
class JudgeSettings:
    """Settings for fitting a judge; the defaults are the paper's."""

    model: str = "both"
    position: str = "token"
    grid: tuple[float, ...] = GRID  # of C, the inverse strength of the L2 penalty
    recall: float = 0.90  # share of the important tokens that the head's default threshold must reject
    # 0: one split, 90 % of the problems for training; None: folds if that holds out too few tokens.
    folds: int | None = 0
    seed: int = 0
    max_iter: int = 500

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("--features", self.model, tuple(SOURCES)),
            ("--position", self.position, POSITIONS),
        ):
            if value not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {shown(value)}")
        check_number("--recall", self.recall, 0.0, 1.0)
        check_int("--folds", 0 if self.folds is None else self.folds, 0)
        if self.folds == 1:
            raise ValueError("--folds: one fold leaves nothing to train on; pass 2 or more, or 0 for one split")
        check_int("--seed", self.seed, 0)
        check_int("max_iter", self.max_iter, 1)


PAPER = JudgeSettings()


def split(problem: np.ndarray, folds: int, seed: int, important: np.ndarray | None = None) -> Parts:
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


@dataclass
class Trained:
    """A classifier fitted to the training side of each part."""

    fitted: list["Pipeline"]  # scikit-learn pipelines: scaler, classifier
    auroc: float  # on the held-out side; means over the parts
    auroc_train: float
    unconverged: int


def fit_classifier(x: np.ndarray, y: np.ndarray, c: float, settings: JudgeSettings) -> tuple["Pipeline", int]:
    """Fit a scikit-learn pipeline that standardises and classifies; return it, and 1 if it did not converge, else 0."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=c, max_iter=settings.max_iter))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        pipeline.fit(x, y)
    for warning in caught:
        if not issubclass(warning.category, ConvergenceWarning):
            warnings.warn(warning.message, warning.category, stacklevel=2)
    return pipeline, int(any(issubclass(warning.category, ConvergenceWarning) for warning in caught))


def train(x: np.ndarray, y: np.ndarray, splits: Parts, settings: JudgeSettings, c: float) -> Trained:
    """Fit a classifier with this C on each part."""
    from sklearn.metrics import roc_auc_score

    fitted, unconverged, aurocs = [], 0, []
    for training, test in splits:
        pipeline, late = fit_classifier(x[training], y[training], c, settings)
        fitted.append(pipeline)
        unconverged += late
        aurocs.append([roc_auc_score(y[mask], pipeline.predict_proba(x[mask])[:, 1]) for mask in (test, training)])
    held_out, seen = (float(mean) for mean in np.mean(aurocs, axis=0))
    return Trained(fitted, held_out, seen, unconverged)


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
