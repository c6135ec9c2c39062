"""The classifiers behind AutoJudge's head: what is fitted, which C and which threshold are chosen.

scikit-learn with the settings of Garipov et al., Appendix B (huggingface.co/papers/2504.20039).
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from huggingface_hub.utils import tqdm

from ...artifacts.features import POSITIONS
from ...artifacts.head import KINDS, Head
from ...artifacts.head_config import HeadConfig
from ...validation import check_int, check_number, check_positive, shown
from .splits import Parts


SOURCES = {
    "draft": ("draft",),
    "target": ("target",),
    "both": ("draft", "target"),
}  # in the order they are concatenated
GRID = tuple(10.0**-i for i in range(8))
QUANTILES = 26  # of the held-out probabilities, as thresholds
THRESHOLDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.5)
WIDTH, TREES = 128, 128  # of the MLP, of the forest


@dataclass(frozen=True)
class JudgeSettings:
    """How a judge is fitted; the defaults are the paper's."""

    model: str = "both"
    position: str = "token"
    head: str = "linear"
    grid: tuple[float, ...] = GRID  # of C, the inverse strength of the L2 penalty
    recall: float = 0.90  # share of the important tokens that the head's own threshold must reject
    folds: int | None = (
        0  # 0: one split, 90 % of the problems for training; None: folds where that holds out few tokens
    )
    seed: int = 0
    max_iter: int = 500

    def __post_init__(self) -> None:
        for name, given, known in (
            ("--head", self.head, tuple(KINDS)),
            ("--features", self.model, tuple(SOURCES)),
            ("--position", self.position, POSITIONS),
        ):
            if given not in known:
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {shown(given)}")
        check_number("--recall", self.recall, 0.0, 1.0)
        check_int("--folds", 0 if self.folds is None else self.folds, 0)
        if self.folds == 1:
            raise ValueError("--folds: one fold leaves nothing to train on; pass 2 or more, or 0 for one split")
        check_int("--seed", self.seed, 0)
        check_int("max_iter", self.max_iter, 1)
        if not isinstance(self.grid, list | tuple) or not self.grid:
            raise ValueError(f"grid: expected one or more numbers above 0, got {shown(self.grid)}")
        for c in self.grid:
            check_positive("grid", c)


PAPER = JudgeSettings()


def inputs(states: dict[str, dict[str, torch.Tensor]], model: str, places: Sequence[str]) -> np.ndarray:
    """What a classifier reads, (N, H) float32: place after place, of each the draft's numbers before the target's."""
    return torch.cat([states[source][place] for place in places for source in SOURCES[model]], dim=1).numpy()


@dataclass
class Trained:
    """A kind of classifier fitted to the training side of each part, with what it says of the other side."""

    fitted: list[Any]  # scikit-learn pipelines: scaler, classifier
    said: list[np.ndarray]  # P(important), of each part's held-out rows
    auroc: float  # means over the parts
    auroc_train: float
    unconverged: int


def fit_classifier(x: np.ndarray, y: np.ndarray, kind: str, c: float, settings: JudgeSettings) -> tuple[Any, int]:
    """A scikit-learn pipeline that standardises and classifies, and whether it ended before it converged (0 or 1)."""
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    made = {
        "linear": lambda: LogisticRegression(C=c, max_iter=settings.max_iter),
        "mlp": lambda: MLPClassifier((WIDTH,), early_stopping=True, random_state=settings.seed),
        "forest": lambda: RandomForestClassifier(TREES, min_samples_leaf=0.001, random_state=settings.seed, n_jobs=-1),
    }
    pipeline = make_pipeline(StandardScaler(), made[kind]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ConvergenceWarning)
        pipeline.fit(x, y)
    for warning in caught:
        if not issubclass(warning.category, ConvergenceWarning):
            warnings.warn(warning.message, warning.category, stacklevel=2)
    return pipeline, int(any(issubclass(warning.category, ConvergenceWarning) for warning in caught))


def train(x: np.ndarray, y: np.ndarray, parts: Parts, settings: JudgeSettings, kind: str, c: float = 1.0) -> Trained:
    """Fit one kind of classifier on each part: "linear" (at this C), "mlp" or "forest"."""
    from sklearn.metrics import roc_auc_score

    fitted, said, unconverged, aurocs = [], [], 0, []
    for training, held in parts:
        pipeline, ended = fit_classifier(x[training], y[training], kind, c, settings)
        fitted.append(pipeline)
        unconverged += ended
        says = [pipeline.predict_proba(x[mask])[:, 1] for mask in (held, training)]
        said.append(says[0])
        aurocs.append([roc_auc_score(y[mask], p) for mask, p in zip((held, training), says, strict=True)])
    held_out, training_too = (float(mean) for mean in np.mean(aurocs, axis=0))
    return Trained(fitted, said, held_out, training_too, unconverged)


