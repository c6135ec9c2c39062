"""Fit SPRINTER's verifier to a collected dataset, and say on held-out prompts how good it is.

Every kind of prefix weighs the same, and so may both labels (Zhong et al., §3.2 and A.5, huggingface.co/papers/2502.04557).
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...artifacts.cards import head_card, write_card
from ...artifacts.files import check_new, new_folder
from ...artifacts.head import Head
from ...artifacts.head_config import HeadConfig
from ...training.dataset import VerifierDataset, label_acceptable, read_dataset
from ...training.head_quality import CURVES
from ...validation import MOST_FACTOR, check_number
from .figures import Report, measure
from .train import DEFAULTS, FitSettings, config_of, split, train_head


def fit_head(table: VerifierDataset, lam: float, settings: FitSettings = DEFAULTS) -> tuple[Head, Report]:
    """Fit one head to the labels q ≤ λ·p.

    Returns: the head, in evaluation mode, with its figures in its config, and the full report on the test prompts.

    Raises: `ValueError` where a part of the split has only one of the two labels.
    """
    check_number("--lambda", lam, 0.0, MOST_FACTOR)
    labels = label_acceptable(table.p, table.q, lam)
    parts = split(table.prompt, settings.seed)
    for name, part in zip(("training", "early stopping", "test"), parts, strict=True):
        if labels[part].unique().numel() < 2:
            share = float(labels[part].float().mean())
            raise ValueError(
                f"λ = {lam:g}: the {name} prompts have only one label ({share:.0%} acceptable); collect more prompts"
            )
    train, valid, test = parts
    weight, share = _weights(table, labels.float(), train, settings.balance)
    config = config_of(table, settings, "sprinter", f"q(x) ≤ {lam:g}·p(x)")
    head = train_head(config, table.features, labels.float(), weight, (train, valid), settings)
    if settings.balance:
        with torch.no_grad():  # an odds ratio moves by the ratio of the label weights
            head.linear.bias += float(np.log(share / (1 - share)))  # type: ignore[union-attr, operator]
    report = measure(head, table.of(test), lam)
    return _with_figures(head, report, table, settings, [int(part.sum()) for part in parts]), report


def _weights(
    table: VerifierDataset, y: torch.Tensor, train: torch.Tensor, balance: bool
) -> tuple[torch.Tensor, float]:
    """(N,): every kind of prefix counts the same in all (§3.2), and with `balance` each label as well; mean 1 over training.

    Also the share of acceptable tokens where only the kinds are weighted.
    """
    weight = torch.ones_like(y)
    for kind in table.kind[train].unique():
        mine = table.kind == kind
        weight[mine] /= (mine & train).sum()
    share = float((weight * y)[train].sum() / weight[train].sum())
    if balance:
        for label in (0.0, 1.0):
            mine = y == label
            weight[mine] /= weight[mine & train].sum()
    return weight / weight[train].mean(), share


def _with_figures(
    head: Head, report: Report, table: VerifierDataset, settings: FitSettings, sizes: Sequence[int]
) -> Head:
    """The same head with how it was trained and what it reaches in its config."""
    facts = table.facts
    training = {
        "prompts": facts["source"] or "not named",
        "number_of_prompts": facts["prompts"],
        "tokens": f"{sizes[0]} for training, {sizes[1]} for early stopping, {sizes[2]} for the figures; no prompt in two parts",
        "prefixes": "original, draft-only, target-only and interleaved, weighted equally",
        "loss": f"binary cross entropy, Adam, learning rate {settings.learning_rate:g}, early stopping"
        + (", both labels weighted equally, intercept moved back" if settings.balance else ""),
        "seed": settings.seed,
    }
    metrics = {
        **report.evidence.metrics(),
        "brier": report.brier,
        "acceptable_share": report.acceptable,
        **{f"auroc_{name}": value for name, value in report.auroc_by_kind.items()},
        "thresholds": report.thresholds,
        CURVES: report.curves.to_dict(),
    }
    head.config = HeadConfig(**(vars(head.config) | {"lam": report.lam, "training": training, "metrics": metrics}))
    return head


def fit_sprinter(
    data: str | Path, out: str | Path, lambdas: Sequence[float] = (), settings: FitSettings = DEFAULTS
) -> tuple[Head, list[Report]]:
    """Fit a head for each λ, and write the one for the λ that the data was collected with (or else the first) to `out`.

    The folder holds what `Head.save_pretrained` writes, and plots.

    Returns: the head that was written, and every λ's report in the order given. Raises: `ValueError`, one line.
    """
    from ...training.charts import write_reliability, write_roc

    out = Path(out)
    check_new(out, "fit again")
    for lam in lambdas:
        check_number("--lambda", lam, 0.0, MOST_FACTOR)
    table = read_dataset(data)
    table.check_for("sprinter", "predicting")
    collected = float(table.facts["settings"]["lam"])
    lambdas = list(lambdas) or [collected]
    fitted = [fit_head(table, lam, settings) for lam in lambdas]
    head, report = fitted[lambdas.index(collected) if collected in lambdas else 0]
    others = {f"auroc_lambda_{r.lam:g}": r.auroc for _, r in fitted if r is not report}
    head.config.metrics.update(others)
    with new_folder(out) as folder:
        head.write(folder)
        curves = {f"$\\lambda$ = {r.lam:g}": (*zip(*r.roc, strict=True), r.auroc) for _, r in fitted}
        write_roc(curves, folder / "roc.png")  # type: ignore[arg-type]
        write_reliability(report.reliability, folder / "reliability.png")
        write_card(head_card(head.config, plots=["roc.png", "reliability.png"]), folder / "README.md")
    head.source = str(out)
    return head, [r for _, r in fitted]
