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
from ...artifacts.json_io import JSONObject
from ...drafters.hidden_state import DraftModel, HiddenStateDrafter
from ...models.introspection import named_int8
from ...training.charts import draw_roc
from ...training.finished_dataset import check_entries
from ...training.head_quality import CURVES, compute_curves
from ...training.head_training import write_fitted
from ...training.jobs import recorded_weights
from ...validation import check_flag, check_int, shown
from .classifiers import (
    PAPER,
    SOURCES,
    WIDTH,
    JudgeSettings,
    Parts,
    choose_folds,
    fit_classifier,
    fold_pipeline,
    make_inputs,
    measure_scale,
    rescale,
    split,
    train,
)
from .dataset import RECORD, MinedTable, explain_unsearched, read_mined
from .hidden_states import PLACES, read_hidden_states
from .report import JudgeReport, compare_variants, make_evidence, make_report


LABEL = "swapping the target's token for the draft's changes the answer"


def fit_autojudge(
    data: str | Path,
    out: str | Path,
    target: PreTrainedModel | None,
    draft: DraftModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: JudgeSettings = PAPER,
    compare: bool = False,
) -> tuple[Head, JudgeReport]:
    """Fit a judge to the dataset `data` of `hf-lossy mine` and write it to the folder `out`.

    Without folds the head is fitted to 90 % of the problems and measured on the rest. With folds it is fitted to all problems, and the figures are
    those of the folds' heads, each on the problems held out from it; these heads are saved in `fold-0/`, ….

    Args:
        target, draft, tokenizer: those that the data was mined with; `target` may be None for a head that reads only the draft.
        compare: also fit the paper's other classifiers and inputs (Figures 6 and 7), and add their table and plots.

    Returns: the head, in evaluation mode, and the report. Raises: `ValueError`, one line.
    """
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
    if settings.folds is None:
        settings = replace(settings, folds=choose_folds(problem, y, settings.seed))
    try:
        parts = split(problem, settings.folds or 0, settings.seed, y)
        _check_labels(y, problem, parts, mlp=compare or settings.head == "mlp")
    except ValueError as error:  # mining more does not help if most of it is cut off
        raise ValueError("; ".join([str(error), *explain_unsearched(mined.facts)])) from None

    models, places = {"draft": draft, "target": target}, PLACES if compare else (settings.position,)
    needed = SOURCES["both" if compare else settings.model]
    states = {name: read_hidden_states(models[name], mined, places, name) for name in needed}
    x = make_inputs(states, settings.model, [settings.position])

    linear = settings.head == "linear"
    levels = tqdm(settings.grid if compare or linear else (), desc="fitting", unit="C", leave=False)
    grid = {c: train(x, y, parts, settings, "linear", c) for c in levels}
    # Among equals the smallest, which regularises most.
    c = max(grid, key=lambda c: (grid[c].auroc, -c)) if grid else 1.0
    trained = grid[c] if linear else train(x, y, parts, settings, "mlp")
    config = _make_config(mined, identities, settings, x.shape[1])
    heads = [fold_pipeline(pipeline, config) for pipeline in trained.fitted]
    with torch.no_grad():  # outputs of the heads, not of the pipelines they were made from
        outputs = [head(torch.from_numpy(x[held])).numpy() for head, (_, held) in zip(heads, parts, strict=True)]
    fitted, late = heads[0], 0
    if settings.folds:
        pipeline, late = fit_classifier(x, y, settings.head, c, settings)
        fitted = fold_pipeline(pipeline, config)
    scales = [measure_scale(head, x) for head in (fitted, *heads)]
    aligned = np.concatenate([rescale(p, scale, scales[0]) for p, scale in zip(outputs, scales[1:], strict=True)])
    report = make_report(mined, parts, outputs, aligned, trained, grid, c if linear else None, settings)
    report.unconverged += late
    held_y = np.concatenate([y[held] for _, held in parts])
    axes = "unimportant tokens rejected", "important tokens rejected"
    plots = {"roc.png": draw_roc({settings.head: (*report.curves.rates(), report.auroc)}, "ROC of the judge", *axes)}
    if compare:
        for group, variants in compare_variants(states, y, problem, parts, settings, grid, c).items():
            report.comparison += [
                {"group": group, "input": name, "auroc": t.auroc, "auroc_train": t.auroc_train}
                for name, t in variants.items()
            ]
            found = {name: np.concatenate(t.outputs) for name, t in variants.items()}
            curves = {name: (*compute_curves(p, p, held_y).rates(), variants[name].auroc) for name, p in found.items()}
            plots[f"roc_{group}.png"] = draw_roc(curves, f"ROC of the judge, by {group}", *axes)
    fitted.config = _add_figures(config, mined, parts, report, settings)
    folds = heads if settings.folds else []
    for k, (head, (_, held)) in enumerate(zip(folds, parts, strict=False)):
        threshold = float(rescale(np.array([report.threshold]), scales[0], scales[k + 1])[0])
        head.config = _make_fold_config(fitted.config, k, problem[held], outputs[k], y[held], threshold)
    write_fitted(fitted, out, plots, folds)
    return fitted, report


