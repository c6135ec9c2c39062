"""Fit AutoJudge's head to mined mismatches, and measure it on held-out problems.

Logistic regression on standardised hidden states, split by problem, with the regularisation strength chosen on held-out problems (Garipov et al.,
§3.2 and Appendix B, huggingface.co/papers/2504.20039). The scaler is folded into the weights, so a head reads raw hidden states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...artifacts.conditions import check_sampling, select_sampling
from ...artifacts.features import FeatureSpec, FeatureTap
from ...artifacts.files import check_new
from ...artifacts.head import Head, HeadConfig
from ...artifacts.identity import ModelIdentity, check_tokenizer, versions
from ...models.introspection import vocabulary_of
from ...stats.intervals import auroc
from ...training.head_training import Evidence, HeadReport, add_intervals
from ...training.jobs import check_models, recorded_weights
from ...training.run_folder import name_unreadable
from .classifiers import (
    FOLDS,
    PAPER,
    JudgeSettings,
    Splits,
    choose_folds,
    fit_classifier,
    fit_splits,
    fold_pipeline,
    measure_scale,
    rescale,
    split,
    tabulate_thresholds,
)
from .dataset import RECORD, MinedTable, explain_unsearched, read_mined
from .draft_predictions import PrefixReader


LABEL = "swapping the target's token for the draft's changes the answer"


@dataclass
class JudgeReport(HeadReport):
    """The figures of a fitted judge on held-out problems; rows of `thresholds` have recall and accepted."""

    important: float  # share of all mismatches
    problems: int  # with at least one mismatch
    mismatches: int
    threshold: float  # the head's default
    c: float
    folds: int  # 0: one split
    unconverged: int  # fits of the head that did not converge


def fit_autojudge(
    data: str | Path,
    out: str | Path,
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: JudgeSettings = PAPER,
) -> tuple[Head, JudgeReport]:
    """Fit a judge to the dataset `data` of `hf-lossy mine` and write it to the folder `out`.

    Without folds the head is fitted to 90 % of the problems and measured on the rest. With folds it is fitted to all
    problems, and the figures are those of the folds' heads, each on the problems held out from it.

    Args:
        target, draft, tokenizer: those that the data was mined with.

    Returns: the head, in evaluation mode, and the report. Raises: `ValueError`, one line.
    """
    check_new(out, "fit again")
    mined = read_mined(data)
    models = {"target": target, "draft": draft}
    identities = _check_models(mined, models, tokenizer)
    y, problem = mined.important.numpy(), mined.problem.numpy()
    if settings.folds is None:
        settings = replace(settings, folds=choose_folds(problem, y, settings.seed))
    try:
        splits = split(problem, settings.folds or 0, settings.seed, y)
        _check_labels(y, splits)
    except ValueError as error:  # mining more does not help if most of it is cut off
        raise ValueError("; ".join([str(error), *explain_unsearched(mined.facts)])) from None

    sources = [name for name in ("draft", "target") if settings.features.reads(name)]  # in the order of concatenation
    states = [read_hidden_states(models[name], mined, settings.position, name) for name in sources]
    x = torch.cat(states, dim=1).numpy()
    levels = tqdm(settings.grid, desc="fitting", unit="C", leave=False)
    grid = {c: fit_splits(x, y, splits, c, settings) for c in levels}
    c = max(grid, key=lambda c: (grid[c][1], -c))  # among equals the smallest, which regularises most
    pipelines = [*grid[c][0], *([fit_classifier(x, y, c, settings)] if settings.folds else [])]
    config = _make_config(mined, identities, settings, x.shape[1])
    heads = [fold_pipeline(pipeline, config) for pipeline in pipelines]
    held_out, fitted = HeldOut.read(heads, x, splits), heads[-1]
    unconverged = sum(int(pipeline[-1].n_iter_[0]) >= settings.max_iter for pipeline in pipelines)
    report = _make_report(mined, held_out, c, settings, unconverged)
    fitted.config = _add_figures(config, mined, held_out, report, settings)
    fitted.save_pretrained(out)
    return fitted, report


@torch.no_grad()
def read_hidden_states(
    model: PreTrainedModel, mined: MinedTable, position: str = "token", name: str = "model"
) -> torch.Tensor:
    """Read the last hidden states (after the final norm) for every mismatch, in the order of the rows.

    A text is read once, and each of the draft's tokens after it by a copy of the row, as in decoding. In half precision a draft's states differ
    slightly between the two (the paper's Appendix C): there a head on the target alone is the safe choice.

    Args:
        position: "predicting" for the state at position t − 1, from whose logits the token at t is drawn; "token" for
            the state at t that encodes the draft's token.
        name: the model's role, for the progress bar.

    Returns: (N, H) float32 on the CPU.
    """
    longest = max(len(prompt) + len(response) for prompt, response in mined.texts.values())
    states: dict[int, torch.Tensor] = {}
    with FeatureTap(model, FeatureSpec("target")) as tap:
        reader = PrefixReader(model, longest, max(mined.find_tokens()) + 1)
        problems = tqdm(mined.by_problem(), desc=f"states of the {name}", total=len(mined.texts), unit="problem")
        for problem, rows in problems:
            prompt, response = mined.texts[problem]
            for row in rows[mined.position[rows].argsort()].tolist():
                t, token = int(mined.position[row]), int(mined.draft_token[row])
                inside = position == "token" and response[t] == token  # read with the text
                text = reader.read(prompt + response[: t + inside], len(prompt))
                if position == "token" and not inside:
                    text.copy().feed(torch.tensor([[token]]), [1])
                states[row] = tap.latest[0, -1].float().cpu()
    return torch.stack([states[row] for row in range(len(mined))])


@dataclass(frozen=True)
class HeldOut:
    """Outputs of heads on the rows held out from each, (n,), part by part."""

    rows: np.ndarray  # int64   of the dataset
    fold: np.ndarray  # int64   the part
    p: np.ndarray  # on each head's scale
    aligned: np.ndarray  # on the last head's, which is saved

    @classmethod
    @torch.no_grad()
    def read(cls, heads: Sequence[Head], x: np.ndarray, splits: Splits) -> "HeldOut":
        """Return the outputs of heads, not of the pipelines they were made from: one for each part, and last the one that is saved."""
        tests, scales = [np.flatnonzero(test) for _, test in splits], [measure_scale(head, x) for head in heads]
        outputs = [head(torch.from_numpy(x[test])).numpy() for head, test in zip(heads, tests, strict=False)]
        aligned = [rescale(p, scale, scales[-1]) for p, scale in zip(outputs, scales, strict=False)]
        fold = np.repeat(np.arange(len(tests)), [len(test) for test in tests])
        return cls(np.concatenate(tests), fold, np.concatenate(outputs), np.concatenate(aligned))


def _check_models(
    mined: MinedTable, models: dict[str, PreTrainedModel], tokenizer: PreTrainedTokenizerBase
) -> dict[str, ModelIdentity]:
    """Refuse models that the mismatches were not mined with, and tokens that they lack; return their identities."""
    facts, instead = mined.facts, "mine with these (--model, --assistant)"
    with name_unreadable(Path(RECORD)):
        check_sampling(facts["settings"])
        recorded = str(facts["tokenizer_hash"])
        identities = {name: ModelIdentity.from_dict(facts[name]) for name in models}
    check_models(facts, models, "the dataset", instead)
    check_tokenizer(tokenizer, recorded, "the dataset", instead)
    vocabulary = vocabulary_of(models["target"])
    for token in mined.find_tokens():
        if not 0 <= token < vocabulary:
            raise ValueError(f"the dataset has the token id {token}, expected 0 to {vocabulary - 1}: mine it again")
    return identities


def _check_labels(important: np.ndarray, splits: Splits) -> None:
    """Refuse a split with one kind of mismatch on a side: no classifier can be fitted to it, or measured on it."""
    for labels in (important[mask] for sides in splits for mask in sides):
        if labels.all() or not labels.any():
            kind = "important" if labels.all() else "unimportant"
            raise ValueError(
                f"one side of the split has only {kind} mismatches ({len(labels)} of {len(important)}), and both kinds are needed: mine "
                f"more problems, try other --folds ({FOLDS}), or another --seed"
            )


def _make_config(
    mined: MinedTable, identities: dict[str, ModelIdentity], settings: JudgeSettings, size: int
) -> HeadConfig:
    """Return the config of a head that reads `size` features, without figures."""
    import sklearn

    return HeadConfig(
        hidden_size=size,
        kind="linear",
        method="autojudge",
        polarity="important",
        label=LABEL,
        features=settings.features,
        target=identities["target"],
        draft=identities["draft"],
        model_weights=recorded_weights(mined.facts),
        tokenizer_hash=mined.facts["tokenizer_hash"],
        decoding=select_sampling(mined.facts["settings"]),
        versions=versions() | {"scikit-learn": sklearn.__version__},
    )


def _make_report(
    mined: MinedTable, held_out: HeldOut, c: float, settings: JudgeSettings, unconverged: int
) -> JudgeReport:
    """Compute the figures of the heads' outputs on the rows held out from them."""
    y, problem = mined.important.numpy()[held_out.rows], mined.problem.numpy()[held_out.rows]
    table, threshold = tabulate_thresholds(held_out.aligned, y, settings.recall)
    counts = {"important": int(y.sum()), "unimportant": int((~y).sum())}
    longer = "mine more problems, or longer answers (hf-lossy mine --limit, --max-new-tokens)"
    more = longer if settings.folds else f"{longer}, or hold each problem out once (--folds {FOLDS})"
    return JudgeReport(
        evidence=Evidence(
            auroc=auroc(held_out.p, y, problem, held_out.fold),
            texts=len(np.unique(problem)),
            unit="problem",
            counts=counts,
            missing=dict.fromkeys(counts, more),
        ),
        brier=float(np.mean((held_out.p.astype(np.float64) - y) ** 2)),
        important=float(mined.important.float().mean()),
        problems=len(mined.texts),
        mismatches=len(mined),
        threshold=threshold,
        thresholds=add_intervals(table, {"recall": counts["important"], "accepted": counts["unimportant"]}),
        c=c,
        folds=settings.folds or 0,
        unconverged=unconverged,
    )


def _add_figures(
    config: HeadConfig, mined: MinedTable, held_out: HeldOut, report: JudgeReport, settings: JudgeSettings
) -> HeadConfig:
    """Return the config with the head's training and figures."""
    facts = mined.facts
    problems = [] if settings.folds else np.unique(mined.problem.numpy()[held_out.rows]).tolist()
    apart = f"{report.problems - len(problems)} problems for training, {len(problems)} kept aside for C, the threshold and the figures"
    if settings.folds:
        apart = f"{settings.folds} folds by problem; this head saw all, the figures are of the folds' heads on what each did not see"
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
        "held_out_problems": problems,
    }
    figures = {
        "important_share": report.important,
        "held_out_mismatches": len(held_out.rows),
        "recall_goal": settings.recall,
    }
    return replace(config, threshold=report.threshold, training=training, metrics=report.metrics() | figures)
