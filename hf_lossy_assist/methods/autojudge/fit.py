"""Fit AutoJudge's head to mined mismatches, and say on held-out problems how good it is.

Logistic regression on standardised hidden states, split by problem, its strength of regularisation chosen on held-out
problems (Garipov et al., §3.2 and Appendix B, huggingface.co/papers/2504.20039). The scaler is folded into the weights, so a
head reads raw hidden states.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...artifacts.cards import head_card, write_card
from ...artifacts.features import FeatureSpec
from ...artifacts.files import new_folder
from ...artifacts.head_config import HeadConfig
from ...artifacts.heads import Head
from ...artifacts.sampling_settings import check_decoding, decoding_of
from ...models.identity import ModelIdentity, tokenizer_hash, versions
from ...training.finished import check_entries
from ...validation import check_flag, check_int, shown
from .classifiers import (
    PAPER,
    SOURCES,
    WIDTH,
    JudgeSettings,
    Parts,
    Trained,
    best,
    fit_classifier,
    folded,
    inputs,
    moved,
    scale_of,
    split,
    threshold_table,
    train,
    train_grid,
)
from .hidden_states import PLACES, MinedTable, hidden_states, read_mined


LABEL = "swapping the target's token for the draft's changes the answer"


@dataclass
class JudgeReport:
    """What a fitted judge does on the problems it has not seen."""

    auroc: float  # mean of the folds, if there are any
    brier: float
    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    held_out: int  # mismatches that the figures are of
    held_out_important: int
    threshold: float  # the head's own
    thresholds: list[dict[str, float]]  # threshold, recall, accepted
    c: float | None  # None for an MLP
    curve: list[dict[str, float]]  # C, auroc, auroc_train, of the grid
    unconverged: int  # of the head's own fits, those that ended before they converged
    comparison: list[dict[str, Any]] = field(default_factory=list)  # group, input, auroc, auroc_train

    def at(self, threshold: float) -> tuple[float, float]:
        """(recall of important tokens, share of unimportant ones accepted) at the tabled threshold nearest to `threshold`."""
        row = min(self.thresholds, key=lambda r: abs(r["threshold"] - threshold))
        return row["recall"], row["accepted"]


def check_models(mined: MinedTable, target: Any, draft: Any, tokenizer: Any) -> dict[str, ModelIdentity | None]:
    """Refuse models that the mismatches were not mined with; warn of another id or precision under the same sizes.

    Returns: the models that the data is of; None: a target that was behind a server and is not here. Raises: `ValueError`.
    """
    facts = mined.facts
    missing = [name for name in ("settings", "target", "draft", "tokenizer_hash") if name not in facts]
    if missing:
        raise ValueError(f"the dataset's mine.json does not say its {', '.join(missing)}: mine it again")
    _check_record(facts, Path("mine.json"))
    identities: dict[str, ModelIdentity | None] = {}
    models = {"target": target, "draft": draft}
    for (name, model), dtype in zip(models.items(), facts.get("dtypes") or (None, None), strict=True):
        recorded = ModelIdentity.from_dict(facts[name]) if facts[name] is not None else None
        identities[name] = recorded
        if model is None:
            continue
        given = ModelIdentity.of(model)
        if dtype is not None and dtype != str(model.dtype):
            warnings.warn(
                f"the {name} was in {dtype} when the data was mined and is in {model.dtype} here: a head should be fitted in the "
                "precision it will decode in (--dtype)",
                stacklevel=3,
            )
        if recorded is None:  # mined behind a server, which does not say what it runs
            warnings.warn(
                f"the data was mined with {shown(facts.get('served'))} behind a server, taken to be {given}",
                stacklevel=3,
            )
            identities[name] = given
            continue
        conflict, doubt = recorded.conflict(given), recorded.doubt(given)
        if conflict is not None:
            raise ValueError(
                f"the dataset was mined with the {name} {recorded}, and the {name} here is {given}: {conflict}. "
                "Pass the models it names (--model, --assistant), or mine with these"
            )
        if doubt is not None:
            warnings.warn(f"the dataset's {name} and this {name} may differ: {doubt}", stacklevel=3)
    here = tokenizer_hash(tokenizer)
    if here != facts["tokenizer_hash"]:
        raise ValueError(
            f"the dataset was mined with a tokenizer of hash {facts['tokenizer_hash'][:12]}…, and the tokenizer here has "
            f"{here[:12]}…: pass the models it names (--model), or mine with these"
        )
    return identities


def _check_record(facts: dict[str, Any], where: Path) -> None:
    """Refuse a record that says what no run of `hf-lossy mine` had."""
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
            if facts[name] is not None:  # a target behind a server
                ModelIdentity.from_dict(facts[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}: mine it again") from None


def check_labels(important: np.ndarray, problem: np.ndarray, parts: Parts, mlp: bool) -> None:
    """Refuse data that no classifier can be fitted to, or that no figure can be had from.

    `mlp`: a network is to be fitted too, which stops early on a tenth of its own training rows, of both labels.
    """
    problems = len(np.unique(problem))
    whole = [("the dataset", np.ones_like(important))]
    sides = [
        (f"the {side} problems" + (f" of fold {k}" if len(parts) > 1 else ""), mask)
        for k, part in enumerate(parts)
        for side, mask in zip(("training", "held-out"), part, strict=True)
    ]
    advice = "pass fewer --folds" if len(parts) > 1 else "try --folds 5"
    for name, mask in whole + sides:
        labels = important[mask]
        if labels.all() or not labels.any():
            kind = "important" if labels.all() else "unimportant"
            hint = "" if mask.all() else f", {advice}, or another --seed"
            raise ValueError(
                f"{name}: only {kind} mismatches ({len(labels)} in {len(np.unique(problem[mask]))} of {problems} problems), and "
                f"both kinds are needed: mine more problems{hint}"
            )
    for name, mask in sides:
        labels = important[mask]
        if mlp and name.startswith("the training") and (len(labels) < 20 or min(labels.sum(), (~labels).sum()) < 2):
            raise ValueError(
                f"{name}: {len(labels)} mismatches, {labels.sum()} of them important; an MLP needs 20 and two of each kind: mine "
                "more problems, or fit --head linear without --compare"
            )


# -- the head -----------------------------------------------------------------------------------------------------------


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
    from ...training.plots import roc_curve_of
    from .compare import compare_all

    out = Path(out)
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out, or delete it to fit again")
    mined = read_mined(data)
    identities = check_models(mined, target, draft, tokenizer)
    if target is None and (compare or settings.model != "draft"):
        raise ValueError("without the target only --features draft can be fitted, and nothing compared: pass --model")
    y, problem = mined.important.numpy(), mined.problem.numpy()
    parts = split(problem, settings.folds, settings.seed)
    check_labels(y, problem, parts, mlp=compare or settings.head == "mlp")

    needed = SOURCES["both" if compare else settings.model]
    places = PLACES if compare else (settings.position,)
    models = {"draft": draft, "target": target}
    states = {name: hidden_states(models[name], mined, places, name) for name in needed}
    x = inputs(states, settings.model, [settings.position])

    linear = settings.head == "linear"
    grid = train_grid(x, y, parts, settings) if compare or linear else {}
    c = best(grid) if grid else 1.0
    trained = grid[c] if linear else train(x, y, parts, settings, "mlp")
    config = _config(mined, identities, settings, x.shape[1])
    heads = [folded(pipeline, config) for pipeline in trained.fitted]
    with torch.no_grad():  # what the heads say, not the pipelines they were made of
        said = [head(torch.from_numpy(x[held])).numpy() for head, (_, held) in zip(heads, parts, strict=True)]
    fitted, late = heads[0], 0
    if settings.folds:
        pipeline, late = fit_classifier(x, y, settings.head, c, settings)
        fitted = folded(pipeline, config)
    scales = [scale_of(head, x) for head in (fitted, *heads)]
    aligned = np.concatenate([moved(p, scale, scales[0]) for p, scale in zip(said, scales[1:], strict=True)])
    report = _report(mined, parts, said, aligned, trained, grid, c if linear else None, settings)
    report.unconverged += late
    curve = roc_curve_of(aligned, _held(y, parts), report.auroc)
    plots: dict[str, tuple[str, dict[str, Any]]] = {"roc.png": ("", {settings.head: curve})}
    if compare:
        report.comparison, more = compare_all(states, y, parts, settings, grid, c)
        plots |= more
    fitted.config = _with_figures(config, mined, parts, report, settings)
    folds = heads if settings.folds else []
    for k, head in enumerate(folds):
        held = parts[k][1]
        own = float(moved(np.array([report.threshold]), scales[0], scales[k + 1])[0])
        head.config = _of_fold(fitted.config, k, problem[held], said[k], y[held], own)
    _write(out, fitted, folds, plots)
    return fitted, report


def _write(out: Path, fitted: Head, folds: Sequence[Head], plots: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """The folder: the head, its card, the plots (by file name: what they compare, the curves) and the folds' heads."""
    from ...training.plots import roc_figure

    axes = "unimportant tokens rejected", "important tokens rejected"
    with new_folder(out) as folder:
        for name, (what, curves) in plots.items():
            roc_figure(curves, folder / name, f"ROC of the judge{what}", *axes)
        fitted.write(folder)
        write_card(head_card(fitted.config, plots=list(plots)), folder / "README.md")
        for k, head in enumerate(folds):
            (folder / f"fold-{k}").mkdir()
            head.write(folder / f"fold-{k}")
            write_card(head_card(head.config), folder / f"fold-{k}" / "README.md")
    fitted.source = str(out)


