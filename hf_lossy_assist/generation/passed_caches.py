"""Checks of caches that the caller passes: those without rollback or with another text raise an error."""

from collections.abc import Mapping

import torch
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ..models.compat import passed_as
from ..models.introspection import base_of
from ..models.probe import crops, keeps_states_alone


def refuse_cache(kwargs: Mapping[str, object], decoder_only: bool) -> None:
    """Raise an error for an object that is no cache, or a cache that cannot be rolled back."""
    name = passed_as(kwargs)
    if name is None:
        return
    cache = kwargs[name]
    if not isinstance(cache, Cache):
        raise TypeError(f"{name}: expected a Cache such as DynamicCache, got {type(cache).__name__}")
    _refuse_uncroppable(cache, name)
    if decoder_only and isinstance(cache, EncoderDecoderCache):
        raise TypeError(f"{name}: an EncoderDecoderCache is for encoder-decoders; pass a DynamicCache")


def _refuse_uncroppable(cache: Cache, name: str) -> None:
    """Raise `ValueError` for a cache, passed as `name`, that cannot be rolled back."""
    layers = _find_layers(cache)
    # Quantised layers inherit `crop` from DynamicLayer, which cuts only tokens that are not quantised yet.
    kinds = [type(layer) for layer in layers if any("Quantized" in kind.__name__ for kind in type(layer).__mro__)]
    # Static layers with a sliding window, unless the whole text fits into it.
    kinds += [type(layer) for layer in layers if isinstance(layer, StaticLayer) and not layer.is_croppable]
    rolled_back, other = "cannot be rolled back, as a cache must be here", "pass a DynamicCache, or "
    if keeps_states_alone(cache):
        reason, other = f"a {type(cache).__name__} of recurrent states alone {rolled_back}", ""
    elif not crops(cache):
        reason = f"a {type(cache).__name__} {rolled_back}"
    elif kinds:
        reason = f"a cache of {kinds[0].__name__}s {rolled_back}"
    else:
        return
    raise ValueError(f"{name}: {reason}: {other}leave it out")


def _find_layers(cache: Cache) -> list[CacheLayerMixin]:
    """Return the layers with the text's keys and values."""
    return getattr(getattr(cache, "self_attention_cache", cache), "layers", None) or []


def check_passed_cache(model: PreTrainedModel, cache: Cache, input_ids: torch.Tensor, longest: int, name: str) -> None:
    """Raise an error for a cache with other rows or of another model, one that already holds the whole text, or one that is too small.

    `longest`: maximum length of the text in tokens. `name`: the argument's name.
    """
    _refuse_uncroppable(cache, name)
    base, layers = base_of(model), _find_layers(cache)
    if base.config.is_encoder_decoder and not isinstance(cache, EncoderDecoderCache):
        # The model would append the states of both attentions in one cache.
        raise ValueError(
            f"{name}: {type(base).__name__} is an encoder-decoder and keeps two caches: pass "
            f"EncoderDecoderCache(DynamicCache(), DynamicCache()), got a {type(cache).__name__}"
        )
    keys = [layer.keys for layer in layers if getattr(layer, "keys", None) is not None and layer.keys.dim() == 4]
    rows = {key.shape[0] for key in keys} - {len(input_ids)}
    if rows:
        raise ValueError(f"{name} holds {rows.pop()} rows, input_ids has {len(input_ids)}: they must agree")
    config = base.config.get_text_config(decoder=True)
    for i, (layer, expected) in enumerate(zip(layers, DynamicCache(config=config).layers, strict=False)):
        window, seen = getattr(layer, "sliding_window", None), getattr(expected, "sliding_window", None)
        if window is not None and window != seen:  # made from another model's config
            sees = "the whole text" if seen is None else f"{seen} tokens"
            raise ValueError(
                f"{name} keeps {window} tokens in layer {i}, where the target sees {sees}: pass DynamicCache(config=model.config)"
            )
    if len(keys) > config.num_hidden_layers:
        raise ValueError(
            f"{name} holds {len(keys)} layers, the target has {config.num_hidden_layers}: pass a cache of this model's"
        )
    static = [layer for layer in layers if isinstance(layer, StaticLayer)]
    other = {layer.keys.dtype for layer in static if getattr(layer, "keys", None) is not None} - {base.dtype}
    if other and not torch.is_autocast_enabled(
        base.device.type
    ):  # where Transformers' loop fails with an error about dtypes
        raise ValueError(
            f"{name} is laid out in {str(other.pop()).removeprefix('torch.')} and the target computes in {str(base.dtype).removeprefix('torch.')}: "
            "pass a cache of this model's"
        )
    room = min((layer.max_cache_len for layer in static), default=longest)
    if room < longest - 1:  # the last token is never cached
        raise ValueError(f"{name} has room for {room} tokens, and this text may come to {longest}: pass a larger one")
    held = int(cache.get_seq_length())
    if held >= input_ids.shape[1] and not base.config.is_encoder_decoder:  # counted with padding, as in `generate`
        raise ValueError(
            f"{name} holds {held} tokens, input_ids has {input_ids.shape[1]}: pass the whole text, old and new"
        )


def refuse_unknown(unknown: torch.Tensor | None, cache: Cache, name: str) -> None:
    """Raise `ValueError` for embeddings without token after the tokens of a cache, passed as `name`. `unknown`: see `PromptLayout`."""
    held = 0 if unknown is None else int(cache.get_seq_length())
    if unknown is not None and bool(unknown[:, held:].any()):
        raise ValueError(
            f"{name} holds {held} places, and behind them inputs_embeds are those of no token, which only a prompt without a cache may have: "
            f"leave {name} out"
        )