def check_models(
    mined: MinedTable, target: PreTrainedModel | None, draft: DraftModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, ModelIdentity | None]:
    """Refuse models that the mismatches were not mined with; warn of another id or precision with the same sizes.

    Returns: the models that the data belongs to; None for a target that was behind a server and is not given. Raises: `ValueError`.
    """
    facts = mined.facts
    _check_record(facts, Path(RECORD))
    identities: dict[str, ModelIdentity | None] = {}
    for name, model, dtype in zip(("target", "draft"), (target, draft), facts["dtypes"], strict=True):
        recorded = identities[name] = ModelIdentity.from_dict(facts[name]) if facts[name] is not None else None
        if model is None:
            continue
        given = ModelIdentity.of(model)
        if dtype is not None and dtype != str(model.dtype):
            warnings.warn(
                f"the {name} was in {dtype} when the data was mined and is in {model.dtype} here: a head should be fitted in the "
                "precision it will decode in (--dtype)",
                stacklevel=3,
            )
        if recorded is None:  # mined with a server, which does not identify its model
            served = shown(facts.get("served"))
            warnings.warn(f"the data was mined with {served} behind a server, taken to be {given}", stacklevel=3)
            identities[name] = given
            continue
        instead = "Pass the models it names (--model, --assistant), or mine with these"
        recorded.check(given, name, "the dataset", "the dataset was mined", instead)
        precision = "int8" if named_int8(recorded.id) else str(dtype).removeprefix("torch.")
        weights = facts.get(f"{name}_weights")
        check_weights(weights, precision, model, name, "the dataset was mined", "use the same, or mine again")
    there, here = facts["tokenizer_hash"], tokenizer_hash(tokenizer)
    if here != there:
        raise ValueError(
            f"the dataset was mined with a tokenizer of hash {there[:12]}…, and the tokenizer here has "
            f"{here[:12]}…: pass the models it names (--model), or mine with these"
        )
    sizes = [identity.vocab_size for identity in identities.values() if identity is not None]
    mined.check_tokens(sizes[0] if identities["target"] is not None else max(len(tokenizer), *sizes), "the dataset")
    return identities


