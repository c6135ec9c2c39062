"""The command that makes SV's profile. `cli` adds it to `hf-lossy`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..terminal import console, show
from .commands import DEMO, Assistant, Chat, Device, DType, Model, Prompts, chats, check_greedy


PROFILED = 512  # prompts, as in the paper
INT8 = "int8"
Companion = Annotated[
    str | None, typer.Option(help=f"of sv: a path, Hub id, or {INT8} (the draft in int8); default the demo's")
]


def add_to(app: typer.Typer) -> None:
    """Add every command here to `app`."""
    app.command()(profile)


def profile(
    out: Annotated[Path, typer.Option(help="folder of the profile; must not exist")],
    model: Model = None,
    assistant: Assistant = None,
    companion: Companion = None,
    prompts: Prompts = DEMO,
    limit: Annotated[int | None, typer.Option(help="prompts to use; default all (of the demo 512)")] = None,
    gamma: Annotated[list[int] | None, typer.Option(help="drafted tokens a round (repeatable): 5 and 7")] = None,
    new_tokens: Annotated[int, typer.Option(help="of each prompt")] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts at a time, while samples are taken")] = 16,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", help="rows of timed rounds (repeatable): 1, 4, 16, 32, 64")
    ] = None,
    rounds: Annotated[int, typer.Option(help="timed for each number of verified tokens")] = 8,
    greedy: Annotated[bool, typer.Option("--greedy", help="for greedy decoding; default sampling")] = False,
    temperature: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int, typer.Option(help="of sampling and of the demo problems")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="go on with an unfinished profile")] = False,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Measure what SV decides by: acceptance by S and A on prompts, and what rounds cost on this machine."""
    from .. import demo
    from ..tasks.prompts import read_prompts
    from ..validation import check_int
    from . import check_pair, load, needs

    needs("train", "sklearn", "matplotlib")
    check_pair(model, assistant)
    if model is not None and companion is None:
        raise ValueError(f"--model needs --companion beside it: a path, Hub id, or {INT8}")
    if prompts == DEMO and model is not None:
        raise ValueError("--prompts demo is for the demo models: pass a file of prompts with --model")
    check_int("--limit", PROFILED if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    check_greedy(greedy, temperature, top_k, top_p)
    if out.exists():  # before models are loaded
        raise ValueError(f"{out} exists: choose another --out, or delete it to profile again")
    from ..methods.sv.instrument import ProfileSettings
    from ..methods.sv.profiling import profile as run

    settings = ProfileSettings(
        tuple(gamma or ProfileSettings.gamma), new_tokens, not greedy, temperature, top_k, top_p, batch_size,
        tuple(batches or ProfileSettings.batches), rounds, seed,
    )  # fmt: skip
    if prompts == DEMO:
        texts = [p.prompt for p in demo.problems(PROFILED if limit is None else limit, seed, "calibration")]
    else:
        texts = read_prompts(prompts)[:limit]
    target, draft, tokenizer = load(model, assistant, dtype, device)
    third = load_companion(companion, target, draft, tokenizer)
    source = f"the demo task, calibration problems of seed {seed}" if prompts == DEMO else Path(prompts).name
    texts = chats(tokenizer, texts) if chat else texts
    try:
        made = run(target, draft, third, tokenizer, texts, out, settings, resume=resume, source=source)
    except KeyboardInterrupt:
        show(f"interrupted; samples that are done are in {out}.partial: the same command with --resume goes on")
        raise
    _show(made, out)


def load_profile(source: str | None, companion: str | None, demo_models: bool) -> Any:
    """`--profile`, by default the demo's; models of the user's own need one of their own, and a companion."""
    from .. import demo
    from ..artifacts.profile import Profile

    if not demo_models and (source is None or companion is None):
        missing = "--profile" if source is None else "--companion"
        raise ValueError(f"--policy sv needs {missing} for models of your own (hf-lossy profile)")
    return demo.profile() if source is None else Profile.from_pretrained(source)


def load_companion(companion: str | None, target: Any, draft: Any, tokenizer: Any) -> Any:
    """`--companion`, in the target's precision and place; the demo's where it is None."""
    from .. import demo
    from ..models.identity import same_ids
    from ..models.int8 import int8
    from . import load

    if companion is None:
        return demo.load(target.dtype, target.device).companion
    if companion == INT8:
        return int8(draft)
    model, _, its = load(companion, None, str(target.dtype).removeprefix("torch."), str(target.device))
    if not same_ids(tokenizer, its):
        raise ValueError(f"--companion {companion} has another tokenizer than the target: token ids mean other words")
    return model


def _show(made: Any, out: Path) -> None:
    from rich.table import Column, Table

    screen, metrics, latency = console(), made.metrics, made.latency
    table = Table(
        Column("cells of S × A", no_wrap=True), "H(X)", "H(X | S, A)", "information gain", "of S alone", "of A alone"
    )
    table.caption = f"bits, on {metrics['held_out']} held-out tokens; {metrics['acceptance']:.1%} are accepted"
    for row in metrics["information"]:
        figures = [f"{row[key]:.3f}" for key in ("entropy", "conditional", "gain", "gain_s", "gain_a")]
        table.add_row(f"{row['resolution']} ({row['cells']})", *figures)
    screen.print(table)
    table = Table("rows", "a draft step, ms", "nothing verified", "all verified", "companion", "noise", "SV × strict")
    for i, batch in enumerate(latency.batches):
        seconds = (latency.step[i], latency.seconds[i][0], latency.seconds[i][-1], latency.companion[i])
        table.add_row(
            str(batch), *(f"{s * 1e3:.2f}" for s in seconds), f"{latency.noise[i]:.0%}", f"{made.pays[i]:.2f}"
        )
    table.caption = f"ms of a round but its drafting, γ = {made.gamma}; the last column is predicted ({made.machine})"
    screen.print(table)
    paying = [str(batch) for batch in latency.batches if made.worthwhile(int(batch))]
    show(
        f"{out}: pays at {', '.join(paying)} rows"
        if paying
        else f"{out}: does not pay at any batch size measured; strict is used"
    )
