"""Models with fewer heads of keys and values than of queries (grouped-query attention), on a CPU, without a copy of what is cached.

Where a forward of several tokens has a mask, as each block on a cache of rows has, Transformers first repeats keys and values for each head of
queries: on a GPU that finds faster kernels. On a CPU PyTorch's kernel reads the few heads as they are, with the same numbers, and for blocks of few
tokens the copies of a long text take several times as long as the attention itself (docs/log.md).
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.attention import SDPBackend
from transformers.integrations import sdpa_attention

from .inspect import ORDINARY, attention_of
from .replaced import Replacing


_grouped: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
_ours: ContextVar[bool] = ContextVar("ours", default=False)  # whether a forward of ours is under way in this thread


def with_few_heads(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one with grouped queries on a CPU a callable like it that copies no keys and values."""
    if base not in _grouped:
        config = base.config.get_text_config(decoder=True)
        groups = any(getattr(part, "num_key_value_groups", 1) > 1 for part in base.modules())
        _grouped[base] = groups and attention_of(config) == ORDINARY
    return partial(_run, model) if _grouped[base] else model


def _run(model: Callable[..., Any], **inputs: Any) -> Any:
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


_choosing = Replacing(_choosing_ours)
