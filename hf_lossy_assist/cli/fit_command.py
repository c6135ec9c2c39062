"""`hf-lossy fit`: train SPRINTER's verifier, AutoJudge's classifier, SpecDec++'s head or an EAGLE-3 or DSpark drafter on collected data."""

import json
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
from ._printing import show_evidence
from ._runs import check_out, hint_resume


if TYPE_CHECKING:
    from rich.table import Table

    from ..methods.autojudge.fit import JudgeReport

SHOWN = 8  # rows in the table of thresholds
CollectedStates = Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for eagle3` wrote")]


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
    require("this command", "datasets", "sklearn", "matplotlib", "jinja2")

    settings = training.head_training.HeadFitSettings(kind=head, width=width, balance=balance, seed=seed)
    fitted, reports = methods.fit_sprinter(data, out, lam or (), settings)
    figures = table("λ", "AUROC", "Brier", "acceptable", "η_TP", "η_FP")
    for r in reports:
        row = r.row_at(0.5)
        shares = f"{r.acceptance:.1%}", f"{row['eta_tp']:.3f}", f"{row['eta_fp']:.3f}"
        figures.add_row(f"{r.lam:g}", f"{r.auroc:.3f}", f"{r.brier:.4f}", *shares)
    console().print(figures)
    show(
        "AUROC (1: all ranked right, 0.5: chance) on held-out prompts; Brier: squared error of the probability;\n"
        "η_TP and η_FP: acceptable and unacceptable tokens taken for acceptable, at τ = 0.5\n"
    )
    share = training.head_quality.format_share
    for r in reports:
        counts = r.evidence.counts
        rates = zip(("eta_tp", "eta_fp"), (counts["acceptable"], counts["unacceptable"]), strict=True)
        hits, misses = (share(round(r.row_at(0.5)[name] * count), count) for name, count in rates)
        show(f"λ = {r.lam:g}: {r.evidence}; at τ = 0.5 η_TP {hits}, η_FP {misses}")
    same = len(reports) > 1 and not fitted.config.decoding.get("do_sample")
    note = "; greedy distributions are 0 or 1, so every λ ≥ 1 gives the same labels" if same else ""
    which = ", the one of `collect` or else the first," if len(reports) > 1 else ","
    show(f"{out}: the head for λ = {fitted.config.lam:g}{which} with its card and plots{note}")
    saved = next(r for r in reports if r.lam == fitted.config.lam)
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
    require("this command", "datasets", "sklearn", "matplotlib", "jinja2")

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
    require("this command", "datasets", "sklearn", "matplotlib", "jinja2")
    models.check_learnable(drafters=False)
    check_new(out, "fit again")  # before models are loaded

    loading = _options.LoadOptions(dtype=dtype, device=device)
    settings = methods.JudgeSettings(model=features, position=position, recall=recall, folds=folds, seed=seed)
    target, draft, tokenizer = load_models(models, loading)
    fitted, report = methods.fit_autojudge(data, out, target, draft, tokenizer, settings)
    console().print(_tabulate_thresholds(report))
    source = f"out of {report.folds} folds" if report.folds else "held out"
    counts = report.evidence.counts
    show(
        f"{sum(counts.values())} mismatches {source}, {counts['important']} important; in all {report.mismatches} of "
        f"{report.problems} problems, {report.important:.1%} important\n"
    )
    late = f"; {report.unconverged} fits ended before they converged" if report.unconverged else ""
    row, share = report.row_at(report.threshold), training.head_quality.format_share
    rejected = share(round(row["recall"] * counts["important"]), counts["important"])
    accepted = share(round(row["accepted"] * counts["unimportant"]), counts["unimportant"])
    show(
        f"{out}: a linear head on the {fitted.config.features}, C = {report.c:g}; {report.evidence}, Brier {report.brier:.4f}{late}; "
        f"its threshold {report.threshold:.10g} rejects {rejected} of the important tokens and accepts {accepted} of the others"
    )
    folder = out if out.is_absolute() else f"./{out}"  # a bare name would be a rule's
    arguments = "--task demo"
    if models.model:
        arguments = f"{models.format()} --task {fitted.config.training['task']} --data FILE"
    show_evidence(
        report.evidence, f"hf-lossy compare {arguments} --policies svip,{folder}", "which answers it changes"
    )


@_options.command
def fit_eagle3_command(
    *,
    data: CollectedStates,
    out: _options.Out,
    model: _options.Model = None,
    settings: DrafterFitSettings,
    running: _options.RunOptions,
    dtype: _options.DType = "float32",
    device: _options.Device = "auto",
) -> None:
    """Train an EAGLE-3 drafter: chains of drafted tokens on the target's hidden states. Lossless in use.

    The result has the format of the `speculators` package. Processes started by `accelerate launch` share each batch.

    Examples:

      hf-lossy fit eagle3 texts --out drafter

      hf-lossy fit eagle3 texts --model M --vocabulary 16000 --intermediate-size 4096 --out drafter
    """
    _fit_drafter(data, out, model, settings, running, _options.LoadOptions(dtype=dtype, device=device))


@_options.command
def fit_dspark_command(
    *,
    data: CollectedStates,
    out: _options.Out,
    model: _options.Model = None,
    settings: DSparkFitSettings,
    running: _options.RunOptions,
    dtype: _options.DType = "float32",
    device: _options.Device = "auto",
) -> None:
    """Train a DSpark drafter: blocks on the target's hidden states, on EAGLE-3's data. Lossless in use.

    Example:

      hf-lossy fit dspark texts --out drafter --steps 7
    """
    _fit_drafter(data, out, model, settings, running, _options.LoadOptions(dtype=dtype, device=device))


def _fit_drafter(
    data: Path,
    out: Path,
    model: str | None,
    settings: DrafterFitSettings,
    running: _options.RunOptions,
    loading: _options.LoadOptions,
) -> None:
    """Train a drafter into `out`, and print its figures."""
    require("this command", "accelerate", "jinja2")
    check_out(out, running.resume)
    target = load_alone(model, loading)[0]
    with hint_resume(out):
        _, report = methods.fit_drafter(target, data, out, settings, resume=running.resume)
    if report is None:  # another process has the figures
        return
    places = table("place of a draft", "accepted, %", "95 %")
    for place, share in enumerate(report.acceptance, 1):
        if share is None:
            places.add_row(str(place), "no draft came to it", "")
            continue
        between = "" if share.low is None or share.high is None else f"{share.low:.1%} to {share.high:.1%}"
        places.add_row(str(place), f"{share.value:.1%}", between)
    console().print(places)
    call = report.tokens_per_call
    show(
        f"{out}: {call.value:.2f} tokens a call of the target on {report.texts} held-out texts, drafting {settings.steps}"
    )


def _tabulate_thresholds(report: "JudgeReport") -> "Table":
    """Return a table of a few of the thresholds, including the default."""
    rows = report.thresholds
    step = max(1, len(rows) // SHOWN)
    shown = table("threshold", "important rejected", "unimportant accepted")
    for i, row in enumerate(rows):
        default = row["threshold"] == report.threshold
        if default or i % step == 0:
            mark = " (default)" if default else ""
            shown.add_row(f"{row['threshold']:.10g}{mark}", f"{row['recall']:.3f}", f"{row['accepted']:.3f}")
    return shown
