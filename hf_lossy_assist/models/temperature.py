"""Attention temperature by the cache's length (Llama 4): in a batch each row's tokens get the one of their own positions.

Layers without RoPE multiply their queries by 1 + a·log(1 + ⌊(n + 1) / s⌋) for the token at position n, with n counted from
the cache's `get_seq_length()`, of which a batch has only one: the shortest row's. Only where the tokens of a forward fall into
several steps of s does that matter; then the queries are multiplied by what is missing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .cache_name import CACHE


_layers: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
_positions: ContextVar["tuple[torch.Tensor, torch.Tensor] | None"] = ContextVar("positions", default=None)


def with_temperature(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that has such layers a callable like it that is right in batches as well."""
    if base not in _layers:
        tuned = [module for module in base.modules() if getattr(module, "attn_temperature_tuning", False)]
        _layers[base] = [layer for layer in tuned if not layer.use_rope]
    return partial(_run, model, _layers[base]) if _layers[base] else model


def _run(model: Callable[..., Any], layers: Sequence[Any], **inputs: Any) -> Any:
    cache, positions = inputs[CACHE], inputs["position_ids"]
    one_step = all((cache.start + 1) // layer.floor_scale == cache.visible // layer.floor_scale for layer in layers)
    if cache.slots is None or one_step:  # the first and the last position of all rows
        return model(**inputs)
    counted = cache.start + torch.arange(positions.shape[1], device=positions.device)[None]
    with _corrected(layers, positions, counted):
        return model(**inputs)


@contextmanager
def _corrected(layers: Sequence[Any], positions: torch.Tensor, counted: torch.Tensor) -> Iterator[None]:
    """Tokens stand at `positions` (B, Q), the layers take them for `counted` (1, Q)."""
    hooks = [layer.q_proj.register_forward_hook(partial(_correct, layer)) for layer in layers]
    token = _positions.set((positions, counted))
    try:
        yield
    finally:
        _positions.reset(token)
        for hook in hooks:
            hook.remove()


def _correct(layer: Any, projection: torch.nn.Module, inputs: Any, query: torch.Tensor) -> torch.Tensor | None:
    found = _positions.get()
    if found is None:  # another thread's
        return None
    right, wrong = (_temperature(layer, at.to(query.device)) for at in found)
    return (query * (right / wrong)[..., None]).to(query.dtype)


def _temperature(layer: Any, positions: torch.Tensor) -> torch.Tensor:
    """Of each token, float32, of the shape of `positions`."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / layer.floor_scale)) * layer.attn_scale + 1.0
