"""Fit SpecDec++'s acceptance head to a collected dataset, and measure it on held-out prompts.

Huang et al., §3.2 (huggingface.co/papers/2405.19715): binary cross entropy with the acceptance probability min(1, p/q) as a soft label, in which a
rejection has a larger weight than an acceptance. Their head is a residual network; here it is any `Head`, trained with early stopping as in
SPRINTER.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...artifacts.head import Head
from ...stats.auroc import auroc
from ...training.head_quality import Evidence, HeadReport, bin_probabilities, draw_reliability
from ...training.head_training import (
    HeadFitSettings,
    fit_labels,
    make_config,
    open_collected,
    write_fitted,
)
from ...training.verifier_dataset import VerifierDataset
from ...validation import check_number


WEIGHT = 6.0  # of a rejection in the loss; the paper tries 1, 3, 6 and 12
THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
LONGEST = 20  # tokens of a replayed draft
SETTINGS = HeadFitSettings(kind="mlp")


@dataclass
class SpecDecReport(HeadReport):
    """The figures of a fitted head; rows of `thresholds` have drafted and accepted tokens per round, by replay."""

    kl: float  # mean of KL(label ‖ head) in nats, the authors' metric
    acceptance: float  # mean label
    reliability: list[tuple[float, float, int]]  # (mean output, mean label, records)

    def metrics(self) -> dict[str, object]:
        return super().metrics() | {"kl": self.kl, "acceptance_rate": self.acceptance}


def compute_labels(table: VerifierDataset) -> torch.Tensor:
    """Return the probability that strict acceptance keeps each drafted token, min(1, p/q), (N,) float32."""
    return (table.p / table.q).clamp(max=1.0)


def fit_head(
    table: VerifierDataset, settings: HeadFitSettings = SETTINGS, weight: float = WEIGHT
) -> tuple[Head, SpecDecReport]:
    """Fit one head; see `fit_labels`. `weight`: of a rejection in the loss, w in −[y·log a + w·(1 − y)·log(1 − a)].

    The weighted loss is smallest where odds are w times too low. The intercept is moved back by log w, which the paper does not do, so that a is
    an acceptance probability and a stop's h is one as documented.
    """
    check_number("--weight", weight, 1e-3, 1e3)
    y = compute_labels(table)
    total = y + weight * (1 - y)  # a record of weight `each` and label y/`each` yields the two terms of the loss
    loss = f"binary cross entropy with soft labels, a refusal weighs {weight:g}, intercept moved back; Adam, "
    loss += f"learning rate {settings.learning_rate:g}, early stopping"
    prefixes = f"the draft's text with {table.facts['settings']['mix']:.0%} of its tokens replaced by the target's"
    return fit_labels(
        table,
        settings,
        y,
        lambda train: (y / total, total / total[train].mean(), float(np.log(weight))),
        measure,
        make_config(table, settings, "specdec", "min(1, p(x)/q(x))"),
        {"prefixes": prefixes, "loss": loss},
    )


@torch.no_grad()
def measure(head: Head, table: VerifierDataset) -> SpecDecReport:
    """Measure AUROC and Brier score for outcomes drawn from the labels, KL, reliability, and replayed rounds."""
    a, y = head(table.features).double().numpy(), compute_labels(table).double().numpy()
    expected = round(float(y.sum()))
    return SpecDecReport(
        evidence=Evidence(
            auroc=auroc(a, y, table.prompt.numpy()),
            texts=table.prompt.unique().numel(),
            unit="prompt",
            counts={"rejected": len(y) - expected, "accepted": expected},
            missing=dict.fromkeys(("rejected", "accepted"), "collect more prompts or longer texts"),
        ),
        brier=float((y * (1 - a) ** 2 + (1 - y) * a**2).mean()),
        kl=float((_compute_kl_term(y, a) + _compute_kl_term(1 - y, 1 - a)).mean()),
        acceptance=float(y.mean()),
        thresholds=replay(table, a, y),
        reliability=bin_probabilities(a, y),
    )


def _compute_kl_term(y: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return y·log(y/a), and 0 where y is 0."""
    return np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / a.clip(1e-12)), 0.0)


def replay(table: VerifierDataset, a: np.ndarray, y: np.ndarray) -> list[dict[str, float]]:
    """Return the mean number of tokens that a round drafts, and of those accepted, for each threshold h.

    A round starts at every position with `LONGEST` tokens from there on in its row. Token k ends it (k ≥ 2, since a token is judged one step late)
    if 1 − a_1 ⋯ a_{k−1} > h; y_1 + y_1·y_2 + … of its tokens are accepted.
    """
    order = np.lexsort((table.position.numpy(), table.prompt.numpy()))
    prompt = table.prompt.numpy()[order]
    starts = [i for i in range(len(order) - LONGEST + 1) if prompt[i] == prompt[i + LONGEST - 1]]
    if not starts:
        return []
    windows = order[np.array(starts)[:, None] + np.arange(LONGEST)]  # (rounds, LONGEST)
    alive, accepted = (np.cumprod(values[windows], axis=1) for values in (a, y))
    rows = []
    for h in THRESHOLDS:
        ends = np.concatenate([alive[:, :-1] < 1 - h, np.ones((len(windows), 1), dtype=bool)], axis=1)
        drafted = np.minimum(ends.argmax(axis=1) + 2, LONGEST)
        sent = np.arange(LONGEST) < drafted[:, None]
        rows.append(
            {"threshold": h, "drafted": float(drafted.mean()), "accepted": float((accepted * sent).sum(axis=1).mean())}
        )
    return rows


def fit_specdec(
    data: str | Path,
    out: str | Path,
    settings: HeadFitSettings = SETTINGS,
    weight: float = WEIGHT,
) -> tuple[Head, SpecDecReport]:
    """Fit a head to the dataset `data` and write it to the folder `out`. For `weight` see `fit_head`.

    Raises: `ValueError`, one line.
    """
    table = open_collected(data, out, "specdec", "token")
    head, report = fit_head(table, settings, weight)
    figure = draw_reliability(report.reliability, "acceptance rate", "Reliability of the acceptance head")
    write_fitted(head, out, {"reliability.png": figure})
    return head, report