def _held(values: np.ndarray, parts: Parts) -> np.ndarray:
    """The held-out rows' values, part after part."""
    return np.concatenate([values[held] for _, held in parts])


def _report(
    mined: MinedTable, parts: Parts, said: Sequence[np.ndarray], aligned: np.ndarray, trained: Trained,
    grid: dict[float, Trained], c: float | None, settings: JudgeSettings,
) -> JudgeReport:  # fmt: skip
    from sklearn.metrics import roc_auc_score

    y = mined.important.numpy()
    says, held_y = np.concatenate(said), _held(y, parts)
    table, threshold = threshold_table(aligned, held_y, settings.recall)
    return JudgeReport(
        auroc=float(np.mean([roc_auc_score(y[held], s) for s, (_, held) in zip(said, parts, strict=True)])),
        brier=float(np.mean((says.astype(np.float64) - held_y) ** 2)),
        important=float(mined.important.float().mean()),
        problems=len(mined.texts),
        mismatches=len(mined),
        held_out=len(held_y),
        held_out_important=int(held_y.sum()),
        threshold=threshold,
        thresholds=table,
        c=c,
        curve=[{"C": c, "auroc": t.auroc, "auroc_train": t.auroc_train} for c, t in grid.items()],
        unconverged=trained.unconverged,
    )


