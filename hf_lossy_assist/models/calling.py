"""A model's forward under one set of names."""

import inspect
from collections.abc import Callable
from typing import Any

from .cache_name import CACHE, OF_MAMBA


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
