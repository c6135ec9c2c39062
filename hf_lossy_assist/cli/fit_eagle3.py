"""`hf-lossy fit eagle3`: from texts that a target wrote to a drafter on its hidden states."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import console, show, table
from ..validation import check_int, check_number, check_positive
from .exits import end_after, going_on
from .made_with import MadeWith, Source, models_from, remember
from .measured import check_out
from .options import Device, DType, FitSeed, MaxHours, Model, Out, Resume, load, needs


def fit_eagle3(
    data: Annotated[Path, typer.Argument(help="folder that `hf-lossy collect --for eagle3` wrote")],
    out: Out,
    model: Model = None,
    vocabulary: Annotated[
        int | None, typer.Option(help="tokens that it can propose: the target's most frequent (default: all)")
    ] = None,
    layers: Annotated[int, typer.Option(help="decoder layers")] = 1,
    intermediate_size: Annotated[int | None, typer.Option(help="width of its MLP (default: the target's)")] = None,
    steps: Annotated[int, typer.Option(help="length of the chains that it is trained on")] = 5,
    epochs: Annotated[int, typer.Option(help="times that all texts are read")] = 4,
    batch_size: Annotated[int, typer.Option(help="texts a step")] = 8,
    learning_rate: Annotated[float, typer.Option(help="the highest; it rises at first and falls to a tenth")] = 3e-4,
    longest: Annotated[int, typer.Option(help="tokens of a text that are used")] = 1024,
    held_out: Annotated[float, typer.Option(help="share of the texts that the figures are made on")] = 0.05,
    texts: Annotated[int | None, typer.Option(help="of the others, how many it is trained on (default: all)")] = None,
    save_every: Annotated[int, typer.Option(help="steps between two checkpoints")] = 100,
    seed: FitSeed = 0,
    resume: Resume = False,
    max_hours: MaxHours = None,
    dtype: DType = "float32",
    device: Device = "auto",
) -> None:
    """Train an EAGLE-3 drafter: chains of drafted tokens on the target's hidden states. Lossless in use.

    The outcome has the form of the `speculators` package. Under `accelerate launch` the processes share each batch.

    Examples:

      hf-lossy fit eagle3 texts --out drafter

      hf-lossy fit eagle3 texts --model M --vocabulary 16000 --intermediate-size 4096 --out drafter
    """
    end_after(max_hours)
    needs("train", "accelerate")
    check_out(out, resume)
    for name, value, least in (
        ("--layers", layers, 1), ("--steps", steps, 1), ("--epochs", epochs, 1), ("--batch-size", batch_size, 1), ("--longest", longest, 4),
        ("--save-every", save_every, 1), ("--seed", seed, 0), ("--vocabulary", vocabulary, 2), ("--intermediate-size", intermediate_size, 1),
        ("--texts", texts, 1),
    ):  # fmt: skip
        if value is not None:
            check_int(name, value, least, 2**31)
    check_positive("--learning-rate", learning_rate, 1.0)
    check_number("--held-out", held_out, 0.01, 0.5)
    from ..methods.eagle3.data import target_of
    from ..methods.eagle3.run import fit_eagle3 as run
    from ..methods.eagle3.settings import FitSettings

    settings = FitSettings(
        layers=layers, vocabulary=vocabulary, intermediate_size=intermediate_size, steps=steps, epochs=epochs, batch_size=batch_size,
        learning_rate=learning_rate, longest=longest, held_out=held_out, texts=texts, save_every=save_every, seed=seed,
    )  # fmt: skip
    made = models_from(model, None, [Source(str(data), target_of(data), None)])
    target, _, _ = load(made.model, None, dtype, device)
    with going_on(out):
        _, report = run(target, data, out, settings, resume=resume)
    if report is None:  # another process has the figures
        return
    remember(out, MadeWith(made.model, dtype=dtype))
    places = table("place of a draft", "accepted, %", "95 %")
    for k, its in enumerate(report.acceptance):
        if its is None:
            places.add_row(str(k + 1), "no draft came to it", "")
            continue
        between = "" if its.low is None or its.high is None else f"{its.low:.1%} to {its.high:.1%}"
        places.add_row(str(k + 1), f"{its.value:.1%}", between)
    console().print(places)
    call = report.tokens_per_call
    show(f"{out}: {call.value:.2f} tokens a call of the target on {report.texts} held-out texts, drafting {steps}")
