"""`hf-lossy profile`: what SV decides by."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..artifacts.files import check_new
from ..tasks.prompts import read_prompts
from ..terminal import console, show, table
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int
from .drafters import Drafter, check_draft, load_made
from .exits import end_after, going_on
from .made_with import MadeWith, remember
from .options import (
    DEMO,
    INT8,
    Assistant,
    Chat,
    Companion,
    Device,
    DoSample,
    DType,
    MaxHours,
    Model,
    Out,
    Overrides,
    Prompts,
    Resume,
    Seed,
    Temperature,
    TopK,
    TopP,
    batch_sizes,
    chats,
    check_prompts,
    check_sampling,
    demo_source,
    demo_texts,
    load_companion,
    needs,
)


PROFILED = 512  # prompts, as in the paper


def profile(
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    companion: Companion = None,
    prompts: Prompts = DEMO,
    limit: Annotated[int | None, typer.Option(help="most prompts to use (default: all; 512 of the demo)")] = None,
    gamma: Annotated[
        list[int] | None, typer.Option(help="draft length to profile; repeatable (default: 5 and 7)")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="new tokens of each prompt")] = 64,
    batch_size: Annotated[
        str, typer.Option(help="prompts at a time while rounds are timed; several with commas: 1,8")
    ] = "1,4,16,32,64",
    sample_batch_size: Annotated[int, typer.Option(help="prompts at a time while samples are taken")] = 16,
    rounds: Annotated[int, typer.Option(help="rounds timed for each number of verified tokens")] = 8,
    do_sample: DoSample = True,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    resume: Resume = False,
    max_hours: MaxHours = None,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
    chat: Chat = False,
) -> None:
    """Measure what SV decides by: how often the target accepts what draft and companion agree on, and what rounds cost here.

    Texts are sampled, as in the paper; a profile for greedy decoding wants --greedy here.

    Examples:

      hf-lossy profile --prompts demo --limit 128 --out profile

      hf-lossy profile --drafter demo --limit 128 --out profile

      hf-lossy profile --model M --assistant D --companion C --prompts questions.jsonl --chat --batch-size 8,32 --out profile
    """
    end_after(max_hours)
    needs("train", "sklearn", "matplotlib")
    check_draft(model, assistant, drafter)
    if model is not None and companion is None:
        raise ValueError(f"--model needs --companion beside it: a path, Hub id, or {INT8}")
    check_prompts(prompts, model)
    check_int("--limit", PROFILED if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    check_sampling(do_sample, temperature, top_k, top_p)
    sizes = batch_sizes(batch_size)
    check_int("--sample-batch-size", sample_batch_size, 1, MOST_ROWS)
    check_new(out, "profile again")  # before models are loaded
    from ..artifacts.sv_profile import LONGEST_PROFILED
    from ..methods.sv.instrument import ProfileSettings
    from ..methods.sv.profiling import profile as run

    lengths = tuple(gamma or ProfileSettings.gamma)
    for length in lengths:
        check_int("--gamma", length, 1, LONGEST_PROFILED)
    check_int("--max-new-tokens", max_new_tokens, 2 * max(lengths) + 2, MOST_NEW_TOKENS)  # two rounds
    settings = ProfileSettings(
        gamma=lengths, new_tokens=max_new_tokens, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p,
        batch_size=sample_batch_size, batches=tuple(sizes), rounds=rounds, seed=seed,
    )  # fmt: skip
    if prompts == DEMO:
        texts = [text.prompt for text in demo_texts(PROFILED if limit is None else limit, seed)]
    else:
        texts = read_prompts(prompts)[:limit]
    made_with = MadeWith(model, assistant, companion, dtype, chat, drafter)
    target, draft, tokenizer = load_made(made_with, dtype, device, overrides)
    third = load_companion(companion, target, draft, tokenizer)
    source = demo_source(seed) if prompts == DEMO else Path(prompts).name
    texts = chats(tokenizer, texts) if chat else texts
    with going_on(out):
        made = run(target, draft, third, tokenizer, texts, out, settings, resume=resume, source=source)
    remember(out, made_with)
    _show(made, out)


def _show(made: Any, out: Path) -> None:
    from ..methods.sv.alternatives import ALTERNATIVES, advice, compared

    screen, metrics, latency = console(), made.metrics, made.latency
    cells = table("cells of S × A", "H(X)", "H(X |\nS, A)", "information\ngain", "of S\nalone", "of A\nalone")
    for row in metrics["information"]:
        figures = [f"{row[key]:.3f}" for key in ("entropy", "conditional", "gain", "gain_s", "gain_a")]
        cells.add_row(f"{row['resolution']} ({row['cells']})", *figures)
    screen.print(cells)
    show(f"bits, on {metrics['held_out']} held-out tokens; {metrics['acceptance']:.1%} are accepted\n")
    rounds = table("rows", "a draft\nstep", "nothing\nverified", "all\nverified", "companion", "noise", "SV ×\nstrict")
    for i, batch in enumerate(latency.batches):
        seconds = (latency.step[i], latency.seconds[i][0], latency.seconds[i][-1], latency.companion[i])
        rounds.add_row(
            str(batch), *(f"{s * 1e3:.2f}" for s in seconds), f"{latency.noise[i]:.0%}", f"{made.pays[i]:.2f}"
        )
    screen.print(rounds)
    show(
        f"ms of a draft step, and of a round but its drafting, γ = {made.gamma}; noise: half the spread of the middle half\n"
        f"of the rounds; the last column is predicted ({made.machine})\n"
    )
    found = compared(made)
    speeds_of = table(
        "rows", "target\nalone", f"strict,\nγ = {made.gamma}", "svip", "SV,\npredicted", "SV × the\nfastest"
    )
    for its, speeds in zip(found, metrics[ALTERNATIVES], strict=True):
        alone = (f"{speeds[name]:.0f}" for name in ("target", "strict", "svip"))
        speeds_of.add_row(str(its.rows), *alone, f"{its.tokens_per_second:.0f}", f"{its.gain:.2f}")
    screen.print(speeds_of)
    show("tokens per second of all rows, on the same prompts\n")
    unused = (
        ""
        if any(made.worthwhile(its.rows) for its in found)
        else "; the policy sv leaves its companion out here, and is strict"
    )
    show(f"{out}: {advice(found)}{unused}")
