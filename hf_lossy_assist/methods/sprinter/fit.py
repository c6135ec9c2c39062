"""Fit SPRINTER's verifier to a collected dataset, and measure it on held-out prompts.

Every kind of prefix has the same weight, and optionally both labels do (Zhong et al., §3.2 and A.5, huggingface.co/papers/2502.04557).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from ...artifacts.head import Head
from ...stats.auroc import auroc
from ...training.head_quality import Evidence, HeadReport, add_intervals, bin_probabilities, draw_reliability, draw_roc
from ...training.head_training import (
    HeadFitSettings,
    fit_labels,
    make_config,
    open_collected,
    write_fitted,
)
from ...training.verifier_dataset import VerifierDataset, label_acceptable
from ...validation import MOST_FACTOR, check_number


DEFAULTS = HeadFitSettings()
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
LONGER = "collect more prompts or longer texts"


@dataclass
class VerifierReport(HeadReport):
    """The figures of a fitted verifier; rows of `thresholds` have eta_tp and eta_fp."""

    lam: float
    acceptable: float  # share of all records
    auroc_by_kind: dict[str, float]
    scores: np.ndarray  # of the held-out tokens, as the labels
    labels: np.ndarray

    def metrics(self) -> dict[str, object]:
        by_kind = {f"auroc_{name}": value for name, value in self.auroc_by_kind.items()}
        return super().metrics() | {"acceptable_share": self.acceptable, **by_kind}

    def at(self, threshold: float) -> tuple[float, float]:
        """Return (η_TP, η_FP) at the tabulated threshold nearest to `threshold`."""
        row = self.row_at(threshold)
        return row["eta_tp"], row["eta_fp"]


@torch.no_grad()
def measure(head: Head, table: VerifierDataset, lam: float) -> VerifierReport:
    """Measure AUROC, ROC, (η_TP, η_FP) by threshold, Brier score and reliability of `head` on the records of `table`."""
    from sklearn.metrics import brier_score_loss, roc_auc_score

    v, y = head(table.features).numpy(), label_acceptable(table.p, table.q, lam).numpy()
    by_kind = {}
    for k, name in enumerate(table.kinds):
        rows = table.kind.numpy() == k
        if len(np.unique(y[rows])) == 2:
            by_kind[name] = float(roc_auc_score(y[rows], v[rows]))
    counts = {"unacceptable": int((~y).sum()), "acceptable": int(y.sum())}
    rates = [
        {"threshold": t, "eta_tp": float((v[y] >= t).mean()), "eta_fp": float((v[~y] >= t).mean())} for t in THRESHOLDS
    ]
    return VerifierReport(
        lam=lam,
        evidence=Evidence(
            auroc=auroc(v, y, table.prompt.numpy()),
            texts=table.prompt.unique().numel(),
            unit="prompt",
            counts=counts,
            missing={"unacceptable": f"{LONGER}, or fit a smaller λ", "acceptable": f"{LONGER}, or fit a larger λ"},
        ),
        brier=float(brier_score_loss(y, v)),
        acceptable=float(y.mean()),
        auroc_by_kind=by_kind,
        thresholds=add_intervals(rates, {"eta_tp": counts["acceptable"], "eta_fp": counts["unacceptable"]}),
        scores=v,
        labels=y,
    )


def fit_head(table: VerifierDataset, lam: float, settings: HeadFitSettings = DEFAULTS) -> tuple[Head, VerifierReport]:
    """Fit one head to the labels q ≤ λ·p; see `fit_labels`."""
    check_number("--lambda", lam, 0.0, MOST_FACTOR)
    labels = label_acceptable(table.p, table.q, lam).float()
    loss = f"binary cross entropy, Adam, learning rate {settings.learning_rate:g}, early stopping"
    loss += ", both labels weighted equally, intercept moved back" if settings.balance else ""
    prefixes = "original, draft-only, target-only and interleaved, weighted equally"
    return fit_labels(
        table,
        settings,
        labels,
        lambda train: (labels, *_compute_weights(table, labels, train, settings.balance)),
        lambda head, test: measure(head, test, lam),
        make_config(table, settings, "sprinter", f"q(x) ≤ {lam:g}·p(x)", lam),
        {"prefixes": prefixes, "loss": loss},
    )


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

    The folder contains the files of `Head.save_pretrained`, and plots.

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
    curves = {f"$\\lambda$ = {r.lam:g}": (r.scores, r.labels, r.auroc) for _, r in fitted}
    bins = bin_probabilities(report.scores, report.labels)
    write_fitted(head, out, {"roc.png": draw_roc(curves), "reliability.png": draw_reliability(bins)})
    return head, [r for _, r in fitted]
