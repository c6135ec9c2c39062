"""`hf-lossy collect`: data for a head on the draft."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import registry
from ..tasks.prompts import Text, read_texts
from ..terminal import show
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, nearest
from .exits import end_after
from .made_with import MadeWith, remember
from .options import (
    DEMO,
    DEMO_PROMPTS,
    Assistant,
    Chat,
    Device,
    DoSample,
    DType,
    MaxHours,
    Model,
    Out,
    Prompts,
    Resume,
    Seed,
    Temperature,
    TopK,
    TopP,
    chats,
    check_pair,
    check_prompts,
    check_sampling,
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
    max_new_tokens: Annotated[int, typer.Option(help="most new tokens of each row")] = 64,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 8,
    seed: Seed = 0,
    resume: Resume = False,
    max_hours: MaxHours = None,
    do_sample: DoSample = True,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    dtype: DType = "float32",
    device: Device = "auto",
    chat: Chat = False,
) -> None:
    """Collect what a head on the draft is trained on: the draft's state at each token, and how likely either model finds the token.

    Texts are sampled, as in the papers; a head for greedy decoding wants --greedy here.

    Examples:

      hf-lossy collect --prompts demo --limit 64 --out data

      hf-lossy collect --model M --assistant D --prompts questions.jsonl --chat --limit 256 --out data

      hf-lossy collect --for specdec --model M --assistant D --prompts questions.jsonl --out data
    """
    end_after(max_hours)
    needs("train", "accelerate", "datasets")
    check_pair(model, assistant)
    check_int("--limit", DEMO_PROMPTS if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    check_int("--max-new-tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    if mix is not None and method != "specdec":
        raise ValueError(f"--mix is for --for specdec, not {method}: leave it out")
    check_sampling(do_sample, temperature, top_k, top_p)
    check_prompts(prompts, model)
    from datasets import load_from_disk

    from ..methods.sprinter.collect import collect as run
    from ..methods.sprinter.collect_settings import CollectSettings

    settings = CollectSettings(
        new_tokens=max_new_tokens, lam=lam, do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p,
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
    remember(out, MadeWith(model, assistant, dtype=dtype, chat=chat))
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
