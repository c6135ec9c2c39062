"""Facts that a decoder's forward on rows depends on: read off its config and code, the same whatever cache it runs on."""

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
from .recurrent.layers import keep_states, layers_of
from .row_cache import LayerKind


CHUNKED = "chunked_attention"
SLIDING = ("sliding_attention", "hybrid_sliding")
# Kinds of layers that attend to nothing, and so take no mask.
UNMASKED = ("linear_attention", "conv", "moe", "mlp", "dummy")


@dataclass(frozen=True)
class Architecture:
    """Facts of one decoder. A config may change between calls (early exit), so each call reads them anew."""

    config: PreTrainedConfig  # of the text part
    device: torch.device
    dtype: torch.dtype  # of its weights and masks
    known: int  # token ids that its embedding has
    table_end: int | None  # positions that its table of learned ones has; None: it has no table
    windows: dict[str, int | None]  # tokens that each kind of layer sees; None: all before
    unmasked: tuple[str, ...]  # kinds of layers that attend to nothing
    layers: Sequence[LayerKind] | None  # make its cache's; None: one is of a kind that is not known
    keeps_states: bool  # some layers keep a recurrent state or a convolution's window
    chunk: int | None  # tokens of a chunk, where a kind of layer is chunked
    layer_weights: float  # numbers in one layer's weights, about
    keeps_logits: bool  # `logits_to_keep` spares logits that nobody reads
    mask_each_row: bool  # its attention wants a mask for each row (XGLM checks for it)
    may_pack: bool  # its attention is in Transformers' table of functions, and knows no other cache position

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Architecture":
        """Read the facts of a model, wrapped or not."""
        base = base_of(model)
        config, table = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight
        # An early exit's blocks look at the config of the model that they belong to.
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
            # Remembered, since to count a thousand parameters takes a millisecond.
            layer_weights=remember(base, "weights", base.num_parameters) / max(config.num_hidden_layers, 1),
            keeps_logits=keeps_logits(base),
            mask_each_row=not is_tested(base),
            may_pack=attention_of(config) == ORDINARY and is_tested(base) and one_config,
        )

    @property
    def reach(self) -> float:
        """Return how many tokens every layer sees whatever their places: its shortest window or chunk; a state counts all places."""
        if self.keeps_states:
            return 0
        limits = [*self.windows.values(), self.chunk]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def sees_all(self, visible: int) -> bool:
        """Tell whether a text of `visible` tokens is in view of its last one in every layer."""
        return all((w is None or visible <= w) and kind != CHUNKED for kind, w in self.windows.items())


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return {kind: window if kind in SLIDING else None for kind in dict.fromkeys(kinds)}
