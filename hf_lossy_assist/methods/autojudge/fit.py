"""Fit AutoJudge's head to mined mismatches, and say on held-out problems how good it is.

Logistic regression on standardised hidden states, split by problem, its strength of regularisation chosen on held-out
problems (Garipov et al., §3.2 and Appendix B, huggingface.co/papers/2504.20039). The scaler is folded into the weights, so a
head reads raw hidden states.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...artifacts.cards import head_card, write_card
from ...artifacts.files import check_new, new_folder
from ...artifacts.head import Head
from ...drafters.hidden_state import HiddenStateDrafter
from .classifiers import (
    PAPER,
    SOURCES,
    JudgeSettings,
    best,
    fit_classifier,
    folded,
    inputs,
    moved,
    scale_of,
    train,
    train_grid,
)
from .fit_checks import check_labels, check_models
from .hidden_states import PLACES, MinedTable, hidden_states, read_mined
from .judge_config import config_of, of_fold, with_figures
from .mined import unsearched
from .report import JudgeReport, held_rows, report_of
from .splits import Parts, folds_for, split


def fit_autojudge(
    data: str | Path, out: str | Path, target: Any, draft: Any, tokenizer: Any,
    settings: JudgeSettings = PAPER, compare: bool = False,
) -> tuple[Head, JudgeReport]:  # fmt: skip
    """Fit a judge to the dataset `data` of `hf-lossy mine` and write it to the folder `out`.

    Without folds the head is the one fitted to 90 % of the problems, so its figures are its own. With folds it is fitted to
    all; its figures are those of the folds' heads, each on the problems it has not seen, and these heads lie in `fold-0/`, ….

    Args:
        target, draft, tokenizer: those that the data was mined with; `target` may be None for a head that reads the draft alone.
        compare: also fit the paper's other classifiers and inputs (Figures 6 and 7), and put the table and plots beside it.

    Returns: the head, in evaluation mode, and the report. Raises: `ValueError`, one line.
    """
    from ...training.charts import compute_roc
    from .compare import compare_all

    out = Path(out)
    check_new(out, "fit again")
    mined = read_mined(data)
    identities = check_models(mined, target, draft, tokenizer)
    if target is None and (compare or settings.model != "draft"):
        raise ValueError("without the target only --features draft can be fitted, and nothing compared: pass --model")
    if isinstance(draft, HiddenStateDrafter) and (compare or settings.model != "target"):
        raise ValueError(
            f"of {draft.kind} the judge reads the target's states alone: pass --features target, without --compare"
        )
    y, problem = mined.important.numpy(), mined.problem.numpy()
    folded_by = folds_for(problem, y, settings.seed) if settings.folds is None else settings.folds
    settings = replace(settings, folds=folded_by)
    parts = _parts(mined, y, problem, settings, mlp=compare or settings.head == "mlp")

    needed = SOURCES["both" if compare else settings.model]
    places = PLACES if compare else (settings.position,)
    models = {"draft": draft, "target": target}
    states = {name: hidden_states(models[name], mined, places, name) for name in needed}
    x = inputs(states, settings.model, [settings.position])

    linear = settings.head == "linear"
    grid = train_grid(x, y, parts, settings) if compare or linear else {}
    c = best(grid) if grid else 1.0
    trained = grid[c] if linear else train(x, y, parts, settings, "mlp")
    config = config_of(mined, identities, settings, x.shape[1])
    heads = [folded(pipeline, config) for pipeline in trained.fitted]
    with torch.no_grad():  # what the heads say, not the pipelines they were made of
        said = [head(torch.from_numpy(x[held])).numpy() for head, (_, held) in zip(heads, parts, strict=True)]
    fitted, late = heads[0], 0
    if settings.folds:
        pipeline, late = fit_classifier(x, y, settings.head, c, settings)
        fitted = folded(pipeline, config)
    scales = [scale_of(head, x) for head in (fitted, *heads)]
    aligned = np.concatenate([moved(p, scale, scales[0]) for p, scale in zip(said, scales[1:], strict=True)])
    report = report_of(mined, parts, said, aligned, trained, grid, c if linear else None, settings)
    report.unconverged += late
    curve = compute_roc(aligned, held_rows(y, parts), report.auroc)
    plots: dict[str, tuple[str, dict[str, Any]]] = {"roc.png": ("", {settings.head: curve})}
    if compare:
        report.comparison, more = compare_all(states, y, parts, settings, grid, c)
        plots |= more
    fitted.config = with_figures(config, mined, parts, report, settings)
    folds = heads if settings.folds else []
    for k, head in enumerate(folds):
        held = parts[k][1]
        own = float(moved(np.array([report.threshold]), scales[0], scales[k + 1])[0])
        head.config = of_fold(fitted.config, k, problem[held], said[k], y[held], own)
    _write(out, fitted, folds, plots)
    return fitted, report


def _parts(mined: MinedTable, y: np.ndarray, problem: np.ndarray, settings: JudgeSettings, mlp: bool) -> Parts:
    """The parts that the problems are split into; what is too little is refused, with what was left unsearched."""
    try:
        parts = split(problem, settings.folds or 0, settings.seed, y)
        check_labels(y, problem, parts, mlp=mlp)
    except ValueError as error:  # to mine more is no help where most of it is cut off
        raise ValueError("; ".join([str(error), *unsearched(mined.facts)])) from None
    return parts


def _write(out: Path, fitted: Head, folds: Sequence[Head], plots: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """The folder: the head, its card, the plots (by file name: what they compare, the curves) and the folds' heads."""
    from ...training.charts import draw_roc, save_figure

    axes = "unimportant tokens rejected", "important tokens rejected"
    with new_folder(out) as folder:
        for name, (what, curves) in plots.items():
            save_figure(draw_roc(curves, f"ROC of the judge{what}", *axes), folder / name)
        fitted.write(folder)
        write_card(head_card(fitted.config, plots=list(plots)), folder / "README.md")
        for k, head in enumerate(folds):
            (folder / f"fold-{k}").mkdir()
            head.write(folder / f"fold-{k}")
            write_card(head_card(head.config), folder / f"fold-{k}" / "README.md")
    fitted.source = str(out)
