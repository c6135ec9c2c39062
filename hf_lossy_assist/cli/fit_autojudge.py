"""`hf-lossy fit autojudge`: from mined mismatches to the head that tells important tokens from unimportant ones."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..artifacts.files import check_new
from ..artifacts.json_io import read_object
from ..terminal import console, show, table
from .drafters import Drafter, check_draft, load_made
from .made_with import MadeWith, Source, models_from, remember
from .options import Assistant, Device, DType, FitSeed, Model, Out, load, needs
from .verdict import show_verdict


if TYPE_CHECKING:
    from ..methods.autojudge.report import JudgeReport

SHOWN = 8  # rows of the thresholds' table


def fit_autojudge(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy mine` wrote")],
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    head: Annotated[str, typer.Option(help="shape of the head: linear or mlp")] = "linear",
    features: Annotated[
        str | None,
        typer.Option(
            help="hidden states that the head reads: of draft, target or both (default: both; target for a drafter)"
        ),
    ] = None,
    position: Annotated[
        str, typer.Option(help="position of the state: token (the drafted token) or predicting (the one before)")
    ] = "token",
    folds: Annotated[
        int | None,
        typer.Option(
            help="folds by problem for the figures; 0 for one 90/10 split (default: 5 where that holds out fewer than 50 "
            "important tokens)"
        ),
    ] = None,
    recall: Annotated[
        float, typer.Option(help="share of important tokens that the head's threshold must reject")
    ] = 0.9,
    compare: Annotated[
        bool, typer.Option("--compare", help="compare other classifiers and inputs too, with plots")
    ] = False,
    seed: FitSeed = 0,
    dtype: DType = "float32",
    device: Device = "auto",
) -> None:
    """Train AutoJudge's classifier on mined mismatches and say on held-out problems how good it is.

    Without --model and --assistant the models are those that the data were mined with.

    Examples:

      hf-lossy fit autojudge mined --out judge

      hf-lossy fit autojudge mined --out judge --features target --folds 5 --compare
    """
    needs("train", "datasets", "sklearn", "matplotlib")
    if model is None and assistant is None and drafter is None:
        made = models_from(None, None, [_source(data)])
        model, assistant, drafter = made.model, made.assistant, made.drafter
    if features is None:
        features = "both" if drafter is None else "target"
    untargeted = features == "draft" and assistant is not None and model is None  # the target may be behind a server
    if not untargeted:
        check_draft(model, assistant, drafter)
    check_new(out, "fit again")  # before models are loaded
    from ..methods.autojudge.classifiers import JudgeSettings
    from ..methods.autojudge.fit import fit_autojudge as run

    settings = JudgeSettings(model=features, position=position, head=head, recall=recall, folds=folds, seed=seed)
    if untargeted:
        target, (draft, _, tokenizer) = None, load(assistant, None, dtype, device)
    else:
        target, draft, tokenizer = load_made(MadeWith(model, assistant, drafter=drafter), dtype, device)
    fitted, report = run(data, out, target, draft, tokenizer, settings, compare)
    remember(out, MadeWith(model, assistant, dtype=dtype, drafter=drafter))
    screen = console()
    screen.print(_thresholds(report))
    source = f"out of {report.folds} folds" if report.folds else "held out"
    show(
        f"{report.held_out} mismatches {source}, {report.held_out_important} important; in all {report.mismatches} of "
        f"{report.problems} problems, {report.important:.1%} important\n"
    )
    if report.comparison:
        screen.print(_comparison(report.comparison))
    chosen = "" if report.c is None else f", C = {report.c:g}"
    late = f"; {report.unconverged} fits ended before they converged" if report.unconverged else ""
    kept, accepted = report.counted(report.threshold)
    show(
        f"{out}: a {head} head on the {fitted.config.features}{chosen}; {report.evidence}, Brier {report.brier:.4f}{late}; "
        f"its threshold {report.threshold:.10g} rejects {kept} of the important tokens and accepts {accepted} of the others"
    )
    folder = out if out.is_absolute() else f"./{out}"  # a bare name is a rule's
    own = (
        f"--model {model} {f'--assistant {assistant}' if drafter is None else f'--drafter {drafter}'} --task {fitted.config.training['task']} --data FILE"
        if model
        else f"--task demo{'' if drafter is None else f' --drafter {drafter}'}"
    )
    show_verdict(report.evidence, f"hf-lossy compare {own} --policies svip,{folder}", "which answers it changes")


def _source(data: Path) -> Source:
    """The dataset, as a source of models."""
    record = data / "mine.json"  # what else there is of it, reading the dataset checks
    facts = read_object(record) if record.is_file() else {}
    names = (its.get("id") if isinstance(its := facts.get(role), dict) else None for role in ("target", "draft"))
    return Source(str(data), *names)


def _thresholds(report: "JudgeReport") -> Any:
    """A few of the tabled thresholds, the head's own among them."""
    rows = report.thresholds
    step = max(1, len(rows) // SHOWN)
    shown = table("threshold", "important rejected", "unimportant accepted")
    for i, row in enumerate(rows):
        own = row["threshold"] == report.threshold
        if own or i % step == 0:
            mark = " (default)" if own else ""
            shown.add_row(f"{row['threshold']:.10g}{mark}", f"{row['recall']:.3f}", f"{row['accepted']:.3f}")
    return shown


def _comparison(rows: list[dict[str, Any]]) -> Any:
    """Every variant's AUROC."""
    shown = table("varied", "", "AUROC", "in training")
    for i, row in enumerate(rows):
        first = i == 0 or rows[i - 1]["group"] != row["group"]
        name = row["group"] if first else ""
        shown.add_row(name, row["input"], f"{row['auroc']:.3f}", f"{row['auroc_train']:.3f}")
    return shown
