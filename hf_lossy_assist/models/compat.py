"""Names of forward arguments across Transformers releases and models."""

import inspect
from collections.abc import Mapping

from transformers import Cache, GenerationMixin


_OLD = "past_key_values"
_taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The cache, as an argument and as an output field: `cache` since Transformers 5.24.
CACHE = _OLD if _OLD in _taken else "cache"
# The argument of the Mamba family's forward in releases where `CACHE` is the old name.
MAMBA_CACHE = "cache_params"
# The names that `generate` accepts: the current one first, then those that it renames with a warning.
CACHE_NAMES = (CACHE,) if CACHE == _OLD else (CACHE, _OLD, MAMBA_CACHE)
ENCODED = "encoder_outputs"


def cache_of(output: object) -> Cache | None:
    """Return the cache in the output of a forward or of `generate`, or None."""
    return getattr(output, CACHE, None)


def passed_as(kwargs: Mapping[str, object]) -> str | None:
    """Return the name under which these arguments of `generate` hold a cache, or None. Given two names, Transformers reads only the first."""
    name = next((name for name in CACHE_NAMES if name in kwargs), CACHE)
    return None if kwargs.get(name) is None else name
