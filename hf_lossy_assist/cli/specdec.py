"""`hf-lossy fit specdec`: from collected tokens to the head that says how likely a draft is to be accepted."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, show
from .commands import fit_app


def add_to(app: typer.Typer) -> None:
    """Add it to the `fit` of `app`."""
    fit_app.command("specdec")(fit_specdec)


def fit_specdec(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for specdec` wrote")],
    out: Annotated[Path, typer.Option(help="folder of the head; must not exist")],
    head: Annotated[str, typer.Option(help="linear or mlp")] = "mlp",
    width: Annotated[int, typer.Option(help="hidden units of an mlp")] = 64,
    weight: Annotated[float, typer.Option(help="of a refusal in the loss; an acceptance weighs 1")] = 6.0,
    calibrated: Annotated[
        bool, typer.Option(help="move the intercept back by log(weight), so that the head says probabilities")
    ] = True,
    seed: Annotated[int, typer.Option(help="of the split by prompt and of training")] = 0,
) -> None:
    """Train SpecDec++'s acceptance head and say on held-out prompts how good it is."""
    from rich.table import Table

    from ..validation import check_number
    from . import needs

    needs("train", "datasets", "sklearn", "matplotlib")
    check_number("--weight", weight, 1e-3, 1e3)
    from ..methods.specdec.fit import fit_specdec as run
    from ..methods.sprinter.fit import FitSettings

    settings = FitSettings(kind=head, width=width, seed=seed)
    fitted, report = run(data, out, settings, weight=weight, calibrated=calibrated)
    if report.thresholds:
        table = Table("threshold h", "tokens drafted a round", "of them accepted")
        table.caption = "held-out rows replayed; how fast that is depends on what rounds cost"
        for row in report.thresholds:
            table.add_row(f"{row['threshold']:g}", f"{row['drafted']:.2f}", f"{row['accepted']:.2f}")
        console().print(table)
    show(
        f"{out}: a {head} head on the {fitted.config.features}; AUROC {report.auroc:.3f}, Brier {report.brier:.4f}, "
        f"KL {report.kl:.4f}; {report.acceptance:.1%} of the drafted tokens are accepted"
    )
