"""ALiBi on a cache of rows: biases by the places of keys (BLOOM, Falcon, MPT), which are the same for every row there.

Token number i of each row is at place i, so that the biases are those of a text without padding; only what may be seen differs between rows.
BLOOM's and Falcon's function takes the mask of a text, (B, n), and a cache of rows has one for each token of the forward, (B, 1, Q, n). MPT's makes
biases for its longest text, and a block's padding may reach beyond it.


Attention temperature by the cache's length (Llama 4): in a batch each row's tokens get the one of their own positions.

Layers without RoPE multiply their queries by 1 + a·log(1 + ⌊(n + 1) / s⌋) for the token at position n, with n counted from
the cache's `get_seq_length()`, of which a batch has only one: the shortest row's. Only where the tokens of a forward fall into
several steps of s does that matter; then the queries are multiplied by what is missing.


Models with fewer heads of keys and values than of queries (grouped-query attention), on a CPU, without a copy of what is cached.

Where a forward of several tokens has a mask, as each block on a cache of rows has, Transformers first repeats keys and values for each head of
queries: on a GPU that finds faster kernels. On a CPU PyTorch's kernel reads the few heads as they are, with the same numbers, and for blocks of few
tokens the copies of a long text take several times as long as the attention itself (docs/log.md).
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import SDPBackend
from transformers.integrations import sdpa_attention

from ..compat import CACHE
from ..introspection import ORDINARY, attention_of
from .patching import ScopedPatch


_files: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # of each model, those modelling files of its own
_visible: ContextVar[int] = ContextVar("visible", default=0)  # places that the forward under way in this thread sees


def with_alibi(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that makes biases of its mask a callable like it that takes masks for each token."""
    if base not in _files:
        named = {
            type(part).__module__ for part in base.modules()
        }  # somebody's own class may say that it is of no file
        files = [sys.modules[name] for name in sorted(named) if name in sys.modules]
        _files[base] = [its for its in files if any(hasattr(its, name) for name in CHANGED)]
    return partial(_run_alibi, model, _files[base]) if _files[base] else model


def _run_alibi(model: Callable[..., Any], files: Sequence[Any], **inputs: Any) -> Any:
    token = _visible.set(inputs[CACHE].visible)
    try:
        with _changed.within(files):
            return model(**inputs)
    finally:
        _visible.reset(token)


def _by_place(own: Callable[..., Any], mask: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """`own`; of a mask for each token (B, 1, Q, n) the biases of n tokens of which none is hidden. Another thread's mask is (B, n)."""
    if mask.dim() == 4:
        mask = torch.ones(mask.shape[0], mask.shape[-1], dtype=torch.int64, device=mask.device)
    return own(mask, *args, **kwargs)


def _long_enough(own: Callable[..., Any], heads: int, longest: int, *args: Any, **kwargs: Any) -> Any:
    """`own` of a longer text, of whose biases the model takes the last ones. In another thread as it is."""
    return own(heads, max(longest, _visible.get()), *args, **kwargs)


CHANGED: dict[str, Callable[..., Any]] = {"build_alibi_tensor": _by_place, "build_mpt_alibi_tensor": _long_enough}


def _changes(file: Any) -> dict[str, Any]:
    return {name: partial(its, getattr(file, name)) for name, its in CHANGED.items() if hasattr(file, name)}


_changed = ScopedPatch(_changes)


_layers: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
_positions: ContextVar["tuple[torch.Tensor, torch.Tensor] | None"] = ContextVar("positions", default=None)


def with_temperature(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that has such layers a callable like it that is right in batches as well."""
    if base not in _layers:
        tuned = [module for module in base.modules() if getattr(module, "attn_temperature_tuning", False)]
        _layers[base] = [layer for layer in tuned if not layer.use_rope]
    return partial(_run_tempered, model, _layers[base]) if _layers[base] else model


def _run_tempered(model: Callable[..., Any], layers: Sequence[Any], **inputs: Any) -> Any:
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


_grouped: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_ours: ContextVar[bool] = ContextVar("ours", default=False)  # whether a forward of ours is under way in this thread


def with_few_heads(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one with grouped queries on a CPU a callable like it that copies no keys and values."""
    if base not in _grouped:
        config = base.config.get_text_config(decoder=True)
        groups = any(getattr(part, "num_key_value_groups", 1) > 1 for part in base.modules())
        _grouped[base] = groups and attention_of(config) == ORDINARY
    return partial(_run_grouped, model) if _grouped[base] else model


def _run_grouped(model: Callable[..., Any], **inputs: Any) -> Any:
    token = _ours.set(True)
    try:
        with _choosing.within([sdpa_attention]):
            return model(**inputs)
    finally:
        _ours.reset(token)


# None in a Transformers that decides in another way: then nothing is changed.
_theirs: Any = getattr(sdpa_attention, "use_gqa_in_sdpa", None)


def _chosen(attention_mask: Any, key: torch.Tensor, value: torch.Tensor, *others: Any, **named: Any) -> Any:
    """Whether PyTorch is asked to read few heads as they are."""
    theirs = _theirs(attention_mask, key, value, *others, **named)
    if theirs or torch.compiler.is_compiling() or not _ours.get() or key.device.type != "cpu":
        return theirs
    return attention_mask is not None and key.shape[-1] == value.shape[-1] and _reads_few_heads(key.dtype)


@cache
def _reads_few_heads(dtype: torch.dtype) -> bool:
    """Whether this PyTorch has a kernel for it; its plain way, which it takes else, is no faster than copies."""
    choose = getattr(torch, "_fused_sdp_choice", None)
    if choose is None:
        return False
    query, few = torch.zeros(1, 4, 3, 8, dtype=dtype), torch.zeros(1, 2, 5, 8, dtype=dtype)
    try:
        chosen = choose(query, few, few, torch.zeros(1, 1, 3, 5, dtype=dtype), enable_gqa=True)
    except (TypeError, RuntimeError):  # of older releases
        return False
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


def _choosing_ours(_: Any) -> dict[str, Any]:
    return {} if _theirs is None else {"use_gqa_in_sdpa": _chosen}


_choosing = ScopedPatch(_choosing_ours)
