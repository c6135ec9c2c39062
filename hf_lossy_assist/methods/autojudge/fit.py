"""Fit AutoJudge's head to mined mismatches, and measure it on held-out problems.

Logistic regression on standardised hidden states, split by problem, with the regularisation strength chosen on held-out problems (Garipov et al.,
§3.2 and Appendix B, huggingface.co/papers/2504.20039). The scaler is folded into the weights, so a head reads raw hidden states.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.conditions import check_decoding, select_sampling
from ...artifacts.features import FeatureSpec
from ...artifacts.files import check_new
from ...artifacts.head import Head
from ...artifacts.head_config import HeadConfig
from ...artifacts.identity import ModelIdentity, check_weights, tokenizer_hash, versions
from ...drafters.hidden_state import DraftModel, HiddenStateDrafter
from ...models.introspection import named_int8
from ...training.head_quality import draw_roc
from ...training.head_training import write_fitted
from ...training.jobs import recorded_weights
from ...training.run_folder import name_unreadable
from ...validation import shown
from .classifiers import (
    PAPER,
    SOURCES,
    JudgeSettings,
    Parts,
    choose_folds,
    fit_classifier,
    fold_pipeline,
    measure_scale,
    rescale,
    split,
    train,
)
from .dataset import RECORD, MinedTable, explain_unsearched, read_mined
from .hidden_states import read_hidden_states
from .report import JudgeReport, make_evidence, make_report


MODELS = "target", "draft"
LABEL = "swapping the target's token for the draft's changes the answer"


def fit_autojudge(
    data: str | Path,
    out: str | Path,
    target: PreTrainedModel | None,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: JudgeSettings = PAPER,
) -> tuple[Head, JudgeReport]:
    """Fit a judge to the dataset `data` of `hf-lossy mine` and write it to the folder `out`.

    Without folds the head is fitted to 90 % of the problems and measured on the rest. With folds it is fitted to all
    problems, and the figures are those of the folds' heads, each on the problems held out from it; these heads are
    saved in `fold-0/`, ….

    Args:
        target, draft, tokenizer: those that the data was mined with; `target` may be None for a head that reads only
            the draft.

    Returns: the head, in evaluation mode, and the report. Raises: `ValueError`, one line.
    """
    check_new(out, "fit again")
    mined = read_mined(data)
    identities = check_models(mined, target, draft, tokenizer)
    if target is None and settings.model != "draft":
        raise ValueError("without the target only --features draft can be fitted: pass --model")
    if isinstance(draft, HiddenStateDrafter) and settings.model != "target":
        raise ValueError(f"of {draft.kind} the judge reads the target's states alone: pass --features target")
    y, problem = mined.important.numpy(), mined.problem.numpy()
    if settings.folds is None:
        settings = replace(settings, folds=choose_folds(problem, y, settings.seed))
    try:
        splits = split(problem, settings.folds or 0, settings.seed, y)
        _check_labels(y, problem, splits)
    except ValueError as error:  # mining more does not help if most of it is cut off
        raise ValueError("; ".join([str(error), *explain_unsearched(mined.facts)])) from None

    models = {"draft": draft, "target": target}
    states = [read_hidden_states(models[name], mined, settings.position, name) for name in SOURCES[settings.model]]
    x = torch.cat(states, dim=1).numpy()
    levels = tqdm(settings.grid, desc="fitting", unit="C", leave=False)
    grid = {c: train(x, y, splits, settings, c) for c in levels}
    c = max(grid, key=lambda c: (grid[c].auroc, -c))  # among equals the smallest, which regularises most
    config = _make_config(mined, identities, settings, x.shape[1])
    heads = [fold_pipeline(pipeline, config) for pipeline in grid[c].fitted]
    with torch.no_grad():  # outputs of the heads, not of the pipelines they were made from
        outputs = [head(torch.from_numpy(x[test])).numpy() for head, (_, test) in zip(heads, splits, strict=True)]
    fitted, late = heads[0], 0
    if settings.folds:
        pipeline, late = fit_classifier(x, y, c, settings)
        fitted = fold_pipeline(pipeline, config)
    scales = [measure_scale(head, x) for head in (fitted, *heads)]
    aligned = np.concatenate([rescale(p, scale, scales[0]) for p, scale in zip(outputs, scales[1:], strict=True)])
    report = make_report(mined, splits, outputs, aligned, grid, c, settings)
    report.unconverged += late
    held_out = np.concatenate([y[test] for _, test in splits])
    axes = "unimportant tokens rejected", "important tokens rejected"
    plots = {"roc.png": draw_roc({"linear": (aligned, held_out, report.auroc)}, "ROC of the judge", *axes)}
    fitted.config = _add_figures(config, mined, splits, report, settings)
    folds = heads if settings.folds else []
    for k, (head, (_, test)) in enumerate(zip(folds, splits, strict=False)):
        threshold = float(rescale(np.array([report.threshold]), scales[0], scales[k + 1])[0])
        head.config = _make_fold_config(fitted.config, k, problem[test], outputs[k], y[test], threshold)
    write_fitted(fitted, out, plots, folds)
    return fitted, report


def check_models(
    mined: MinedTable, target: PreTrainedModel | None, draft: DraftModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, ModelIdentity | None]:
    """Refuse models that the mismatches were not mined with; warn of another id or precision with the same sizes.

    Returns: the models that the data belongs to; None for a target that was behind a server and is not given. Raises: `ValueError`.
    """
    facts = mined.facts
    with name_unreadable(Path(RECORD)):
        check_decoding(facts["settings"])
        dtypes, here = dict(zip(MODELS, facts["dtypes"], strict=True)), tokenizer_hash(tokenizer)
        there: str = facts["tokenizer_hash"]
        identities = {name: facts[name] and ModelIdentity.from_dict(facts[name]) for name in MODELS}
    for name, model in zip(MODELS, (target, draft), strict=True):
        recorded, dtype = identities[name], dtypes[name]
        if model is None:
            continue
        loaded = ModelIdentity.of(model)
        if dtype is not None and dtype != str(model.dtype):
            warnings.warn(
                f"the {name} was in {dtype} when the data was mined and is in {model.dtype} here: a head should be "
                "fitted in the precision it will decode in (--dtype)",
                stacklevel=3,
            )
        if recorded is None:  # mined with a server, which does not identify its model
            served = shown(facts.get("served"))
            warnings.warn(f"the data was mined with {served} behind a server, taken to be {loaded}", stacklevel=3)
            identities[name] = loaded
            continue
        recorded.check(model, name, "the dataset", "mine with these (--model, --assistant)")
        precision = "int8" if named_int8(recorded.id) else str(dtype).removeprefix("torch.")
        weights = facts.get(f"{name}_weights")
        check_weights(weights, precision, model, name, "the dataset was mined", "use the same, or mine again")
    if here != there:
        raise ValueError(
            f"the dataset was mined with a tokenizer of hash {there[:12]}…, and the tokenizer here has "
            f"{here[:12]}…: pass the models it names (--model), or mine with these"
        )
    sizes = [identity.vocab_size for identity in identities.values() if identity is not None]
    mined.check_tokens(sizes[0] if identities["target"] is not None else max(len(tokenizer), *sizes))
    return identities


def _check_labels(important: np.ndarray, problem: np.ndarray, splits: Parts) -> None:
    """Refuse a split with one kind of mismatch on a side: no classifier can be fitted to it, or measured on it."""
    for k, sides in enumerate(splits):
        fold = f" of fold {k}" if len(splits) > 1 else ""
        for side, mask in zip(("training", "held-out"), sides, strict=True):
            labels = important[mask]
            if labels.all() or not labels.any():
                kind, count = "important" if labels.all() else "unimportant", len(np.unique(problem[mask]))
                hint = "pass fewer --folds" if fold else "try --folds 5"
                raise ValueError(
                    f"the {side} problems{fold}: only {kind} mismatches ({len(labels)} in {count} of "
                    f"{len(np.unique(problem))} problems), and both kinds are needed: mine more problems, {hint}, or "
                    "another --seed"
                )


def _make_config(
    mined: MinedTable, identities: dict[str, ModelIdentity | None], settings: JudgeSettings, size: int
) -> HeadConfig:
    """Return the config of a head that reads `size` features, without figures."""
    import sklearn

    return HeadConfig(
        hidden_size=size,
        kind="linear",
        method="autojudge",
        polarity="important",
        label=LABEL,
        features=FeatureSpec(settings.model, settings.position),
        target=identities["target"],
        draft=identities["draft"],
        model_weights=recorded_weights(mined.facts),
        tokenizer_hash=mined.facts["tokenizer_hash"],
        decoding=select_sampling(mined.facts["settings"]),
        versions=versions() | {"scikit-learn": sklearn.__version__},
    )


def _add_figures(
    config: HeadConfig, mined: MinedTable, splits: Parts, report: JudgeReport, settings: JudgeSettings
) -> HeadConfig:
    """Return the config with the head's training and figures."""
    facts, (_, test) = mined.facts, splits[0]
    held_out = [] if settings.folds else np.unique(mined.problem.numpy()[test]).tolist()
    if settings.folds:
        apart = f"{settings.folds} folds by problem; this head saw all, the figures are of the folds' heads on what each did not see"
    else:
        training_problems = report.problems - len(held_out)
        apart = f"{training_problems} problems for training, {len(held_out)} kept aside for C, the threshold and the figures"
    training: dict[str, object] = {
        "prompts": facts.get("source") or "not named",
        "task": facts.get("task") or "not named",
        "problems": f"{facts.get('problems', report.problems)}, {report.problems} of them with a mismatch",
        "mismatches": report.mismatches,
        "labels": "each mismatch swapped alone" if facts["settings"].get("naive") else "semi-greedy search",
        "classifier": f"logistic regression, L2 with C = {report.c:g}, at most {settings.max_iter} steps",
        "C": report.c,
        "split": apart,
        "seed": settings.seed,
        "held_out_problems": held_out,
    }
    metrics: dict[str, object] = {
        **report.evidence.metrics(),
        "brier": report.brier,
        "important_share": report.important,
        "held_out_mismatches": report.held_out,
        "recall_goal": settings.recall,
        "thresholds": report.thresholds,
    }
    return replace(config, threshold=report.threshold, training=training, metrics=metrics)


def _make_fold_config(
    config: HeadConfig, k: int, problem: np.ndarray, outputs: np.ndarray, y: np.ndarray, threshold: float
) -> HeadConfig:
    """Return the config of fold k's head, with its held-out problems and its figures on them."""
    seen = f"all folds but {k}; the figures are of the problems in it, the threshold is that of all folds together, on this head's scale"
    training = config.training | {"split": seen, "held_out_problems": np.unique(problem).tolist()}
    metrics = {
        **make_evidence([outputs], y, problem).metrics(),
        "brier": float(np.mean((outputs.astype(np.float64) - y) ** 2)),
        "held_out_mismatches": len(y),
    }
    return replace(config, threshold=threshold, training=training, metrics=metrics)
