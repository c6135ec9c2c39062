"""`hf-lossy fit specdec`: from collected tokens to the head that says how likely a draft is to be accepted."""

import json
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, show, table
from ..validation import check_number
from .made_with import hand_on
from .options import FitSeed, Out, Width, needs, width_of
from .verdict import show_verdict


def fit_specdec(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for specdec` wrote")],
    out: Out,
    head: Annotated[str, typer.Option(help="shape of the head: linear or mlp")] = "mlp",
    width: Width = None,
    weight: Annotated[float, typer.Option(help="weight of a rejection in the loss; an acceptance weighs 1")] = 6.0,
    calibrated: Annotated[
        bool, typer.Option(help="shift the intercept by log(weight), so that outputs are probabilities")
    ] = True,
    seed: FitSeed = 0,
) -> None:
    """Train SpecDec++'s acceptance head and say on held-out prompts how good it is.

    Example:

      hf-lossy fit specdec data --out head --width 64 --weight 6
    """
    needs("train", "datasets", "sklearn", "matplotlib")
    check_number("--weight", weight, 1e-3, 1e3)
    from ..methods.specdec.fit import fit_specdec as run
    from ..methods.sprinter.train import FitSettings

    settings = FitSettings(kind=head, seed=seed, **width_of(head, width))
    fitted, report = run(data, out, settings, weight=weight, calibrated=calibrated)
    hand_on(data, out)
    if report.thresholds:
        rounds = table("threshold h", "tokens drafted a round", "of them accepted")
        for row in report.thresholds:
            rounds.add_row(f"{row['threshold']:g}", f"{row['drafted']:.2f}", f"{row['accepted']:.2f}")
        console().print(rounds)
        show("held-out rows replayed; how fast that is depends on what rounds cost\n")
    show(
        f"{out}: a {head} head on the {fitted.config.features}; {report.evidence}, Brier {report.brier:.4f}, "
        f"KL {report.kl:.4f}; {report.acceptance:.1%} of the drafted tokens are accepted"
    )
    policy = json.dumps({"stop": {"name": "specdec", "head": str(out)}})
    show_verdict(report.evidence, f"hf-lossy generate --policy '{policy}'")
