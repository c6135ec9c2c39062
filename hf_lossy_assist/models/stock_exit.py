"""`assistant_early_exit=n`: Transformers' own way to leave the target early, which changes the config of what it drafts with."""

import copy
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from ..validation import check_int
from .compat import CACHE
from .introspection import base_of, blocks_of, device_of


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
        tried[layers] = _trial(base, layers)
    if tried[layers] is not None:
        raise ValueError(
            f"{NAME}: {type(base).__name__} cannot leave early this way ({tried[layers]}): "
            f"pass assistant_model=hf_lossy_assist.early_exit(model, {layers})"
        )


def early_twin(model: Any) -> Any:
    """The Transformers model inside `model` once more, on the same weights, whose config may be changed: Transformers' generator
    drafts with fewer layers by changing it, and the model's own belongs to all threads that use the model."""
    base = base_of(model)
    prefixes = {"", base.base_model_prefix}
    blocks = blocks_of(base)
    for name, module in base.named_modules():
        if blocks is not None and any(part is blocks for part in module.children()):
            prefixes |= {name[:end] for end, letter in enumerate(name) if letter == "."} | {name}
    return _twin(base, "", prefixes, {})


def _twin(module: Any, name: str, prefixes: set[str], configs: dict[int, Any]) -> Any:
    """A copy of `module` whose children are its own, but for those that stand on the way to the blocks: they are copies too."""
    twin = copy.copy(module)
    twin.__dict__["_modules"] = own = dict(module._modules)
    for child in own:
        path = f"{name}.{child}" if name else child
        if path in prefixes:
            own[child] = _twin(own[child], path, prefixes, configs)
    twin.__dict__.pop("generate", None)  # `enable`'s
    for attribute, value in list(twin.__dict__.items()):  # a `forward` that someone replaced, as accelerate does
        if isinstance(value, MethodType) and value.__self__ is module:
            twin.__dict__[attribute] = MethodType(value.__func__, twin)
        elif isinstance(value, partial) and value.args and value.args[0] is module:
            twin.__dict__[attribute] = partial(value.func, twin, *value.args[1:], **value.keywords)
    if "config" in module.__dict__:
        twin.config = configs.setdefault(id(module.config), copy.deepcopy(module.config))
    return twin


def _config(model: Any) -> Any:
    """The config that Transformers' generator changes, if it has a number of layers."""
    base = base_of(model)
    config = getattr(getattr(base, base.base_model_prefix, None), "config", None)
    return config if hasattr(config, "num_hidden_layers") else None


@torch.no_grad()
def _trial(base: Any, layers: int) -> str | None:
    """Two steps of the first `layers` layers: None, or why the model does not run with them."""
    ids = torch.ones(1, 2, dtype=torch.long, device=device_of(base))
    twin = early_twin(base)
    config = _config(twin)
    config.num_hidden_layers = layers
    try:
        cache = DynamicCache(config=twin.config.get_text_config(decoder=True))
        for tokens in (ids, ids[:, :1]):
            twin(input_ids=tokens, **{CACHE: cache}, use_cache=True)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return None