def _config(
    mined: MinedTable, identities: dict[str, ModelIdentity | None], settings: JudgeSettings, size: int
) -> HeadConfig:
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
        decoding=decoding_of(mine),
        versions=versions() | {"scikit-learn": sklearn.__version__},
    )


def _with_figures(
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
        "auroc": report.auroc,
        "brier": report.brier,
        "important_share": report.important,
        "held_out_mismatches": report.held_out,
        "held_out_important": report.held_out_important,
        "recall_goal": settings.recall,
        "thresholds": report.thresholds,
    }
    if report.comparison:
        metrics["comparison"] = report.comparison
    return dataclasses.replace(config, threshold=report.threshold, training=training, metrics=metrics)


def _of_fold(
    config: HeadConfig, k: int, problem: np.ndarray, said: np.ndarray, y: np.ndarray, threshold: float
) -> HeadConfig:
    """The config of fold k's head, with the problems it has not seen and its own figures on them."""
    from sklearn.metrics import roc_auc_score

    seen = f"all folds but {k}; the figures are of the problems in it, the threshold is that of all folds together, on this head's scale"
    training = config.training | {"split": seen, "held_out_problems": np.unique(problem).tolist()}
    metrics = {
        "auroc": float(roc_auc_score(y, said)),
        "brier": float(np.mean((said.astype(np.float64) - y) ** 2)),
        "held_out_mismatches": len(y),
        "held_out_important": int(y.sum()),
    }
    return dataclasses.replace(config, threshold=threshold, training=training, metrics=metrics)
