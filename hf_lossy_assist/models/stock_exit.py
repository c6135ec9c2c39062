"""`assistant_early_exit=n`: Transformers' own way to leave the target early, which changes its config while it drafts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from ..validation import check_int
from .inspect import base_of, device_of


NAME = "assistant_early_exit"
_tried: WeakKeyDictionary[Any, dict[int, str | None]] = WeakKeyDictionary()


def check_exit(model: Any, layers: Any) -> None:
    """Refuse, in one line, a number of layers that the target has not got and a target that cannot leave early this way."""
    base, config = base_of(model), _config(model)
    if config is None or base.config.is_encoder_decoder:
        raise ValueError(f"{NAME}: {type(base).__name__} is no decoder with layers to leave: leave it out")
    check_int(NAME, layers, 1)
    if layers >= config.num_hidden_layers:
        raise ValueError(f"{NAME}: expected fewer than the target's {config.num_hidden_layers} layers, got {layers}")
    tried = _tried.setdefault(base, {})
    if layers not in tried:
        tried[layers] = _trial(base, config, layers)
    if tried[layers] is not None:
        raise ValueError(
            f"{NAME}: {type(base).__name__} cannot leave early this way ({tried[layers]}): "
            f"pass assistant_model=hf_lossy_assist.models.early_exit(model, {layers})"
        )


@contextmanager
def layers_restored(model: Any) -> Iterator[None]:
    """Puts the number of layers back that was there before, whatever happens: an error, a stop from the keyboard."""
    config = _config(model)
    layers = None if config is None else config.num_hidden_layers
    try:
        yield
    finally:
        if config is not None:
            config.num_hidden_layers = layers


def _config(model: Any) -> Any:
    """The config that Transformers' generator changes, if it has a number of layers."""
    base = base_of(model)
    config = getattr(getattr(base, base.base_model_prefix, None), "config", None)
    return config if hasattr(config, "num_hidden_layers") else None


@torch.no_grad()
def _trial(base: Any, config: Any, layers: int) -> str | None:
    """Two steps of the first `layers` layers: None, or why the model does not run with them."""
    ids = torch.ones(1, 2, dtype=torch.long, device=device_of(base))
    with layers_restored(base):
        config.num_hidden_layers = layers
        try:
            cache = DynamicCache(config=base.config.get_text_config(decoder=True))
            for tokens in (ids, ids[:, :1]):
                base(input_ids=tokens, past_key_values=cache, use_cache=True)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
            return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
