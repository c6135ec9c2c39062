"""Argument names of a model's forward, across Transformers' releases and across models."""

import inspect
from collections.abc import Callable, Mapping

from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput


_OLD = "past_key_values"
_taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The cache, as an argument and as a field of outputs: `cache` since Transformers 5.24.
CACHE = _OLD if _OLD in _taken else "cache"
# What the forward of Mamba's family takes where `CACHE` is the old name.
MAMBA_CACHE = "cache_params"
# What `generate` takes it by: its name first, then those that it renames with a warning.
CACHE_NAMES = (CACHE,) if CACHE == _OLD else (CACHE, _OLD, MAMBA_CACHE)
ENCODED = "encoder_outputs"


def cache_of(output: object) -> Cache | None:
    """Return the cache of a forward's or of `generate`'s output, or None."""
    return getattr(output, CACHE, None)


def passed_as(kwargs: Mapping[str, object]) -> str | None:
    """Return the name by which these arguments of `generate` bring a cache, or None. Of two names Transformers reads the first alone."""
    name = next((name for name in CACHE_NAMES if name in kwargs), CACHE)
    return None if kwargs.get(name) is None else name


def takes_positions(base: PreTrainedModel) -> bool:
    """Tell whether a model's forward takes `position_ids`."""
    return "position_ids" in inspect.signature(base.forward).parameters


def keeps_logits(base: PreTrainedModel) -> bool:
    """Tell whether `logits_to_keep` spares logits that nobody reads."""
    return "logits_to_keep" in inspect.signature(base.forward).parameters


def forward_of(model: PreTrainedModel, base: PreTrainedModel) -> Callable[..., ModelOutput]:
    """Return `model`, or what calls it if it has another name for its cache or takes no positions, as Mamba; `base`: what it wraps."""
    names = inspect.signature(base.forward).parameters
    if CACHE in names and "position_ids" in names or not {CACHE, MAMBA_CACHE} & set(names):
        return model

    def run(position_ids: object = None, **inputs: object) -> ModelOutput:
        if CACHE not in names:
            inputs[MAMBA_CACHE] = inputs.pop(CACHE)
        return model(**inputs)

    return run
