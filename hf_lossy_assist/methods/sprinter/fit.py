"""Fit a verifier, SPRINTER's or SpecDec++'s, to a collected dataset, and measure it on held-out prompts.

SPRINTER (Zhong et al., §3.2 and A.5, huggingface.co/papers/2502.04557): the labels are q(x) ≤ λ·p(x). Every kind of prefix has the same weight, and
optionally both labels do. SpecDec++ (Huang et al., §3.2, huggingface.co/papers/2405.19715): the labels are the acceptance probabilities min(1, p/q),
and a rejection weighs more than an acceptance. Their head is a residual network; here it is any `Head`, trained with early stopping.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from ...artifacts.head import Head
from ...stats.intervals import auroc
from ...training.head_training import (
    Evidence,
    HeadFitSettings,
    HeadReport,
    add_intervals,
    make_config,
    open_collected,
    split_prompts,
    train_head,
)
from ...training.verifier_dataset import VerifierDataset, label_acceptable
from ...validation import MOST_FACTOR, check_number


DEFAULTS = HeadFitSettings()
SPECDEC = HeadFitSettings(kind="mlp")
WEIGHT = 6.0  # of a rejection in SpecDec++'s loss; the paper tries 1, 3, 6 and 12
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
LONGER = "collect more prompts or longer texts"


@dataclass
class VerifierReport(HeadReport):
    """The figures of a fitted verifier; rows of `thresholds`, SPRINTER's alone, have eta_tp and eta_fp."""

    lam: float | None  # of SPRINTER's labels; None: they are SpecDec++'s
    acceptance: float  # mean label
    kl: float  # mean of KL(label ‖ head) in nats

    def metrics(self) -> dict[str, object]:
        share = "acceptable_share" if self.lam is not None else "acceptance_rate"
        return super().metrics() | {"kl": self.kl, share: self.acceptance}


def compute_labels(table: VerifierDataset, lam: float | None = None) -> torch.Tensor:
    """Return SPRINTER's labels for λ, or if it is None the probability that strict acceptance keeps each token, (N,) float32."""
    if lam is None:
        return (table.p / table.q).clamp(max=1.0)
    return label_acceptable(table.p, table.q, lam).float()


@torch.no_grad()
def measure(head: Head, table: VerifierDataset, lam: float | None = None) -> VerifierReport:
    """Measure AUROC and Brier score (of outcomes drawn from the labels), KL, and for λ (η_TP, η_FP) by threshold."""
    v, y = head(table.features).numpy(), compute_labels(table, lam).double().numpy()
    accepted, names, hints = round(float(y.sum())), ("rejected", "accepted"), (LONGER, LONGER)
    thresholds: list[dict[str, float]] = []
    if lam is not None:
        names = "unacceptable", "acceptable"
        hints = f"{LONGER}, or fit a smaller λ", f"{LONGER}, or fit a larger λ"
        thresholds = [
            {"threshold": t, "eta_tp": float((v[y == 1] >= t).mean()), "eta_fp": float((v[y == 0] >= t).mean())}
            for t in THRESHOLDS
        ]
        thresholds = add_intervals(thresholds, {"eta_tp": accepted, "eta_fp": len(y) - accepted})
    a = v.astype(np.float64)
    return VerifierReport(
        evidence=Evidence(
            auroc=auroc(v, y, table.prompt.numpy()),
            texts=table.prompt.unique().numel(),
            unit="prompt",
            counts=dict(zip(names, (len(y) - accepted, accepted), strict=True)),
            missing=dict(zip(names, hints, strict=True)),
        ),
        brier=float((y * (1 - a) ** 2 + (1 - y) * a**2).mean()),
        thresholds=thresholds,
        lam=lam,
        acceptance=float(y.mean()),
        kl=float((_compute_kl_term(y, a) + _compute_kl_term(1 - y, 1 - a)).mean()),
    )


