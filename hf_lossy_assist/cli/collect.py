"""`hf-lossy collect`: data for a head on the draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import registry
from ..tasks.prompts import PromptText as Text
from ..tasks.prompts import read_texts
from ..terminal import show
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, nearest
from .drafters import Drafter, check_draft, load_made
from .exits import end_after, going_on
from .made_with import MadeWith, remember
from .measured import check_out
from .options import (
    DEMO,
    DEMO_PROMPTS,
    Assistant,
    Chat,
    Device,
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
    chats,
    check_prompts,
    check_sampling,
    demo_source,
    demo_texts,
    needs,
)


MIX, LAMBDA = 0.15, 1.2
METHODS = ("sprinter", "specdec", "eagle3")  # what is trained on this data
NEW_TOKENS = {"eagle3": 256}  # of an answer; 64 of a row for a head


def collect(
    out: Out,
    model: Model = None,
    assistant: Assistant = None,
    drafter: Drafter = None,
    prompts: Prompts = DEMO,
    method: Annotated[
        str,
        typer.Option(
            "--for",
            help="a head: sprinter (four rows a prompt) or specdec (one); or a drafter on the target's states: eagle3",
        ),
    ] = METHODS[0],
    mix: Annotated[
        float | None,
        typer.Option(help=f"share of draft tokens that the target's replace, for specdec (default: {MIX})"),
    ] = None,
    lam: Annotated[
        float | None,
        typer.Option("--lambda", help=f"label a token acceptable where q(x) ≤ λ·p(x) (default: {LAMBDA})"),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="most prompts to use (default: all; 64 of the demo)")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="most new tokens of each row (default: 64; 256 for eagle3)")
    ] = None,
    states: Annotated[
        bool,
        typer.Option(
            "--states/--no-states",
            help="for eagle3: keep the target's states on disk, or work them out again each time",
        ),
    ] = True,
    batch_size: Annotated[int, typer.Option(help="prompts at a time")] = 8,
    seed: Seed = 0,
    resume: Resume = False,
    max_hours: MaxHours = None,
    do_sample: Annotated[
        bool | None,
        typer.Option(
            "--do-sample/--greedy",
            help="sample, or take the likeliest token each time (default: sample; greedy for eagle3)",
        ),
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    dtype: DType = "float32",
    device: Device = "auto",
    overrides: Overrides = None,
    chat: Chat = False,
) -> None:
    """Collect what a head on the draft is trained on: the draft's state at each token, and how likely either model finds the token.

    Texts are sampled, as in the papers; a head for greedy decoding wants --greedy here. For eagle3 the target alone answers the prompts.

    Examples:

      hf-lossy collect --prompts demo --limit 64 --out data

      hf-lossy collect --model M --assistant D --prompts questions.jsonl --chat --limit 256 --out data

      hf-lossy collect --for specdec --model M --assistant D --prompts questions.jsonl --out data

      hf-lossy collect --drafter demo --limit 64 --out data

      hf-lossy collect --for eagle3 --model M --prompts questions.jsonl --chat --out texts
    """
    end_after(max_hours)
    needs("train", "accelerate", "datasets")
    check_out(out, resume)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    for_head = method != "eagle3"
    if for_head:
        check_draft(model, assistant, drafter)
    for name, given in (("--assistant", assistant), ("--drafter", drafter)):
        if given is not None and not for_head:
            raise ValueError(f"{name}: the target alone answers for eagle3: leave it out")
    max_new_tokens = NEW_TOKENS.get(method, 64) if max_new_tokens is None else max_new_tokens
    do_sample = for_head if do_sample is None else do_sample
    check_int("--limit", DEMO_PROMPTS if limit is None else limit, 1)
    check_int("--seed", seed, 0)
    check_int("--max-new-tokens", max_new_tokens, 1, MOST_NEW_TOKENS)
    check_int("--batch-size", batch_size, 1, MOST_ROWS)
    if lam is not None and not for_head:
        raise ValueError("--lambda is for heads, not for eagle3: leave it out")
    if mix is not None and method != "specdec":
        raise ValueError(f"--mix is for --for specdec, not {method}: leave it out")
    check_sampling(do_sample, temperature, top_k, top_p)
    check_prompts(prompts, model)
    source = demo_source(seed) if prompts == DEMO else Path(prompts).name
    if prompts == DEMO:
        texts = demo_texts(DEMO_PROMPTS if limit is None else limit, seed)
    else:
        texts = read_texts(prompts, limit)
    decoding = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    common = decoding | {"new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
    if drafter is not None:
        from ..drafters.eagle3 import PLACES

        common["places"] = PLACES
    work = _for_head(method, mix, LAMBDA if lam is None else lam, common) if for_head else _for_eagle3(states, common)
    made = MadeWith(model, assistant, dtype=dtype, chat=chat, drafter=drafter)
    target, draft, tokenizer = load_made(made, dtype, device, overrides)
    if chat:
        written = chats(tokenizer, [t.prompt for t in texts])
        texts = [Text(text, t.continuation) for text, t in zip(written, texts, strict=True)]
    with going_on(out):
        said = work(target, draft, tokenizer, texts, out, resume, source)
    remember(out, made)
    show(f"{out}: {said}")


Work = Callable[[Any, Any, Any, list[Text], Path, bool, str], str]  # what was collected, in words


def _for_head(method: str, mix: float | None, lam: float, common: dict[str, Any]) -> Work:
    from datasets import load_from_disk

    from ..methods.sprinter.collect import collect as run
    from ..methods.sprinter.collect_settings import CollectSettings

    settings = CollectSettings(lam=lam, **common, **_recorded(method, mix))

    def work(target: Any, draft: Any, tokenizer: Any, texts: list[Text], out: Path, resume: bool, source: str) -> str:
        run(target, draft, tokenizer, texts, out, settings, resume=resume, source=source)
        return f"{len(load_from_disk(str(out)))} tokens of {len(texts)} prompts, with a data card"

    return work


def _for_eagle3(states: bool, common: dict[str, Any]) -> Work:
    from ..methods.eagle3.collect import CollectSettings
    from ..methods.eagle3.collect import collect as run

    settings = CollectSettings(states=states, **common)

    def work(target: Any, draft: Any, tokenizer: Any, texts: list[Text], out: Path, resume: bool, source: str) -> str:
        run(target, tokenizer, [text.prompt for text in texts], out, settings, resume=resume, source=source)
        return f"answers to {len(texts)} prompts, with {'their' if states else 'no'} states"

    return work


def _recorded(method: str, mix: float | None) -> dict[str, Any]:
    """The settings in which the methods' data differ: whose state is kept, and what the rows go on from."""
    from ..artifacts.features import FeatureSpec

    kind = registry.find_method(method).head_kind
    assert kind is not None and kind.position is not None, "the entries of METHODS name both"
    return (
        {}
        if kind.position == "predicting"
        else {"features": FeatureSpec(position=kind.position), "mix": MIX if mix is None else mix}
    )
