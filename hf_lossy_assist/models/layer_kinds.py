"""Which layer of a `RowCache` stands for which of Transformers' own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .inspect import base_of
from .row_layer import RowLayer
from .row_states import RowStates, RowStatesAndKeys


Dummy: Any = getattr(cache_utils, "DummyLayer", object)  # earlier releases have none


class NoStates(Dummy):
    """A layer that keeps nothing, such as an MLP's."""

    def __init__(self, owner: Any, number: int):
        super().__init__()
        self.is_initialized = False

    def be_row(self, b: int, other: Any) -> None: ...
    def be_first(self, tokens: int, other: Any) -> None: ...
    def select(self, rows: torch.Tensor) -> None: ...
    def have(self, rows: int, like: Any) -> None: ...
    def copy_row(self, b: int, a: int, tokens: int, other: Any) -> None: ...
    def hand_out(self, out: Cache, length: int, seen: torch.Tensor | None) -> None: ...
    def adopt(self, layer: Any, columns: torch.Tensor) -> None: ...


KINDS: dict[type, type] = {
    DynamicLayer: RowLayer,
    DynamicSlidingWindowLayer: RowLayer,
    LinearAttentionLayer: RowStates,
    LinearAttentionAndFullAttentionLayer: RowStatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: RowStatesAndKeys,
    Dummy: NoStates,
}


def layers_of(config: Any) -> list[Callable[[Any, int], Any]] | None:
    """What makes each layer of a `RowCache` for a model of this config, or None where one is of no kind that is known."""
    layers = DynamicCache(config=config).layers
    if not all(type(layer) in KINDS for layer in layers):
        return None
    return [
        partial(KINDS[type(its)], states=its.number_of_states)
        if isinstance(its, LinearAttentionCacheLayerMixin)
        else KINDS[type(its)]
        for its in layers
    ]


def why_not_adopted(model: Any, cache: Any, rows: int) -> str | None:
    """Why a cache of Transformers' own, of `rows` texts, is not copied into a `RowCache` to be gone on with, or None if it is.

    That of one text of keys and values is gone on with where it is, and grows for the caller.
    """
    own = getattr(cache, "layers", [])
    layers = DynamicCache(config=base_of(model).config.get_text_config(decoder=True)).layers
    if keeps_states(model):
        same = [type(its) for its in own] == [type(its) for its in layers]
        return None if same else "its layers are of other kinds than the target's"
    if rows == 1:
        return "it is one text's"
    if not own or cache.get_seq_length() == 0:
        return "it is empty, and would be filled for one row alone"
    kinds = {type(its).__name__ for its in own if type(its) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if kinds or len(own) != len(layers) or layers_of(base_of(model).config.get_text_config(decoder=True)) is None:
        return f"it is a {type(cache).__name__} of {', '.join(sorted(kinds)) or 'other layers than the target has'}"
    if getattr(cache, "offloading", False):
        return "it is offloaded"
    return None


def keeps_states(model: Any) -> bool:
    """Whether a model's layers keep more than keys and values, all in kinds that are known."""
    layers = layers_of(base_of(model).config.get_text_config(decoder=True))
    return layers is not None and keep_states(layers)


def keep_states(layers: Sequence[Any]) -> bool:
    """Whether any of these keeps more than keys and values."""
    return any(isinstance(kind, partial) for kind in layers)