def _compute_kl_term(y: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Return y·log(y/a), and 0 where y is 0."""
    return np.where(y > 0, y * np.log(np.where(y > 0, y, 1.0) / a.clip(1e-12)), 0.0)


def fit_head(
    table: VerifierDataset, lam: float | None, settings: HeadFitSettings = DEFAULTS, weight: float = WEIGHT
) -> tuple[Head, VerifierReport]:
    """Fit one head to SPRINTER's labels for λ, or to SpecDec++'s if it is None. The figures in its config are those of the report, on held-out prompts.

    `weight`: of a rejection in SpecDec++'s loss, w in −[y·log a + w·(1 − y)·log(1 − a)]. This loss is smallest where odds are w times too low. The
    intercept is moved back by log w, which the paper does not do, so that a is an acceptance probability and a stop's h is one as documented.
    """
    splits, y = split_prompts(table.prompt, settings.seed), compute_labels(table, lam)
    for name, mask in splits.items():
        share = float(y[mask].mean())
        if not 0 < share < 1:
            raise ValueError(f"the {name} prompts have only one label ({share:.0%} acceptable); collect more prompts")
    training, labels = splits["training"], y
    if lam is None:
        check_number("--weight", weight, 1e-3, 1e3)
        total = y + weight * (1 - y)  # a record of weight `total` and label y/`total` yields the two terms of the loss
        labels, weights, shift = y / total, total / total[training].mean(), float(np.log(weight))
        config = make_config(table, settings, "specdec", "min(1, p(x)/q(x))")
        prefixes = f"the draft's text with {table.facts['settings']['mix']:.0%} of its tokens replaced by the target's"
        details = f"soft labels, a refusal weighs {weight:g}, intercept moved back"
    else:
        weights, shift = _compute_weights(table, y, training, settings.balance)
        config = make_config(table, settings, "sprinter", f"q(x) ≤ {lam:g}·p(x)", lam)
        prefixes = "original, draft-only, target-only and interleaved, weighted equally"
        details = "both labels weighted equally, intercept moved back" if settings.balance else "hard labels"
    head = train_head(config, table.features, labels, weights, shift, splits, settings)
    report = measure(head, table.of(splits["test"]), lam)
    sizes = [int(mask.sum()) for mask in splits.values()]
    facts = {
        "prompts": table.facts["source"] or "not named",
        "number_of_prompts": table.facts["prompts"],
        "tokens": "{} for training, {} for early stopping, {} for the figures; no prompt in two parts".format(*sizes),
        "prefixes": prefixes,
        "loss": f"binary cross entropy, {details}; Adam, learning rate {settings.learning_rate:g}, early stopping",
        "seed": settings.seed,
    }
    head.config = replace(config, training=facts, metrics=report.metrics())
    return head, report


def _compute_weights(
    table: VerifierDataset, y: torch.Tensor, train: torch.Tensor, balance: bool
) -> tuple[torch.Tensor, float]:
    """Return the weights of the records, (N,): equal totals for each kind of prefix (§3.2), or label.

    Their mean is 1 in training. Also returns the shift of the log-odds, by the ratio of the label weights.
    """
    weight = torch.ones_like(y)
    for kind in table.kind[train].unique():
        rows = table.kind == kind
        weight[rows] /= (rows & train).sum()
    share = float((weight * y)[train].sum() / weight[train].sum())
    for label in (0.0, 1.0) if balance else ():
        rows = y == label
        weight[rows] /= weight[rows & train].sum()
    shift = float(np.log(share / (1 - share))) if balance else 0.0
    return weight / weight[train].mean(), shift


def fit_sprinter(
    data: str | Path, out: str | Path, lambdas: Sequence[float] = (), settings: HeadFitSettings = DEFAULTS
) -> tuple[Head, list[VerifierReport]]:
    """Fit a head for each λ, and write the one for the λ that the data was collected with (or else the first) to `out`.

    Returns: the head that was written, and the reports for every λ in the order given. Raises: `ValueError`, one line.
    """
    for lam in lambdas:
        check_number("--lambda", lam, 0.0, MOST_FACTOR)
    table = open_collected(data, out, "sprinter", "predicting")
    collected = float(table.facts["settings"]["lam"])
    lambdas = list(lambdas) or [collected]
    fitted = [fit_head(table, lam, settings) for lam in lambdas]
    head, report = fitted[lambdas.index(collected) if collected in lambdas else 0]
    head.config.metrics.update({f"auroc_lambda_{r.lam:g}": r.auroc for _, r in fitted if r is not report})
    head.save_pretrained(out)
    return head, [r for _, r in fitted]


def fit_specdec(
    data: str | Path, out: str | Path, settings: HeadFitSettings = SPECDEC, weight: float = WEIGHT
) -> tuple[Head, VerifierReport]:
    """Fit a head to the dataset `data` and write it to the folder `out`. For `weight` see `fit_head`. Raises: `ValueError`, one line."""
    table = open_collected(data, out, "specdec", "token")
    head, report = fit_head(table, None, settings, weight)
    head.save_pretrained(out)
    return head, report
