"""The config that a fitted judge is saved with: what it reads, how it was trained and what it reaches."""

import dataclasses
from typing import Any

import numpy as np

from ...artifacts.conditions import select_sampling
from ...artifacts.features import FeatureSpec
from ...artifacts.head_config import HeadConfig
from ...models.identity import ModelIdentity, versions
from ...training.head_quality import CURVES, compute_curves
from .classifiers import WIDTH, JudgeSettings
from .hidden_states import MinedTable
from .report import JudgeReport, evidence_of
from .splits import Parts


LABEL = "swapping the target's token for the draft's changes the answer"


def config_of(
    mined: MinedTable, identities: dict[str, ModelIdentity | None], settings: JudgeSettings, size: int
) -> HeadConfig:
    """The config of a head that reads `size` numbers, without figures."""
    import sklearn

    facts, mine = mined.facts, mined.facts["settings"]
    return HeadConfig(
        hidden_size=size,
        kind=settings.head,
        width=WIDTH if settings.head == "mlp" else None,
        method="autojudge",
        polarity="important",
        label=LABEL,
        features=FeatureSpec(settings.model, settings.position),
        target=identities["target"],
        draft=identities["draft"],
        tokenizer_hash=facts["tokenizer_hash"],
        decoding=select_sampling(mine),
        versions=versions() | {"scikit-learn": sklearn.__version__},
    )


def with_figures(
    config: HeadConfig, mined: MinedTable, parts: Parts, report: JudgeReport, settings: JudgeSettings
) -> HeadConfig:
    """The config with how the head was trained and what it reaches."""
    facts, problem = mined.facts, mined.problem.numpy()
    held = [np.unique(problem[mask]).tolist() for _, mask in parts]
    apart = (
        f"{settings.folds} folds by problem; this head saw all, the figures are of the folds' heads on what each did not see"
        if settings.folds
        else f"{report.problems - len(held[0])} problems for training, {len(held[0])} kept aside for "
        + ("C, " if report.c is not None else "")
        + "the threshold and the figures"
    )
    classifier = (
        f"logistic regression, L2 with C = {report.c:g}, at most {settings.max_iter} steps"
        if report.c is not None
        else f"MLP of {WIDTH} hidden units, stopped early"
    )
    training: dict[str, Any] = {
        "prompts": facts.get("source") or "not named",
        "task": facts.get("task") or "not named",
        "problems": f"{facts.get('problems', report.problems)}, {report.problems} of them with a mismatch",
        "mismatches": report.mismatches,
        "labels": "each mismatch swapped alone" if facts["settings"].get("naive") else "semi-greedy search",
        "classifier": classifier,
        **({"C": report.c} if report.c is not None else {}),
        "split": apart,
        "seed": settings.seed,
        "held_out_problems": [] if settings.folds else held[0],
    }
    metrics: dict[str, Any] = {
        **report.evidence.metrics(),
        "brier": report.brier,
        "important_share": report.important,
        "held_out_mismatches": report.held_out,
        "recall_goal": settings.recall,
        "thresholds": report.thresholds,
        CURVES: report.curves.to_dict(),
    }
    if report.comparison:
        metrics["comparison"] = report.comparison
    return dataclasses.replace(config, threshold=report.threshold, training=training, metrics=metrics)


def of_fold(
    config: HeadConfig, k: int, problem: np.ndarray, said: np.ndarray, y: np.ndarray, threshold: float
) -> HeadConfig:
    """The config of fold k's head, with the problems it has not seen and its own figures on them."""
    seen = f"all folds but {k}; the figures are of the problems in it, the threshold is that of all folds together, on this head's scale"
    training = config.training | {"split": seen, "held_out_problems": np.unique(problem).tolist()}
    metrics = {
        **evidence_of([said], y, problem).metrics(),
        "brier": float(np.mean((said.astype(np.float64) - y) ** 2)),
        "held_out_mismatches": len(y),
        CURVES: compute_curves(said, said, y).to_dict(),
    }
    return dataclasses.replace(config, threshold=threshold, training=training, metrics=metrics)
