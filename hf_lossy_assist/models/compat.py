"""What the installed Transformers calls the cache of a model: `cache` since 5.24, `past_key_values` before; the argument, and the field of outputs.

A model's forward under one set of names."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers import GenerationMixin


_OLD = "past_key_values"
_taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

CACHE = _OLD if _OLD in _taken else "cache"
OF_MAMBA = "cache_params"  # what the forward of Mamba's family takes where `CACHE` is the old name
# What `generate` takes it by: its own name first, then those that it renames with a warning.
CACHE_NAMES = (CACHE,) if CACHE == _OLD else (CACHE, _OLD, OF_MAMBA)


def cache_of(output: Any) -> Any:
    """The cache of a forward or of `generate`, or None."""
    return getattr(output, CACHE, None)


def passed_as(kwargs: Mapping[str, Any]) -> str | None:
    """The name by which these arguments of `generate` bring a cache, or None. Of two names Transformers reads the first alone."""
    name = next((name for name in CACHE_NAMES if name in kwargs), CACHE)
    return None if kwargs.get(name) is None else name


def takes_positions(base: Any) -> bool:
    """Whether a model's forward can be told where tokens stand."""
    return "position_ids" in inspect.signature(base.forward).parameters


def forward_of(model: Any, base: Any) -> Callable[..., Any]:
    """`model`, or what calls it where it has another name for its cache or takes no positions, as Mamba; `base`: what it wraps."""
    names = inspect.signature(base.forward).parameters
    if CACHE in names and "position_ids" in names or not {CACHE, OF_MAMBA} & set(names):
        return model

    def run(position_ids: Any = None, **inputs: Any) -> Any:
        if CACHE not in names:
            inputs[OF_MAMBA] = inputs.pop(CACHE)
        return model(**inputs)

    return run
