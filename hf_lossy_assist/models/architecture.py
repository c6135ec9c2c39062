"""Facts of a decoder that its forward on rows depends on, read from its config and code; they do not depend on the cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .compat import keeps_logits
from .introspection import (
    ORDINARY,
    attention_of,
    base_of,
    device_of,
    is_tested,
    learned_positions,
    remember,
    tokens_known,
)
from .quirks.attention import LOCAL_LAYERS
from .recurrent.layers import keep_states, layers_of
from .row_cache import LayerKind


CHUNKED = "chunked_attention"
SLIDING = ("sliding_attention", "local")
# Kinds of layers that have two masks.
HYBRID = {
    "hybrid": ("full_attention", "linear_attention"),
    "hybrid_sliding": ("sliding_attention", "linear_attention"),
}
# Kinds of layers that attend to nothing, and so take no mask.
UNMASKED = ("linear_attention", "conv", "moe", "mlp", "dummy")


@dataclass(frozen=True)
class Architecture:
    """Facts of one decoder. A config may change between calls (early exit), so each call reads them again."""

    config: PreTrainedConfig  # of the text model
    device: torch.device
    dtype: torch.dtype  # of the weights and masks
    known: int  # size of the input embedding, in token ids
    table_end: int | None  # number of learned positions; None: no such table
    windows: dict[str, int | None]  # tokens that each kind of layer sees; None: all preceding ones
    unmasked: tuple[str, ...]  # kinds of layers that attend to nothing
    layers: Sequence[LayerKind] | None  # classes of the cache's layers; None: a kind is unknown
    keeps_states: bool  # some layers keep a recurrent state or a convolution window
    chunk: int | None  # tokens per chunk, where a kind of layer is chunked
    layer_weights: float  # number of weights per layer, roughly
    keeps_logits: bool  # `logits_to_keep` skips logits that are not needed
    mask_each_row: bool  # its attention requires a mask for each row (XGLM checks for it)
    may_pack: bool  # its attention function is in Transformers' table and reads no other cache position

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Architecture":
        """Read the facts of a model, wrapped or not."""
        base = base_of(model)
        config, table = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight
        # The blocks of an early exit read the config of the model they were taken from.
        one_config = all(getattr(module, "config", config) is config for module in base.modules())
        windows, layers = _windows(config), layers_of(config)
        return cls(
            config=config,
            device=device_of(base),
            dtype=table.dtype,
            known=tokens_known(base),
            table_end=learned_positions(base),
            windows={kind: window for kind, window in windows.items() if kind not in UNMASKED},
            unmasked=tuple(kind for kind in windows if kind in UNMASKED),
            layers=layers,
            keeps_states=keep_states(layers),
            chunk=getattr(config, "attention_chunk_size", None) if CHUNKED in windows else None,
            # Cached: counting a thousand parameters takes a millisecond.
            layer_weights=remember(base, "weights", base.num_parameters) / max(config.num_hidden_layers, 1),
            keeps_logits=keeps_logits(base),
            mask_each_row=not is_tested(base),
            may_pack=attention_of(config) == ORDINARY and is_tested(base) and one_config,
        )

    @property
    def reach(self) -> float:
        """Return how many tokens every layer sees in any position: the shortest window or chunk; 0 with recurrent states."""
        if self.keeps_states:
            return 0
        limits = [*self.windows.values(), self.chunk]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def sees_all(self, visible: int) -> bool:
        """Return whether every layer's last position sees all of a text of `visible` tokens."""
        return all((w is None or visible <= w) and kind != CHUNKED for kind, w in self.windows.items())


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    local = getattr(config, LOCAL_LAYERS, None)
    if local is not None:
        kinds, window = local, config.window_size
    masks = [mask for kind in kinds for mask in HYBRID.get(kind, (kind,))]
    return {kind: window if kind in SLIDING else None for kind in dict.fromkeys(masks)}
