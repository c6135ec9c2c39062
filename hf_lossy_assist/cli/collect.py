"""`hf-lossy collect`: data for a head on the draft."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import registry
from ..tasks.prompts import Text, read_texts
from ..terminal import show
from ..validation import check_int, nearest
from .options import (
    DEMO,
    DEMO_PROMPTS,
    Assistant,
    Chat,
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
    needs,
)


MIX = 0.15
METHODS = ("sprinter", "specdec")  # whose heads are trained on this data


def collect(
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    prompts: Prompts = DEMO,
    method: Annotated[
        str, typer.Option("--for", help="method of the head: sprinter (four rows a prompt) or specdec (one)")
    ] = METHODS[0],
    mix: Annotated[
        float | None,
        typer.Option(help=f"share of draft tokens that the target's replace, for specdec (default: {MIX})"),
    ] = None,
    lam: Annotated[float, typer.Option("--lambda", help="label a token acceptable where q(x) ≤ λ·p(x)")] = 1.2,
    limit: Annotated[int | None, typer.Option(help="most prompts to use (default: all; 64 of the demo)")] = None,
    new_tokens: Annotated[int, typer.Option(help="positions of each row")] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 8,
    seed: Seed = 0,
    resume: Resume = False,
    greedy: Greedy = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Collect data for a head on the draft: its hidden state, the token it proposes, and p and q of that token."""
    needs("train", "accelerate", "datasets")
    check_pair(model, assistant)
    check_int("--limit", DEMO_PROMPTS if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    if mix is not None and method != "specdec":
        raise ValueError(f"--mix is for --for specdec, not {method}: leave it out")
    check_greedy(greedy, temperature, top_k, top_p)
    check_prompts(prompts, model)
    from datasets import load_from_disk

    from ..methods.sprinter.collect import collect as run
    from ..methods.sprinter.collect_settings import CollectSettings

    settings = CollectSettings(
        new_tokens=new_tokens, lam=lam, do_sample=not greedy, temperature=temperature, top_k=top_k, top_p=top_p,
        batch_size=batch_size, seed=seed, **_recorded(method, mix),
    )  # fmt: skip
    source = demo_source(seed) if prompts == DEMO else Path(prompts).name
    if prompts == DEMO:
        texts = demo_texts(DEMO_PROMPTS if limit is None else limit, seed)
    else:
        texts = read_texts(prompts, limit)
    target, draft, tokenizer = load(model, assistant, dtype, device)
    if chat:
        written = chats(tokenizer, [t.prompt for t in texts])
        texts = [Text(text, t.continuation) for text, t in zip(written, texts, strict=True)]
    try:
        run(target, draft, tokenizer, texts, out, settings, resume=resume, source=source)
    except KeyboardInterrupt:
        show(f"interrupted; what is done is in {out}.partial: the same command with --resume goes on")
        raise
    show(f"{out}: {len(load_from_disk(str(out)))} tokens of {len(texts)} prompts, with a data card")


def _recorded(method: str, mix: float | None) -> dict[str, Any]:
    """The settings in which the methods' data differ: whose state is kept, and what the rows go on from."""
    from ..artifacts.features import FeatureSpec

    kind = registry.method(method).head_kind
    assert kind is not None and kind.position is not None, "the entries of METHODS name both"
    return (
        {}
        if kind.position == "predicting"
        else {"features": FeatureSpec(position=kind.position), "mix": MIX if mix is None else mix}
    )
