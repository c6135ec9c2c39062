"""How good a verifier is on prompts that were kept aside: AUROC, ROC, rates by threshold, Brier score, reliability."""

from dataclasses import dataclass, field

import numpy as np
import torch

from ...artifacts.head import Head
from ...stats.auroc import auroc
from ...training.dataset import VerifierDataset, label_acceptable
from ...training.head_quality import Curves, Evidence, add_intervals, compute_curves


THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(1, 20))
LONGER = "collect more prompts or longer texts"


@dataclass
class Report:
    """What a fitted head does on the prompts that were kept aside."""

    lam: float
    evidence: Evidence  # what the figures are of, and the AUROC with its interval
    brier: float
    acceptable: float  # share of all records
    auroc_by_kind: dict[str, float]
    thresholds: list[dict[str, float]]  # threshold, eta_tp, eta_fp, and both ends of their intervals
    curves: Curves  # what the head's config keeps of the next two
    roc: list[tuple[float, float]] = field(default_factory=list)  # (η_FP, η_TP)
    reliability: list[tuple[float, float, int]] = field(default_factory=list)  # (mean V, share acceptable, records)

    @property
    def auroc(self) -> float:
        """Of all held-out tokens."""
        return self.evidence.auroc.value

    def at(self, threshold: float) -> tuple[float, float]:
        """(η_TP, η_FP) at the tabled threshold nearest to `threshold`."""
        row = min(self.thresholds, key=lambda r: abs(r["threshold"] - threshold))
        return row["eta_tp"], row["eta_fp"]


@torch.no_grad()
def measure(head: Head, table: VerifierDataset, lam: float) -> Report:
    """AUROC, ROC, (η_TP, η_FP) by threshold, Brier score and reliability of `head` on the records of `table`."""
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import brier_score_loss, roc_auc_score, roc_curve

    v = head(table.features)
    y = label_acceptable(table.p, table.q, lam)
    fpr, tpr, _ = roc_curve(y.numpy(), v.numpy())
    thin = np.unique(np.linspace(0, len(fpr) - 1, 200).astype(int))
    share, mean = calibration_curve(y.numpy(), v.numpy(), n_bins=10)
    # As scikit-learn bins them: a value on an edge belongs to the bin below.
    counts = np.bincount(np.searchsorted(np.linspace(0, 1, 11)[1:-1], v.numpy()), minlength=10)
    by_kind = {}
    for k, name in enumerate(table.kinds):
        mine = table.kind == k
        if y[mine].unique().numel() == 2:
            by_kind[name] = float(roc_auc_score(y[mine].numpy(), v[mine].numpy()))
    held = {"unacceptable": int((~y).sum()), "acceptable": int(y.sum())}
    rows = [
        {"threshold": t, "eta_tp": float((v[y] >= t).float().mean()), "eta_fp": float((v[~y] >= t).float().mean())}
        for t in THRESHOLDS
    ]
    return Report(
        lam=lam,
        evidence=Evidence(
            auroc=auroc(v.numpy(), y.numpy(), table.prompt.numpy()),
            texts=table.prompt.unique().numel(),
            unit="prompt",
            counts=held,
            missing={"unacceptable": f"{LONGER}, or fit a smaller λ", "acceptable": f"{LONGER}, or fit a larger λ"},
        ),
        brier=float(brier_score_loss(y.numpy(), v.numpy())),
        acceptable=float(y.float().mean()),
        auroc_by_kind=by_kind,
        thresholds=add_intervals(rows, {"eta_tp": held["acceptable"], "eta_fp": held["unacceptable"]}),
        curves=compute_curves(v.numpy(), v.numpy(), y.numpy()),
        roc=[(float(a), float(b)) for a, b in zip(fpr[thin], tpr[thin], strict=True)],
        reliability=[(float(m), float(s), int(c)) for m, s, c in zip(mean, share, counts[counts > 0], strict=True)],
    )
