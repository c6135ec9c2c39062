"""The cache that the caller passes: what it must be, so that a round can be forgotten and the text goes on where it ends."""

from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import StaticLayer

from ..models.introspection import base_of
from ..models.probe import crops, keeps_states_alone


def layers_of(cache: Any) -> list[Any] | None:
    """The layers that hold a text's keys and values; None for something that has none."""
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", None)


def why_not_croppable(cache: Any) -> str | None:
    """Why tokens at the end of `cache` cannot be forgotten again, or None if they can."""
    if keeps_states_alone(cache):
        return f"a {type(cache).__name__} of recurrent states alone cannot be rolled back, as a cache must be here"
    if not crops(cache):
        return f"a {type(cache).__name__} cannot be rolled back, as a cache must be here"
    layers = layers_of(cache) or []
    # They have DynamicLayer's `crop`, which cuts the last tokens alone that are not quantised yet.
    kinds = [type(layer) for layer in layers if any("Quantized" in kind.__name__ for kind in type(layer).__mro__)]
    # One with a window, unless the whole text fits into it.
    kinds += [type(layer) for layer in layers if isinstance(layer, StaticLayer) and not layer.is_croppable]
    return f"a cache of {kinds[0].__name__}s cannot be rolled back, as it must be here" if kinds else None


def refuse_windows(cache: Any, own: DynamicCache, name: str) -> None:
    """Refuse a cache whose layers forget what the target still sees, as one made by another model's config does.

    `own`: the target's. `name`: by which it was passed.
    """
    for i, (layer, its) in enumerate(zip(layers_of(cache) or [], own.layers, strict=False)):
        window, seen = getattr(layer, "sliding_window", None), getattr(its, "sliding_window", None)
        if window is not None and window != seen:
            sees = "the whole text" if seen is None else f"{seen} tokens"
            raise ValueError(
                f"{name} keeps {window} tokens in layer {i}, where the target sees {sees}: pass DynamicCache(config=model.config)"
            )


def refuse_uncroppable(cache: Any, name: str) -> None:
    """Refuse a cache, passed by this name, that cannot be rolled back. Raises: `ValueError`."""
    reason = why_not_croppable(cache)
    if reason is not None:
        other = "" if keeps_states_alone(cache) else "pass a DynamicCache, or "
        raise ValueError(f"{name}: {reason}: {other}leave it out")


def check_passed(model: Any, cache: Any, input_ids: torch.Tensor, longest: int, name: str) -> None:
    """Refuse a cache that cannot be rolled back, that belongs to other rows or another model, that holds no less than the text, or is too small.

    `longest`: what the text may come to, in tokens. `name`: by which the cache was passed.
    """
    refuse_uncroppable(cache, name)
    if base_of(model).config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
        # Such a model would write both attentions' states into one cache, one behind the other.
        raise ValueError(
            f"{name}: {type(base_of(model)).__name__} is an encoder-decoder and keeps two caches: pass "
            f"EncoderDecoderCache(DynamicCache(), DynamicCache()), got a {type(cache).__name__}"
        )
    base, filled = (
        base_of(model),
        [layer for layer in layers_of(cache) or [] if getattr(layer, "keys", None) is not None],
    )
    filled = [layer for layer in filled if layer.keys.dim() == 4]
    rows = {layer.keys.shape[0] for layer in filled} - {len(input_ids)}
    if rows:
        raise ValueError(f"{name} holds {rows.pop()} rows, input_ids has {len(input_ids)}: they must agree")
    config = base.config.get_text_config(decoder=True)
    own = config.num_hidden_layers
    refuse_windows(cache, DynamicCache(config=config), name)
    if len(filled) > own:
        raise ValueError(f"{name} holds {len(filled)} layers, the target has {own}: pass a cache of this model's")
    other = {layer.keys.dtype for layer in filled if isinstance(layer, StaticLayer)} - {base.dtype}
    if other and not torch.is_autocast_enabled(base.device.type):  # stock ends there in an error of dtypes
        raise ValueError(
            f"{name} is laid out in {str(other.pop()).removeprefix('torch.')} and the target computes in {str(base.dtype).removeprefix('torch.')}: "
            "pass a cache of this model's"
        )
    room = min(
        (layer.max_cache_len for layer in layers_of(cache) or [] if isinstance(layer, StaticLayer)), default=longest
    )
    if room < longest - 1:  # the last token is never written
        raise ValueError(f"{name} has room for {room} tokens, and this text may come to {longest}: pass a larger one")
    held = int(cache.get_seq_length())
    if (
        held >= input_ids.shape[1] and not base.config.is_encoder_decoder
    ):  # counted with padding, as `generate` lays it out
        raise ValueError(
            f"{name} holds {held} tokens, input_ids has {input_ids.shape[1]}: pass the whole text, old and new"
        )
