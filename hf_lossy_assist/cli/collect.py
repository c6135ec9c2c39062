"""`hf-lossy collect`: data for a head on the draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from .. import registry
from ..tasks.prompts import PromptText
from ..terminal import show
from ..validation import MOST_NEW_TOKENS, MOST_ROWS, check_int, nearest
from ._models import load_models, texts_of, with_template
from ._options import (
    DEMO,
    DEMO_PROMPTS,
    Chat,
    LoadOptions,
    ModelOptions,
    Out,
    Prompts,
    RunOptions,
    SamplingOptions,
    Seed,
    Temperature,
    TopK,
    TopP,
    check_prompts,
    command,
    needs,
)
from ._provenance import names_of, remember
from ._runs import check_out, end_after, going_on


MIX, LAMBDA = 0.15, 1.2
METHODS = ("sprinter", "specdec", "eagle3")  # what is trained on this data
NEW_TOKENS = {"eagle3": 256}  # of an answer; 64 of a row for a head


@command
def collect(
    *,
    out: Out,
    models: ModelOptions,
    prompts: Prompts = DEMO,
    method: Annotated[
        str,
        "--for",
        "a head: sprinter (four rows a prompt) or specdec (one); or a drafter on the target's states: eagle3",
    ] = METHODS[0],
    mix: Annotated[
        float | None, f"share of draft tokens that the target's replace, for specdec (default: {MIX})"
    ] = None,
    lam: Annotated[
        float | None, "--lambda", f"label a token acceptable where q(x) ≤ λ·p(x) (default: {LAMBDA})"
    ] = None,
    limit: Annotated[int | None, "most prompts to use (default: all; 64 of the demo)"] = None,
    max_new_tokens: Annotated[int | None, "most new tokens of each row (default: 64; 256 for eagle3)"] = None,
    states: Annotated[
        bool, "--states/--no-states", "for eagle3: keep the target's states on disk, or work them out again each time"
    ] = True,
    batch_size: Annotated[int, "prompts at a time"] = 8,
    seed: Seed = 0,
    running: RunOptions,
    do_sample: Annotated[
        bool | None,
        "--do-sample/--greedy",
        "sample, or take the likeliest token each time (default: sample; greedy for eagle3)",
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    loading: LoadOptions,
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
    end_after(running.max_hours)
    needs("train", "accelerate", "datasets")
    check_out(out, running.resume)
    if method not in METHODS:
        raise ValueError(f"--for: {nearest('method', method, METHODS)}")
    for_head = method != "eagle3"
    if for_head:
        models.check()
    for name, given in (("--assistant", models.assistant), ("--drafter", models.drafter)):
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
    decoding = {"do_sample": do_sample, "temperature": temperature, "top_k": top_k, "top_p": top_p}
    SamplingOptions(do_sample=do_sample, temperature=temperature, top_k=top_k, top_p=top_p).check()
    check_prompts(prompts, models.model)
    texts, source = texts_of(prompts, limit, DEMO_PROMPTS, seed)
    common = decoding | {"new_tokens": max_new_tokens, "batch_size": batch_size, "seed": seed}
    if models.drafter is not None:
        from ..drafters.eagle import PLACES

        common["places"] = PLACES
    work = _for_head(method, mix, LAMBDA if lam is None else lam, common) if for_head else _for_eagle3(states, common)
    names = names_of(models, dtype=loading.dtype, chat=chat)
    target, draft, tokenizer = load_models(names, loading)
    if chat:
        written = with_template(tokenizer, [t.prompt for t in texts])
        texts = [PromptText(text, t.continuation) for text, t in zip(written, texts, strict=True)]
    with going_on(out):
        summary = work(target, draft, tokenizer, texts, out, running.resume, source)
    remember(out, names)
    show(f"{out}: {summary}")


Work = Callable[[Any, Any, Any, list[PromptText], Path, bool, str], str]  # what was collected, in words


def _for_head(method: str, mix: float | None, lam: float, common: dict[str, Any]) -> Work:
    from datasets import load_from_disk

    from ..methods.sprinter.collect import collect as run
    from ..methods.sprinter.collect_runner import CollectSettings

    settings = CollectSettings(lam=lam, **common, **_recorded(method, mix))

    def work(
        target: Any, draft: Any, tokenizer: Any, texts: list[PromptText], out: Path, resume: bool, source: str
    ) -> str:
        run(target, draft, tokenizer, texts, out, settings, resume=resume, source=source)
        return f"{len(load_from_disk(str(out)))} tokens of {len(texts)} prompts, with a data card"

    return work


def _for_eagle3(states: bool, common: dict[str, Any]) -> Work:
    from ..methods.eagle3.collect import CollectSettings
    from ..methods.eagle3.collect import collect as run

    settings = CollectSettings(states=states, **common)

    def work(
        target: Any, draft: Any, tokenizer: Any, texts: list[PromptText], out: Path, resume: bool, source: str
    ) -> str:
        run(target, tokenizer, [text.prompt for text in texts], out, settings, resume=resume, source=source)
        return f"answers to {len(texts)} prompts, with {'their' if states else 'no'} states"

    return work


def _recorded(method: str, mix: float | None) -> dict[str, Any]:
    """Give the settings in which the methods' data differ: whose state is kept, and what the rows go on from."""
    from ..artifacts.features import FeatureSpec

    kind = registry.find_method(method).head_kind
    assert kind is not None and kind.position is not None, "the entries of METHODS name both"
    return (
        {}
        if kind.position == "predicting"
        else {"features": FeatureSpec(position=kind.position), "mix": MIX if mix is None else mix}
    )
