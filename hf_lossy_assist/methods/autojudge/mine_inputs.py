"""What mining is given, made ready: prompts as tokens, the processors and end tokens of decoding; what cannot be mined is refused."""

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig, LogitsProcessorList

from ...drafters.hidden_state import HiddenStateDrafter, refuse_models
from ...models.introspection import base_of, vocabulary_of
from ...models.probe import why_not_prefixes
from ...models.quirks.rope import ChangingRope
from ...tasks.endpoint import served
from .continuing import decoding_processors
from .mine_settings import MineSettings
from .reading import why_not_searched


def local(target: Any, draft: Any) -> Any:
    """The model whose settings and vocabulary count: the target, or where that is behind a server the draft."""
    return draft if served(target) else target


def refuse_drafter(target: Any, draft: HiddenStateDrafter) -> None:
    """Refuse a drafter on the target's states that cannot be asked for each token of a response at once. Raises: `ValueError`."""
    if served(target):
        raise ValueError(
            f"{draft.kind} reads the target's hidden states, which no server gives: mine with the target here, or with a draft model"
        )
    if not draft.drafts_each_place:
        raise ValueError(f"{draft.kind} fills in a block for each token: mine with an EAGLE drafter or a draft model")
    refuse_models("mining", target, draft)


def prepared(
    target: Any, draft: Any, tokenizer: Any, texts: Sequence[str], settings: MineSettings
) -> tuple[list[list[int]], LogitsProcessorList, set[int]]:
    """The prompts' tokens, and the processors and end tokens that decoding uses; refuses what cannot be mined."""
    if served(target) and settings.do_sample:
        raise ValueError("a target behind a server is mined greedily: its random numbers are its own")
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    for number, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
        if not prompt or not text.strip():
            raise ValueError(f"problem {number} has an empty prompt")
    longest, models = max(map(len, prompts)), [("target", target), ("draft", draft)]
    if isinstance(draft, HiddenStateDrafter):
        refuse_drafter(target, draft)
        models = models[:1]
    elif settings.places > 1:
        raise ValueError(
            f"places = {settings.places} is for drafters on the target's states, and a draft model has none: leave it at 1"
        )
    models = [(name, model) for name, model in models if not served(model)]
    for name, model in models:
        reason = why_not_prefixes(model) if isinstance(draft, HiddenStateDrafter) else why_not_searched(model)
        if reason is not None:
            raise ValueError(f"mining needs models that run in batches; the {name} does not: {reason}")
    sizes = [vocabulary_of(model) for _, model in models]
    if abs(sizes[0] - sizes[-1]) > 0.02 * max(sizes):  # padding differs by less
        raise ValueError(
            f"the target has {sizes[0]} token ids, the draft {sizes[-1]}: mining needs a draft with the target's tokenizer"
        )
    for name, model in models:
        room = getattr(base_of(model).config.get_text_config(decoder=True), "max_position_embeddings", None)
        if room is not None and longest + settings.max_new_tokens > room:
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with max_new_tokens={settings.max_new_tokens} is more than the "
                f"{room} positions of the {name}: choose fewer new tokens or shorter prompts"
            )
        rope = ChangingRope.of(base_of(model), 1)
        if rope is not None and longest + settings.max_new_tokens > rope.changes_after:
            raise ValueError(
                f"the longest prompt has {longest} tokens, which with max_new_tokens={settings.max_new_tokens} is more than the "
                f"{rope.changes_after} after which the {name}'s RoPE changes: choose fewer new tokens or shorter prompts"
            )
    config = GenerationConfig(max_new_tokens=settings.max_new_tokens, pad_token_id=0, **settings.decoding())
    return prompts, *decoding_processors(local(target, draft), config)
