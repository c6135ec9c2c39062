"""What the models of a call are fed: their caches where Transformers keeps them, and inputs that only one kind of model has."""

import copy
import inspect
from typing import Any

import torch
from transformers import GenerationConfig

from .checks import refuse_mask
from .models import CroppingModel, RowModel, base_of
from .sequences import Rows
from .token_types import shared_types
from .trials import crops, why_not_alone


DROP = "leave lossy_policy out"


def learned_prompt(model: Any) -> bool:
    """True for PEFT's prompt learning; its wrapper hands `generate` on to the model inside and swaps one method of it."""
    swapped = getattr(model, "__dict__", {}).get("prepare_inputs_for_generation")
    inside = getattr(swapped, "__self__", model) is not model
    return inside or getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)


def rowwise(model: Any, target: Any, rows: Rows, vocabulary: int | None = None) -> RowModel:
    """`model` on a cache of rows; what else the target is fed, a draft and a companion of its kind are fed too."""
    types = rows.types if model is target else shared_types(model, target, rows.types)
    return RowModel(model, len(rows.index), rows.max_length, vocabulary, types)


def cropping(
    model: Any, rows: Rows, model_kwargs: dict[str, Any], reason: str, given: bool = False, way_out: str = DROP
) -> CroppingModel:
    """`reason`: why not a `RowCache`; `given`: the caller passed the cache; `way_out`: what to do if it cannot be rolled back either."""
    name, cache = type(base_of(model)).__name__, model_kwargs.get("past_key_values")
    if given and not crops(cache):
        raise ValueError(
            f"{name} needs a cache that can be rolled back, got {type(cache).__name__}: leave past_key_values out"
        )
    cannot = why_not_alone(model, model_kwargs)
    if cannot is not None:
        raise ValueError(f"{name} cannot be decoded in blocks ({cannot}): {way_out}")
    if len(rows.index) > 1:
        raise ValueError(
            f"{name} can only roll back one row ({reason}); this batch has {len(rows.index)}: pass prompts one by one"
        )
    if (
        cache is not None and cache.get_seq_length() >= rows.width and not base_of(model).config.is_encoder_decoder
    ):  # counted with padding, as Transformers lays a cache out
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens, input_ids has {rows.width}: pass the whole text, old and new"
        )
    whole = model_kwargs.get(mask_name(model)) is not None  # a draft is not told of the tokens that are hidden
    return CroppingModel(model, model_kwargs, rows.ids[:, : rows.width] if whole else rows.prompts()[0][None])


def mask_name(model: Any) -> str:
    """The argument that masks the text: an encoder-decoder's `attention_mask` masks its encoder's input."""
    return "decoder_attention_mask" if base_of(model).config.is_encoder_decoder else "attention_mask"


def hidden(input_ids: torch.Tensor, mask: torch.Tensor | None) -> tuple[list[int], torch.Tensor | None]:
    """How many tokens of each row `mask` hides, and, where they are not all on the left, each row's columns with those first.

    The order is (B, width) int64. Raises `ValueError` or `TypeError` for a mask that is none of these rows.
    """
    if mask is None:
        return [0] * input_ids.shape[0], None
    refuse_mask(input_ids, mask)
    seen = mask.ne(0).long().to(input_ids.device)
    order = seen.argsort(dim=1, stable=True) if bool((seen.diff(dim=1) < 0).any()) else None
    return (seen == 0).sum(dim=1).tolist(), order


def assistant_inputs(
    assistant: Any,
    rows: Rows,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
) -> dict[str, Any]:
    """What `generate` prepared for the target, prepared for a draft that runs on Transformers' own cache."""
    base = base_of(assistant)
    own: dict[str, Any] = {"use_cache": True}
    if base.config.is_encoder_decoder:
        assert inputs_tensor is not None, "generate gives it to every callable that names it"
        encoder, mask = base.get_encoder(), model_kwargs.get("attention_mask")
        inputs = {base.main_input_name: inputs_tensor.to(base.device)}
        if mask is not None:
            own["attention_mask"] = mask.to(base.device)
            if "attention_mask" in inspect.signature(encoder.forward).parameters:
                inputs["attention_mask"] = own["attention_mask"]
        own["encoder_outputs"] = encoder(**inputs, return_dict=True)
    base._prepare_cache_for_generation(copy.deepcopy(config), own, None, len(rows.index), rows.max_length)
    return own
