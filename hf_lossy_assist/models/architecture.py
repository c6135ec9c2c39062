"""Facts of a decoder that its forward on rows depends on, read from its config and code; they do not depend on the cache."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
SLIDING = "sliding_attention"
# Kinds of layers that have two masks.
HYBRID = {
    "hybrid": ("full_attention", "linear_attention"),
    "hybrid_sliding": ("sliding_attention", "linear_attention"),
}
# Kinds of layers that attend to nothing, and so take no mask.
UNMASKED = ("linear_attention", "conv", "moe", "mlp", "dummy")


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_kinds(module: torch.nn.Module) -> dict[str | None, object]:
    """Return a module's kinds of RoPE by layer type; None: one kind for all layers."""
    kinds = getattr(module, "rope_type", None)
    return dict(kinds) if isinstance(kinds, dict) else {None: kinds}


def configured_rope(config: PreTrainedConfig) -> str | None:
    """Return the kind of RoPE in `config` (one of several, if layers differ) that changes with the length of the text, or None."""
    for name in ("rope_parameters", "rope_scaling"):
        value = getattr(config, name, None)
        for rope in [value, *value.values()] if isinstance(value, dict) else []:
            kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
            if _changes(kind) or kind == "su":  # its name in Phi-3's remote code
                return str(kind)
    return None


@dataclass(frozen=True)
class ChangingRope:
    """Rotary frequencies that depend on the length of the text ("dynamic", "longrope").

    Transformers computes one set of them in each forward, from its largest position, so texts run here that stay on one side of `original`.
    """

    original: int  # tokens up to which all frequencies are the original ones
    is_fixed_beyond: bool  # all longer texts have one set

    @classmethod
    def of(cls, base: PreTrainedModel) -> "ChangingRope | None":
        """Return None for a model without such RoPE, as nearly all models."""
        return remember(base, "rope", lambda: cls._find(base))

    @classmethod
    def _find(cls, base: PreTrainedModel) -> "ChangingRope | None":
        lengths = dict(_original_lengths(base))
        return cls(min(lengths.values()), not any("dynamic" in kind for kind in lengths)) if lengths else None

    def limit(self, shortest: int) -> int | None:
        """Return the most tokens of a text in a batch whose shortest prompt has `shortest` tokens; None: no limit."""
        return None if self.is_fixed_beyond and shortest > self.original else self.original


def _original_lengths(base: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield each kind of RoPE that changes, and the length of text up to which its frequencies are the original ones."""
    for module in base.modules():
        for layer_type, kind in rope_kinds(module).items():
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield kind, int(parameters["original_max_position_embeddings"])
            elif _changes(kind):
                yield str(kind), int(module.original_max_seq_len)


@dataclass(frozen=True)
class Architecture:
    """Facts of one decoder."""

    config: PreTrainedConfig  # of the text model
    device: torch.device
    dtype: torch.dtype  # of the weights and masks
    known: int  # size of the input embedding, in token ids
    table_end: int | None  # number of learned positions; None: no such table
    rope: "ChangingRope | None"  # its rotary frequencies depend on the length of the text
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
        """Return the facts of a model, wrapped or not; they are found once, until it changes."""
        base = base_of(model)
        return remember(base, "architecture", lambda: cls._find(base))

    @classmethod
    def _find(cls, base: PreTrainedModel) -> "Architecture":
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
            rope=ChangingRope.of(base),
            windows={kind: window for kind, window in windows.items() if kind not in UNMASKED},
            unmasked=tuple(kind for kind in windows if kind in UNMASKED),
            layers=layers,
            keeps_states=keep_states(layers),
            chunk=getattr(config, "attention_chunk_size", None) if CHUNKED in windows else None,
            layer_weights=base.num_parameters() / max(config.num_hidden_layers, 1),
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
    masks = [mask for kind in kinds for mask in HYBRID.get(kind, (kind,))]
    return {kind: window if kind == SLIDING else None for kind in dict.fromkeys(masks)}
