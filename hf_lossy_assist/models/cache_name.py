"""What the installed Transformers calls the cache of a model: `cache` since 5.24, `past_key_values` before; the argument, and the field of outputs."""

import inspect
from collections.abc import Mapping
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
