"""`hf-lossy profile`: what SV decides by."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from ..tasks.prompts import read_prompts
from ..terminal import console, show
from ..validation import check_int
from .options import (
    DEMO,
    INT8,
    Assistant,
    Chat,
    Companion,
    Device,
    DType,
    Greedy,
    Model,
    Out,
    Prompts,
    Resume,
    Seed,
    Temperature,
    TopK,
    TopP,
    chats,
    check_greedy,
    check_pair,
    check_prompts,
    demo_source,
    demo_texts,
    load,
    load_companion,
    needs,
)


PROFILED = 512  # prompts, as in the paper


def profile(
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    companion: Companion = None,
    prompts: Prompts = DEMO,
    limit: Annotated[int | None, typer.Option(help="most prompts to use (default: all; 512 of the demo)")] = None,
    gamma: Annotated[
        list[int] | None, typer.Option(help="draft length to profile; repeatable (default: 5 and 7)")
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="new tokens of each prompt")] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts at a time while samples are taken")] = 16,
    batches: Annotated[
        list[int] | None, typer.Option("--batch", help="batch size to time; repeatable (default: 1, 4, 16, 32 and 64)")
    ] = None,
    rounds: Annotated[int, typer.Option(help="rounds timed for each number of verified tokens")] = 8,
    greedy: Greedy = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    resume: Resume = False,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Measure what SV decides by: acceptance by S and A on prompts, and what rounds cost on this machine."""
    needs("train", "sklearn", "matplotlib")
    check_pair(model, assistant)
    if model is not None and companion is None:
        raise ValueError(f"--model needs --companion beside it: a path, Hub id, or {INT8}")
    check_prompts(prompts, model)
    check_int("--limit", PROFILED if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    check_greedy(greedy, temperature, top_k, top_p)
    if out.exists():  # before models are loaded
        raise ValueError(f"{out} exists: choose another --out, or delete it to profile again")
    from ..methods.sv.instrument import ProfileSettings
    from ..methods.sv.profiling import profile as run

    settings = ProfileSettings(
        gamma=tuple(gamma or ProfileSettings.gamma), new_tokens=new_tokens, do_sample=not greedy, temperature=temperature,
        top_k=top_k, top_p=top_p, batch_size=batch_size, batches=tuple(batches or ProfileSettings.batches), rounds=rounds,
        seed=seed,
    )  # fmt: skip
    if prompts == DEMO:
        texts = [text.prompt for text in demo_texts(PROFILED if limit is None else limit, seed)]
    else:
        texts = read_prompts(prompts)[:limit]
    target, draft, tokenizer = load(model, assistant, dtype, device)
    third = load_companion(companion, target, draft, tokenizer)
    source = demo_source(seed) if prompts == DEMO else Path(prompts).name
    texts = chats(tokenizer, texts) if chat else texts
    try:
        made = run(target, draft, third, tokenizer, texts, out, settings, resume=resume, source=source)
    except KeyboardInterrupt:
        show(f"interrupted; samples that are done are in {out}.partial: the same command with --resume goes on")
        raise
    _show(made, out)


def _show(made: Any, out: Path) -> None:
    from ..methods.sv.alternatives import ALTERNATIVES, advice, compared

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
    found = compared(made)
    table = Table("rows", "target alone", f"strict, γ = {made.gamma}", "svip", "SV, predicted", "SV × the fastest")
    for its, speeds in zip(found, metrics[ALTERNATIVES], strict=True):
        alone = (f"{speeds[name]:.0f}" for name in ("target", "strict", "svip"))
        table.add_row(str(its.rows), *alone, f"{its.tokens_per_second:.0f}", f"{its.gain:.2f}")
    table.caption = "tokens per second of all rows, on the same prompts"
    screen.print(table)
    unused = (
        ""
        if any(made.worthwhile(its.rows) for its in found)
        else "; the policy sv leaves its companion out here, and is strict"
    )
    show(f"{out}: {advice(found)}{unused}")
