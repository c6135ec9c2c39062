"""Names of forward arguments across Transformers releases and models."""

import inspect
from collections.abc import Callable, Mapping

from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.utils import ModelOutput

from .introspection import remember


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


def takes_positions(base: PreTrainedModel) -> bool:
    """Return whether a model's forward takes `position_ids`, or hands them on to a decoder of another model type that does."""
    return remember(base, "takes positions", lambda: _takes_positions(base))


def _takes_positions(base: PreTrainedModel) -> bool:
    names = inspect.signature(base.forward).parameters
    if "position_ids" in names or base.config.is_encoder_decoder:
        return "position_ids" in names
    decoder, more = base.get_decoder(), any(each.kind is each.VAR_KEYWORD for each in names.values())
    elsewhere = more and type(decoder).__module__ != type(base).__module__
    return elsewhere and "position_ids" in inspect.signature(decoder.forward).parameters


def keeps_logits(base: PreTrainedModel) -> bool:
    """Return whether a model's forward takes `logits_to_keep`, which skips logits that are not needed."""
    return "logits_to_keep" in forward_arguments(base)


def forward_arguments(base: PreTrainedModel) -> frozenset[str]:
    """Return the names of a model's forward arguments."""
    return remember(base, "forward arguments", lambda: frozenset(inspect.signature(base.forward).parameters))


def forward_of(model: PreTrainedModel, base: PreTrainedModel) -> Callable[..., ModelOutput]:
    """Return `model`, or an adapter if its forward names the cache differently or takes no positions (Mamba). `base`: the unwrapped model."""
    names = forward_arguments(base)
    if CACHE in names and takes_positions(base) or not {CACHE, MAMBA_CACHE} & set(names):
        return model

    def run(position_ids: object = None, **inputs: object) -> ModelOutput:
        if CACHE not in names:
            inputs[MAMBA_CACHE] = inputs.pop(CACHE)
        return model(**inputs)

    return run
