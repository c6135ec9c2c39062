"""AutoJudge's ablations on one's own mismatches: strengths of regularisation, classifiers, tokens and models to read.

Garipov et al., Appendix B, Figures 6 and 7 (huggingface.co/papers/2504.20039). All on the same split; Figure 7's with the C that
was chosen for the head.
"""

from typing import Any

import numpy as np
import torch

from ...training.charts import compute_roc
from .classifiers import SOURCES, JudgeSettings, Trained, inputs, train
from .splits import Parts


CLASSIFIERS = {"linear": "logistic regression", "mlp": "MLP", "forest": "random forest"}
TOKENS = {
    "before the mismatch": ("predicting",),
    "draft's token": ("token",),
    "target's token": ("target_token",),
    "both tokens": ("token", "target_token"),
}


def compare_all(
    states: dict[str, dict[str, torch.Tensor]], y: np.ndarray, parts: Parts, settings: JudgeSettings,
    grid: dict[float, Trained], c: float,
) -> tuple[list[dict[str, Any]], dict[str, tuple[str, dict[str, Any]]]]:  # fmt: skip
    """Fit every variant.

    Args:
        states: of "draft" and "target", every place's states (N, H).
        grid, c: the logistic regressions on the head's own input, and the chosen one.

    Returns: rows {group, input, auroc, auroc_train}, and of each plot by its file name what it compares and its curves.
    """
    place = settings.position
    read: dict[tuple[str, tuple[str, ...]], Trained] = {(settings.model, (place,)): grid[c]}

    def reading(model: str, places: tuple[str, ...]) -> Trained:
        if (model, places) not in read:
            read[model, places] = train(inputs(states, model, places), y, parts, settings, "linear", c)
        return read[model, places]

    x = inputs(states, settings.model, [place])
    groups = {
        "regularisation": {f"C = {c:g}": trained for c, trained in grid.items()},
        "classifier": {name: grid[c] if kind == "linear" else train(x, y, parts, settings, kind)
                       for kind, name in CLASSIFIERS.items()},
        "token": {name: reading(settings.model, places) for name, places in TOKENS.items()},
        "model": {model: reading(model, (place,)) for model in SOURCES},
    }  # fmt: skip
    held = np.concatenate([y[mask] for _, mask in parts])
    rows = [
        {"group": group, "input": name, "auroc": t.auroc, "auroc_train": t.auroc_train}
        for group, variants in groups.items()
        for name, t in variants.items()
    ]
    plots = {
        f"roc_{group}.png": (
            f", by {group}",
            {name: compute_roc(np.concatenate(t.said), held, t.auroc) for name, t in variants.items()},
        )
        for group, variants in groups.items()
    }
    return rows, plots