def _check_record(facts: JSONObject, where: Path) -> None:
    """Refuse a record that was not written by `hf-lossy mine`."""
    missing = [name for name in ("settings", "target", "draft", "tokenizer_hash") if name not in facts]
    if missing:
        raise ValueError(f"the dataset's {where} does not say its {', '.join(missing)}: mine it again")
    objects = dict.fromkeys(("settings", "draft", "versions"), dict)
    texts = dict.fromkeys(("task", "source", "tokenizer_hash"), str)
    check_entries(facts, objects | texts | {"problems": int, "dtypes": list}, where)
    try:
        check_int("problems", facts["problems"], 1)
        check_decoding(facts["settings"])
        check_flag("naive", facts["settings"].get("naive", False))
        if len(facts["dtypes"]) != 2 or not all(dtype is None or isinstance(dtype, str) for dtype in facts["dtypes"]):
            raise ValueError(f"dtypes: expected those of the target and the draft, got {shown(facts['dtypes'])}")
        for name in ("target", "draft"):
            if facts[name] is not None:  # None: a target behind a server
                ModelIdentity.from_dict(facts[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}: mine it again") from None


def _check_labels(important: np.ndarray, problem: np.ndarray, parts: Parts, mlp: bool) -> None:
    """Refuse data to which no classifier can be fitted, or on which none can be measured.

    `mlp`: an MLP is fitted too; its early stopping holds out a tenth of its training rows, with both labels.
    """
    several = len(parts) > 1
    sides = [("the dataset", np.ones_like(important))] + [
        (f"the {side} problems" + (f" of fold {k}" if several else ""), mask)
        for k, part in enumerate(parts)
        for side, mask in zip(("training", "held-out"), part, strict=True)
    ]
    for name, mask in sides:
        labels = important[mask]
        if labels.all() or not labels.any():
            kind, count = "important" if labels.all() else "unimportant", len(np.unique(problem[mask]))
            hint = "" if mask.all() else f", {'pass fewer --folds' if several else 'try --folds 5'}, or another --seed"
            raise ValueError(
                f"{name}: only {kind} mismatches ({len(labels)} in {count} of {len(np.unique(problem))} problems), and "
                f"both kinds are needed: mine more problems{hint}"
            )
    for name, mask in sides:
        labels = important[mask]
        if mlp and name.startswith("the training") and (len(labels) < 20 or min(labels.sum(), (~labels).sum()) < 2):
            raise ValueError(
                f"{name}: {len(labels)} mismatches, {labels.sum()} of them important; an MLP needs 20 and two of each kind: mine "
                "more problems, or fit --head linear without --compare"
            )


def _make_config(
    mined: MinedTable, identities: dict[str, ModelIdentity | None], settings: JudgeSettings, size: int
) -> HeadConfig:
    """Return the config of a head that reads `size` features, without figures."""
    import sklearn

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
        model_weights=recorded_weights(mined.facts),
        tokenizer_hash=mined.facts["tokenizer_hash"],
        decoding=select_sampling(mined.facts["settings"]),
        versions=versions() | {"scikit-learn": sklearn.__version__},
    )


def _add_figures(
    config: HeadConfig, mined: MinedTable, parts: Parts, report: JudgeReport, settings: JudgeSettings
) -> HeadConfig:
    """Return the config with the head's training and figures."""
    facts, (_, held) = mined.facts, parts[0]
    held_out = [] if settings.folds else np.unique(mined.problem.numpy()[held]).tolist()
    if settings.folds:
        apart = f"{settings.folds} folds by problem; this head saw all, the figures are of the folds' heads on what each did not see"
    else:
        use = ("C, " if report.c is not None else "") + "the threshold and the figures"
        apart = f"{report.problems - len(held_out)} problems for training, {len(held_out)} kept aside for {use}"
    classifier = f"MLP of {WIDTH} hidden units, stopped early"
    if report.c is not None:
        classifier = f"logistic regression, L2 with C = {report.c:g}, at most {settings.max_iter} steps"
    training: dict[str, object] = {
        "prompts": facts.get("source") or "not named",
        "task": facts.get("task") or "not named",
        "problems": f"{facts.get('problems', report.problems)}, {report.problems} of them with a mismatch",
        "mismatches": report.mismatches,
        "labels": "each mismatch swapped alone" if facts["settings"].get("naive") else "semi-greedy search",
        "classifier": classifier,
        **({"C": report.c} if report.c is not None else {}),
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
        CURVES: report.curves.to_dict(),
        **({"comparison": report.comparison} if report.comparison else {}),
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
        CURVES: compute_curves(outputs, outputs, y).to_dict(),
    }
    return replace(config, threshold=threshold, training=training, metrics=metrics)