def train_grid(x: np.ndarray, y: np.ndarray, parts: Parts, settings: JudgeSettings) -> dict[float, Trained]:
    """A logistic regression for each C."""
    return {
        c: train(x, y, parts, settings, "linear", c)
        for c in tqdm(settings.grid, desc="fitting", unit="C", leave=False)
    }


def best(grid: dict[float, Trained]) -> float:
    """The C of the highest AUROC on held-out problems; of equals the smallest, which regularises most."""
    return max(grid, key=lambda c: (grid[c].auroc, -c))


def folded(pipeline: Any, config: HeadConfig) -> Head:
    """A head that says of raw features what the pipeline of scaler and classifier says: W·(x − mean)/scale + b in one."""
    scaler, model = pipeline
    weights, biases = (
        (model.coefs_, model.intercepts_) if config.kind == "mlp" else ([model.coef_.T], [model.intercept_])
    )
    first = weights[0].T.astype(np.float64) / scaler.scale_
    layers = [
        (first, biases[0] - first @ scaler.mean_),
        *((w.T, b) for w, b in zip(weights[1:], biases[1:], strict=True)),
    ]
    names = ("hidden", "linear") if config.kind == "mlp" else ("linear",)
    head = KINDS[config.kind](config)
    head.load_state_dict(
        {
            f"{name}.{part}": torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
            for name, layer in zip(names, layers, strict=True)
            for part, values in zip(("weight", "bias"), layer, strict=True)
        }
    )
    return head.eval()


# -- scales of several heads ---------------------------------------------------------------------------------------------


@torch.no_grad()
def scale_of(head: Head, x: np.ndarray) -> tuple[float, float]:
    """Mean and spread of a head's log-odds over all rows, (N, H)."""
    logit = head.logit(torch.from_numpy(x)).double()
    return float(logit.mean()), max(float(logit.std(correction=0)), 1e-12)


def moved(p: np.ndarray, of: tuple[float, float], to: tuple[float, float]) -> np.ndarray:
    """Probabilities (N,) on one head's scale as another's: log-odds of the same distance from the mean, in spreads.

    A strong penalty leaves a head little but the share of important tokens in its own training rows. Those differ from fold to
    fold by more than what the heads say of any one token, so thresholds mean nothing until all speak on one scale.
    """
    p = np.clip(p.astype(np.float64), 1e-12, 1 - 1e-12)
    z = (np.log(p) - np.log1p(-p) - of[0]) / of[1] * to[1] + to[0]
    return 1 / (1 + np.exp(-z)) if of != to else p


# -- thresholds ---------------------------------------------------------------------------------------------------------


def threshold_table(said: np.ndarray, important: np.ndarray, goal: float) -> tuple[list[dict[str, float]], float]:
    """Rows {threshold, recall, accepted}, rising, and the head's own threshold.

    That is the one where recall + accepted is largest among those whose recall is at least `goal`: a good head need not give
    up the recall that the goal allows it to. Of equal ones the lowest.

    A token is accepted where P(important) < threshold: "recall" is the share of the important ones that is not, "accepted" the
    share of the unimportant ones that is. Thresholds have four digits, or more where all probabilities are close together, and
    stay below 1, which would accept whatever comes.
    """
    p, missed = np.sort(said[important]), np.sort(said[~important])
    spread = float(said.max() - said.min())
    lowest = np.array([_floor(t, spread) for t in p[: len(p) - max(1, math.ceil(goal * len(p) - 1e-9)) + 1]])
    # At the i-th lowest of the important tokens' scores i of them are lost.
    both = np.searchsorted(missed, lowest) / len(missed) - np.searchsorted(p, lowest) / len(p)
    own = lowest[both.argmax()]
    chosen = sorted(
        {_floor(t, spread) for t in (*THRESHOLDS, *np.quantile(said, np.linspace(0, 1, QUANTILES)))} | {float(own)}
    )
    rows = [
        {
            "threshold": t,
            "recall": float(1 - np.searchsorted(p, t) / len(p)),
            "accepted": float(np.searchsorted(missed, t) / len(missed)),
        }
        for t in chosen
    ]
    return rows, float(own)


def _floor(t: float, spread: float) -> float:
    """The next number of four digits below, or of as many as tell a thousandth of the `spread` of what a head says.

    Readable, and no token that the threshold rejects slips under it by rounding.
    """
    if t <= 0:
        return 0.0
    digits = max(3 - math.floor(math.log10(t)), -math.floor(math.log10(spread / 1000)) if spread > 0 else 0)
    return min(round(math.floor(float(t) * 10.0**digits) / 10.0**digits, digits), 0.9999)
