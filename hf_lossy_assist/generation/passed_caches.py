"""Caches that the caller passes: which ones a round goes on from."""

from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..batch.rows import Rows
from ..models.facts import facts_of
from ..models.introspection import base_of
from ..models.probe import keeps_states_alone
from ..models.recurrent_layers import layers_of


def adopts(model: PreTrainedModel, cache: Cache, rows: Rows, name: str) -> bool:
    """Return whether a round goes on from the contents of a passed cache: not if it is empty.

    `name`: the argument's name. Raises: `ValueError`, one line, for a cache that rows cannot take, of other rows, or of another model.
    """
    reason = _why_not_copied(model, cache)
    if reason is not None:
        raise ValueError(f"{name}: a {type(cache).__name__} cannot be copied into rows ({reason}): leave it out")
    base, tokens = base_of(model), int(cache.get_seq_length())
    count = {
        len(layer.keys) for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()
    }
    if count - {len(rows.row_id_list)}:
        raise ValueError(f"{name} holds {count.pop()} rows, input_ids has {len(rows.row_id_list)}: they must agree")
    for i, (layer, expected) in enumerate(zip(cache.layers, DynamicCache(config=base.config).layers, strict=False)):
        window, seen = getattr(layer, "sliding_window", None), getattr(expected, "sliding_window", None)
        if window is not None and window != seen:  # made from another model's config
            raise ValueError(
                f"{name} keeps {window} tokens in layer {i}, the target {seen or 'all'}: pass DynamicCache(config=model.config)"
            )
    if tokens >= rows.width:
        raise ValueError(f"{name} holds {tokens} tokens, input_ids has {rows.width}: pass the whole text, old and new")
    first = 0 if rows.moved else tokens
    if tokens and rows.unknown is not None and bool(rows.unknown[:, first:].any()):
        raise ValueError(
            f"{name} holds {tokens} tokens, and inputs_embeds behind them are of no token: leave {name} out"
        )
    return tokens > 0


def _why_not_copied(model: PreTrainedModel, cache: Cache) -> str | None:
    """Return why a Transformers cache cannot be copied into a `RowCache`; None if it can."""
    config = base_of(model).config.get_text_config(decoder=True)
    given, layers = getattr(cache, "layers", None), DynamicCache(config=config).layers
    if base_of(model).config.is_encoder_decoder or given is None:
        return "only a decoder's keys and values can"
    if keeps_states_alone(cache):
        return "it counts no tokens"
    if facts_of(model).keeps_states:
        return None if list(map(type, given)) == list(map(type, layers)) else "it has other layers than the target"
    if getattr(cache, "offloading", False):
        return "it is offloaded"
    kinds = {type(layer).__name__ for layer in given if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    other = len(given) not in (0, len(layers)) or layers_of(config) is None
    return f"it has {', '.join(sorted(kinds)) or 'other layers than the target'}" if kinds or other else None
