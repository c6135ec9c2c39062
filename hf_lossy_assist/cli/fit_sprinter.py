"""`hf-lossy fit sprinter`: from collected tokens to SPRINTER's verifier."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, show, table
from .made_with import hand_on
from .options import FitSeed, Out, Width, needs, width_of
from .verdict import show_verdict


def fit_sprinter(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect` wrote")],
    out: Out,
    lam: Annotated[
        list[float] | None,
        typer.Option("--lambda", help="λ to try; repeatable; the head for the dataset's own λ is saved"),
    ] = None,
    head: Annotated[str, typer.Option(help="shape of the head: linear or mlp")] = "linear",
    width: Width = None,
    balance: Annotated[bool, typer.Option(help="weight both labels equally in the loss")] = True,
    seed: FitSeed = 0,
) -> None:
    """Train SPRINTER's verifier and say on held-out prompts how good it is.

    Example:

      hf-lossy fit sprinter data --out head --head mlp --lambda 1 --lambda 1.2 --lambda 1.5
    """
    needs("train", "datasets", "sklearn", "matplotlib")
    from ..methods.sprinter.fit import fit_sprinter as run
    from ..methods.sprinter.train import FitSettings
    from ..training.head_quality import format_share as share

    fitted, reports = run(
        data, out, lam or (), FitSettings(kind=head, balance=balance, seed=seed, **width_of(head, width))
    )
    hand_on(data, out)
    kinds = reports[0].auroc_by_kind
    figures = table("λ", "AUROC", *kinds, "Brier", "acceptable", "η_TP", "η_FP")
    figures.padding = (0, 1, 0, 0)  # ten columns
    for r in reports:
        tp, fp = r.at(0.5)
        aurocs = [f"{value:.3f}" for value in (r.auroc, *r.auroc_by_kind.values())]
        figures.add_row(f"{r.lam:g}", *aurocs, f"{r.brier:.4f}", f"{r.acceptable:.1%}", f"{tp:.3f}", f"{fp:.3f}")
    console().print(figures)
    show(f"AUROC on all held-out prompts and by prefix ({', '.join(kinds)}); η at τ = 0.5\n")
    for r in reports:
        counts = r.evidence.counts
        each = zip(r.at(0.5), (counts["acceptable"], counts["unacceptable"]), strict=True)
        kept, given_away = (share(round(part * count), count) for part, count in each)
        show(f"λ = {r.lam:g}: {r.evidence}; at τ = 0.5 η_TP {kept}, η_FP {given_away}")
    same = len(reports) > 1 and not fitted.config.decoding.get("do_sample")
    note = "; greedy distributions are 0 or 1, so every λ ≥ 1 gives the same labels" if same else ""
    show(f"{out}: the head for λ = {fitted.config.lam:g}, with its card and plots{note}")
    saved = next(r for r in reports if r.lam == fitted.config.lam)
    show_verdict(saved.evidence, f"hf-lossy compare --policies svip,sprinter:head={out}")
