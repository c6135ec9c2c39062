"""`hf-lossy fit`: train SPRINTER's verifier, AutoJudge's classifier, SpecDec++'s head or an EAGLE-3 or DSpark drafter on collected data."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import methods, training
from ..artifacts.files import check_new
from ..methods.drafter_settings import DrafterFitSettings, DSparkFitSettings
from ..terminal import console, show, table
from ..validation import require
from . import _options
from ._models import load_alone, load_models
from ._runs import check_out


if TYPE_CHECKING:
    from ..training.head_training import Evidence

SHOWN = 8  # rows in the table of thresholds
CollectedStates = Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for eagle3` wrote")]
FITTING = "datasets", "sklearn", "matplotlib", "jinja2"


@_options.command
def fit_sprinter_command(
    *,
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect` wrote")],
    out: _options.Out,
    lam: Annotated[
        list[float] | None, "--lambda", "λ to try; repeatable; the head for the dataset's own λ is saved"
    ] = None,
    head: Annotated[str, "shape of the head: linear or mlp"] = "linear",
    width: _options.Width = 64,
    balance: Annotated[bool, "weight both labels equally in the loss"] = True,
    seed: _options.FitSeed = 0,
) -> None:
    """Train SPRINTER's verifier, and report its quality on held-out prompts.

    Example:

      hf-lossy fit sprinter data --out head --head mlp --lambda 1 --lambda 1.2 --lambda 1.5
    """
    require("this command", *FITTING)
    settings = training.head_training.HeadFitSettings(kind=head, width=width, balance=balance, seed=seed)
    fitted, reports = methods.fit_sprinter(data, out, lam or (), settings)
    rates = [(r.row_at(0.5)["eta_tp"], r.row_at(0.5)["eta_fp"]) for r in reports]
    rows = [(r.lam, r.auroc, r.brier, r.acceptance, *rate) for r, rate in zip(reports, rates, strict=True)]
    show_figures(("λ", "AUROC", "Brier", "acceptable", "η_TP", "η_FP"), rows)
    show(
        "AUROC (1: all ranked right, 0.5: chance) on held-out prompts; Brier: squared error of the probability;\n"
        "η_TP and η_FP: acceptable and unacceptable tokens taken for acceptable, at τ = 0.5\n"
    )
    same = len(reports) > 1 and not fitted.config.decoding.get("do_sample")
    note = "; greedy distributions are 0 or 1, so every λ ≥ 1 gives the same labels" if same else ""
    which = ", the one of `collect` or else the first," if len(reports) > 1 else ","
    saved = next(r for r in reports if r.lam == fitted.config.lam)
    show(f"{out}: the head for λ = {saved.lam:g}{which} with its card{note}; {saved.evidence}")
    show_evidence(saved.evidence, f"hf-lossy compare --policies svip,sprinter:head={out}")


@_options.command
def fit_specdec_command(
    *,
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for specdec` wrote")],
    out: _options.Out,
    head: Annotated[str, "shape of the head: linear or mlp"] = "mlp",
    width: _options.Width = 64,
    weight: Annotated[float, (1e-3, 1e3), "weight of a rejection in the loss; an acceptance weighs 1"] = 6.0,
    seed: _options.FitSeed = 0,
) -> None:
    """Train SpecDec++'s acceptance head, and report its quality on held-out prompts.

    Example:

      hf-lossy fit specdec data --out head --width 64 --weight 6
    """
    require("this command", *FITTING)
    settings = training.head_training.HeadFitSettings(kind=head, width=width, seed=seed)
    fitted, report = methods.fit_specdec(data, out, settings, weight=weight)
    show(
        f"{out}: a {head} head on the {fitted.config.features}; {report.evidence}, Brier {report.brier:.4f}, "
        f"KL {report.kl:.4f}; {report.acceptance:.1%} of the drafted tokens are accepted"
    )
    policy = json.dumps({"stop": {"name": "specdec", "head": str(out)}})
    show_evidence(report.evidence, f"hf-lossy generate --policy '{policy}'")


@_options.command
def fit_autojudge_command(
    *,
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy mine` wrote")],
    out: _options.Out,
    models: _options.ModelOptions,
    features: Annotated[str, "hidden states that the head reads: of draft, target or both"] = "both",
    position: Annotated[
        str, "position of the state: token (the drafted token) or predicting (the one before)"
    ] = "token",
    folds: Annotated[
        int | None,
        "folds by problem for the figures; 0 for one 90/10 split (default: 5 where that holds out fewer than 50 "
        "important tokens)",
    ] = None,
    recall: Annotated[float, "share of important tokens that the head's threshold must reject"] = 0.9,
    seed: _options.FitSeed = 0,
    dtype: _options.DType = "float32",
    device: _options.Device = "auto",
) -> None:
    """Train AutoJudge's classifier on mined mismatches, and report its quality on held-out problems.

    Examples:

      hf-lossy fit autojudge mined --out judge

      hf-lossy fit autojudge mined --out judge --features target --folds 5
    """
    require("this command", *FITTING)
    models.check_learnable(drafters=False)
    check_new(out, "fit again")  # before models are loaded
    settings = methods.JudgeSettings(model=features, position=position, recall=recall, folds=folds, seed=seed)
    target, draft, tokenizer = load_models(models, _options.LoadOptions(dtype=dtype, device=device))
    fitted, report = methods.fit_autojudge(data, out, target, draft, tokenizer, settings)
    names, step = ("threshold", "recall", "accepted"), max(1, len(report.thresholds) // SHOWN)
    rows = [tuple(row[name] for name in names) for row in report.thresholds]
    few = [row for i, row in enumerate(rows) if i % step == 0 or row[0] == report.threshold]
    show_figures(("threshold", "important rejected", "unimportant accepted"), few)
    source = f"out of {report.folds} folds" if report.folds else "held out"
    counts, share, row = report.evidence.counts, training.head_training.format_share, report.row_at(report.threshold)
    show(
        f"{sum(counts.values())} mismatches {source}, {counts['important']} important; in all {report.mismatches} of "
        f"{report.problems} problems, {report.important:.1%} important\n"
    )
    late = f"; {report.unconverged} fits ended before they converged" if report.unconverged else ""
    rejected = share(round(row["recall"] * counts["important"]), counts["important"])
    accepted = share(round(row["accepted"] * counts["unimportant"]), counts["unimportant"])
    show(
        f"{out}: a linear head on the {fitted.config.features}, C = {report.c:g}; {report.evidence}, Brier {report.brier:.4f}{late}; "
        f"its threshold {report.threshold:.10g} rejects {rejected} of the important tokens and accepts {accepted} of the others"
    )
    folder = out if out.is_absolute() else f"./{out}"  # a bare name would be a rule's
    measure = f"hf-lossy compare --task {fitted.config.training['task']} --policies svip,{folder}"
    others = "" if models.model is None else ", with --model, --assistant and --data"
    show_evidence(report.evidence, measure + others, "which answers it changes")


@_options.command
def fit_eagle3_command(
    *,
    data: CollectedStates,
    out: _options.Out,
    model: _options.Model = None,
    settings: DrafterFitSettings,
    resume: _options.Resume = False,
    dtype: _options.DType = "float32",
    device: _options.Device = "auto",
) -> None:
    """Train an EAGLE-3 drafter: chains of drafted tokens on the target's hidden states. Lossless in use.

    The result has the format of the `speculators` package. Processes started by `accelerate launch` share each batch.

    Examples:

      hf-lossy fit eagle3 texts --out drafter

      hf-lossy fit eagle3 texts --model M --vocabulary 16000 --intermediate-size 4096 --out drafter
    """
    _fit_drafter(data, out, model, settings, resume, _options.LoadOptions(dtype=dtype, device=device))


@_options.command
def fit_dspark_command(
    *,
    data: CollectedStates,
    out: _options.Out,
    model: _options.Model = None,
    settings: DSparkFitSettings,
    resume: _options.Resume = False,
    dtype: _options.DType = "float32",
    device: _options.Device = "auto",
) -> None:
    """Train a DSpark drafter: blocks on the target's hidden states, on EAGLE-3's data. Lossless in use.

    Example:

      hf-lossy fit dspark texts --out drafter --steps 7
    """
    _fit_drafter(data, out, model, settings, resume, _options.LoadOptions(dtype=dtype, device=device))


def _fit_drafter(
    data: Path, out: Path, model: str | None, settings: DrafterFitSettings, resume: bool, loading: _options.LoadOptions
) -> None:
    """Train a drafter into `out`, and print its figures."""
    require("this command", "accelerate", "jinja2")
    check_out(out, resume)
    target = load_alone(model, loading)[0]
    _, report = methods.fit_drafter(target, data, out, settings, resume=resume)
    if report is None:  # another process has the figures
        return
    shares = [share for share in report.acceptance if share is not None]  # no draft came to the others
    show_figures(
        ("position in a draft", "accepted", "low", "high"), [(i, *share) for i, share in enumerate(shares, 1)]
    )
    figure = f"{report.tokens_per_call.value:.2f} tokens a call of the target on {report.texts} held-out texts"
    show(f"{out}: {figure}, drafting {settings.steps}")


def show_figures(columns: Sequence[str], rows: "Sequence[Sequence[float | None]]") -> None:
    """Print figures with at most four digits; a dash for none."""
    figures = table(*columns)
    for row in rows:
        figures.add_row(*("–" if value is None else f"{value:.4g}" for value in row))
    console().print(figures)


def show_evidence(evidence: "Evidence", command: str, what: str = "how fast it is") -> None:
    """Print at most two lines on a fitted head. command: measures `what`, which was not measured here."""
    if evidence.warning is not None:
        show(f"warning: {evidence.warning}")
    show(f"see {what}: {command}" if evidence.verdict is None else evidence.verdict)
