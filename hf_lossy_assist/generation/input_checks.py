"""Checks of a call's inputs without which a text would silently be another than `generate`'s; other mistakes are Transformers' and torch's to report."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..models.facts import CACHE, CACHE_NAMES
from ..models.introspection import base_of, tokens_known, vocabulary_of
from ..models.multimodal import EMBEDDINGS, is_multimodal
from ..validation import shown
from .arguments import Settings, refuse_modes


GENERATE = frozenset(inspect.signature(GenerationMixin.generate).parameters)
LABELS = "labels"  # passed by Trainer, ignored by `generate`
# Arguments of `generate` beyond its signature, the generation config and the model's forward.
EXTRA_NAMES = frozenset(
    "tokenizer assistant_tokenizer input_ids inputs_embeds attention_mask trust_remote_code".split()
) | {
    LABELS,
    *CACHE_NAMES,
}
# Inputs from `generate` that a decoder on a `RowCache` accepts.
TEXT_INPUTS = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "token_type_ids"}


def refuse_arguments(model: PreTrainedModel, kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise `ValueError` or `TypeError` for arguments that this loop does not support, before Transformers prepares anything."""
    settings = Settings(kwargs, config, model.generation_config)
    ids = kwargs.get("inputs") if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    _refuse_unknown(model, kwargs, config)
    refuse_modes(settings)
    if not isinstance(kwargs.get("logits_to_keep") or 0, int):
        raise TypeError("lossy_policy decides which logits a forward computes: leave logits_to_keep out")
    if ids is not None and model.main_input_name == "input_ids":
        refuse_prompt(model, ids)
    if kwargs.get("decoder_input_ids") is not None:
        _refuse_outside("decoder_input_ids", kwargs["decoder_input_ids"], "decoder", vocabulary_of(model))
    prompt = ids if kwargs.get(EMBEDDINGS) is None else kwargs[EMBEDDINGS][..., 0]
    if prompt is not None and model.main_input_name == "input_ids":
        refuse_mask(prompt, kwargs.get("attention_mask"), "attention_mask")
    copies = settings["num_return_sequences"] or 1
    if kwargs.get("streamer") is not None and prompt is not None and copies * len(prompt) > 1:
        raise ValueError("a streamer serves one row; pass prompts one by one, or leave streamer out")


def _refuse_unknown(model: PreTrainedModel, kwargs: Mapping[str, object], config: GenerationConfig) -> None:
    """Raise `TypeError` for names that neither `generate` nor the model has, which models with `**kwargs` would take in silence."""
    names = GENERATE | EXTRA_NAMES | vars(config).keys()
    for kind in {type(model), type(base_of(model))}:  # Whisper's `generate` has additional arguments
        calls = (getattr(kind, name, None) for name in ("forward", "prepare_inputs_for_generation", "generate"))
        names |= frozenset().union(*(_parameters(call) for call in calls if call is not None))
    for name, value in kwargs.items():
        if name not in names and not name.startswith("decoder_") and value is not None:
            # `cache` is the name in newer releases of Transformers.
            close = [CACHE] if name == "cache" else difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ": leave it out"
            raise TypeError(f"generate: this model takes no argument {shown(name)}{hint}")


@functools.cache
def _parameters(call: Callable[..., object]) -> frozenset[str]:
    return frozenset(inspect.signature(call).parameters) - {"self", "kwargs", "args"}


# -- tensors --------------------------------------------------------------------------------------------------------------


def refuse_prompt(model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Raise an error for `input_ids` (B, length) that the target cannot embed."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        got = f"{ids.dtype} of {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(
            f"input_ids: expected token ids of shape (batch, length), got {got}: generate(**tokenizer(texts, return_tensors='pt'))"
        )
    _refuse_outside("input_ids", ids, "target", tokens_known(model))


def _refuse_outside(name: str, ids: torch.Tensor, owner: str, size: int) -> None:
    """Raise `ValueError` for token ids outside a vocabulary of size `size`."""
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= size:
        outside = lowest if lowest < 0 else highest
        raise ValueError(f"{name}: token {outside} is outside the {owner}'s vocabulary of {size}")


def refuse_types(model: PreTrainedModel, types: torch.Tensor | None) -> None:
    """Raise `ValueError` for `token_type_ids` of a text that a model reads; vision models need none for text, where all are 0."""
    reads = "token_type_ids" in _parameters(type(base_of(model)).forward) and not is_multimodal(model)
    if types is not None and (reads or bool(types.any())):
        raise ValueError(
            f"token_type_ids: {type(base_of(model)).__name__} reads them, which this loop does not feed: leave them or lossy_policy out"
        )


def refuse_mask(ids: torch.Tensor, mask: torch.Tensor | None, name: str) -> None:
    """Raise `ValueError` for a mask (B, width) that does not match the prompt `ids`."""
    if mask is None:
        return
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}: they must agree")
    hidden = mask == 0
    # One device sync for both, (2, B).
    whole, neither = torch.stack([hidden.all(dim=1), (~hidden & (mask != 1)).any(dim=1)]).tolist()
    if any(neither):
        raise ValueError(f"{name}: expected 1 for a token and 0 for one that does not count, got other numbers")
    if any(whole):
        raise ValueError(f"{name} hides all of row {whole.index(True)}: every row needs a token")


def mask_name(model: PreTrainedModel) -> str:
    """Return the name of the text's mask: in an encoder-decoder, `attention_mask` is for the encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Raise `ValueError` for positions (…, B, width) that do not count 0, 1, … over the visible tokens, as models on rows do."""
    if positions is None:
        return
    seen = torch.ones_like(input_ids) if mask is None else mask.ne(0).long().to(input_ids.device)
    fits = positions.shape[-1] == input_ids.shape[1]
    if not fits or not bool(((positions.to(input_ids.device) == seen.cumsum(dim=1) - 1) | (seen == 0)).all()):
        raise ValueError("lossy_policy works positions out from attention_mask, got others: leave position_ids out")


# -- more than text -------------------------------------------------------------------------------------------------------


def find_other_inputs(kwargs: Mapping[str, object], config: GenerationConfig) -> dict[str, object]:
    """Return the caller's non-text inputs of a model, by name."""
    settings = GENERATE | EXTRA_NAMES | TEXT_INPUTS | vars(config).keys()
    return {name: value for name, value in kwargs.items() if value is not None and name not in settings}


def find_non_text(inputs: Mapping[str, object], *ignored: str) -> list[str]:
    """Return the names of the non-text inputs of a model, but for the `ignored`."""
    return [
        name
        for name, value in inputs.items()
        # `generate` passes `mm_encoder_outputs` to every multimodal model, empty for text.
        if name not in (*TEXT_INPUTS, *ignored)
        and value is not None
        and not (isinstance(value, dict) and all(entry is None for entry in value.values()))
    ]


def refuse_extra_inputs(inputs: Mapping[str, object], *ignored: str) -> None:
    """Raise `ValueError` for non-text inputs, such as images, of a model that runs on a `RowCache`."""
    for name in find_non_text(inputs, *ignored):
        raise ValueError(
            f"lossy_policy handles text alone, and the model was also given {name}: leave {name} or lossy_policy out"
        )
