"""Targets whose text depends on its length in ways that blocks of tokens cannot follow, told from their config and modules: a
trial on a few tokens would not reach these lengths."""

import sys
from typing import Any

from .inspect import base_of
from .rope import changing_kind, configured_kind


def refuse_by_length(model: Any) -> None:
    """Raise `ValueError`, one line, for a target that `generate` alone would make write another text beyond some length."""
    base = base_of(model)
    name, config = type(base).__name__, base.config.get_text_config(decoder=True)
    kind = configured_kind(config)
    if kind is not None and not any(changing_kind(module) for module in base.modules()):
        raise ValueError(
            f"{name} computes {kind!r} RoPE, which changes with the text's length, in code of its own: leave lossy_policy out"
        )
    if base.config.is_encoder_decoder:
        return
    sparse = getattr(base.config, "attention_type", None) == "block_sparse"
    if sparse and any(getattr(module, "attention_type", None) == "block_sparse" for module in base.modules()):
        raise ValueError(
            f"{name} chooses what it attends to by the prompt's length (block_sparse): load it with "
            "attention_type='original_full', or leave lossy_policy out"
        )
    if _slides_in_its_cache_alone(base, config):
        raise ValueError(
            f"{name} has a sliding window of {config.sliding_window} in its cache and none in its attention mask, so a prompt's "
            "tokens see more than those behind it: leave lossy_policy out"
        )


def _slides_in_its_cache_alone(base: Any, config: Any) -> bool:
    """Moshi: `DynamicCache` forgets what left the window, and the mask of the model's own file knows no window."""
    if getattr(config, "sliding_window", None) is None or getattr(config, "layer_types", None):
        return False
    code = sys.modules[type(base.get_decoder()).__module__]
    makers = [name for name in vars(code) if name.startswith("create_") and "mask" in name]
    return makers == ["create_causal_mask"]
