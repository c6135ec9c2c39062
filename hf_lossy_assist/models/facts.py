"""Facts of a decoder, one record a model object: read from its config and code, found once, and again after a change
that they depend on."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from .introspection import ORDINARY, attention_of, cached_per_model, device_of, is_tested, tokens_known
from .recurrent_layers import keep_states, layers_of
from .row_cache import LayerKind


_OLD = "past_key_values"
_taken = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The cache, as an argument and as an output field: `cache` since Transformers 5.24.
CACHE = _OLD if _OLD in _taken else "cache"
# The argument of the Mamba family's forward in releases where `CACHE` is the old name.
MAMBA_CACHE = "cache_params"
# The names that `generate` accepts: the current one first, then those that it renames with a warning.
CACHE_NAMES = (CACHE,) if CACHE == _OLD else (CACHE, _OLD, MAMBA_CACHE)
ENCODED = "encoder_outputs"
# Names of position tables in Transformers. Sinusoidal ones that grow on demand are neither `Embedding` nor tensor.
TABLES = ("wpe", "embed_positions", "position_embeddings", "positions_embed", "pos_encoding")
CHUNKED = "chunked_attention"
SLIDING = "sliding_attention"
# Kinds of layers that have two masks.
HYBRID = {
    "hybrid": ("full_attention", "linear_attention"),
    "hybrid_sliding": ("sliding_attention", "linear_attention"),
}
# Kinds of layers that attend to nothing, and so take no mask.
UNMASKED = ("linear_attention", "conv", "moe", "mlp", "dummy")


def passed_as(kwargs: Mapping[str, object]) -> str | None:
    """Return the name under which these arguments of `generate` hold a cache, or None.
    Given two names, Transformers reads only the first."""
    name = next((name for name in CACHE_NAMES if name in kwargs), CACHE)
    return None if kwargs.get(name) is None else name


def _changes(kind: object) -> bool:
    return isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def rope_kinds(module: torch.nn.Module) -> dict[str | None, object]:
    """Return a module's kinds of RoPE by layer type; None: one kind for all layers."""
    kinds = getattr(module, "rope_type", None)
    return dict(kinds) if isinstance(kinds, dict) else {None: kinds}


def configured_rope(config: PreTrainedConfig) -> str | None:
    """Return the kind of RoPE in `config` (one of several, if layers differ) that changes with the length of the text,
    or None."""
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

    Transformers computes one set of them in each forward, from its largest position, so texts run here that stay on one
    side of `original`.
    """

    original: int  # tokens up to which all frequencies are the original ones
    is_fixed_beyond: bool  # all longer texts have one set

    @classmethod
    def find(cls, base: PreTrainedModel) -> "ChangingRope | None":
        """Return None for a model without such RoPE, as nearly all models."""
        lengths = dict(_original_lengths(base))
        return cls(min(lengths.values()), not any("dynamic" in kind for kind in lengths)) if lengths else None

    def limit(self, shortest: int) -> int | None:
        """Return the most tokens of a text in a batch whose shortest prompt has `shortest` tokens; None: no limit."""
        return None if self.is_fixed_beyond and shortest > self.original else self.original


def _original_lengths(base: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """Yield each kind of RoPE that changes, and the length of text up to which its frequencies are the original
    ones."""
    for module in base.modules():
        for layer_type, kind in rope_kinds(module).items():
            if kind == "longrope":
                parameters: Any = module.config.rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                yield kind, int(parameters["original_max_position_embeddings"])
            elif _changes(kind):
                yield str(kind), int(module.original_max_seq_len)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model, or of an encoder-decoder's decoder."""

    config: PreTrainedConfig  # of the text model
    device: torch.device
    dtype: torch.dtype  # of the weights and masks
    is_tested: bool  # its ragged batches are compared with `generate` in the tests
    attention: str  # implementation
    arguments: frozenset[str]  # of the forward
    position_argument: str | None  # of the forward, for the positions of the text's tokens
    reads_encoder: bool  # it is a decoder that reads another model's encoder, such as `WhisperForCausalLM`
    input_size: int  # of the input embedding, in token ids
    position_table: int | None  # size of the smallest table of positions
    table_end: int | None  # number of positions; None: unlimited
    rope: ChangingRope | None  # its rotary frequencies depend on the length of the text
    windows: dict[str, int | None]  # tokens that each kind of layer sees; None: all preceding ones
    unmasked: tuple[str, ...]  # kinds of layers that attend to nothing
    layers: Sequence[LayerKind] | None  # classes of the cache's layers; None: a kind is unknown
    keeps_states: bool  # some layers keep a recurrent state or a convolution window
    chunk: int | None  # tokens per chunk, where a kind of layer is chunked
    layer_weights: float  # number of weights per layer, roughly
    may_pack: bool  # its attention function is in Transformers' table and reads no other cache position

    @property
    def keeps_logits(self) -> bool:
        """Return whether `logits_to_keep` skips logits that are not needed."""
        return "logits_to_keep" in self.arguments

    @property
    def reach(self) -> float:
        """Return how many tokens every layer sees in any position: the shortest window or chunk;
        0 with recurrent states."""
        if self.keeps_states:
            return 0
        limits = [*self.windows.values(), self.chunk]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def sees_all(self, visible: int) -> bool:
        """Return whether every layer's last position sees all of a text of `visible` tokens."""
        return all((w is None or visible <= w) and kind != CHUNKED for kind, w in self.windows.items())


@cached_per_model
def facts_of(base: PreTrainedModel) -> ModelFacts:
    """Return the facts of a model, wrapped or not."""
    config, arguments = (
        base.config.get_text_config(decoder=True),
        frozenset(inspect.signature(base.forward).parameters),
    )
    # The blocks of an early exit read the config of the model they were taken from.
    one_config = all(getattr(module, "config", config) is config for module in base.modules())
    windows, layers, table = _windows(config), layers_of(config), _table_size(base)
    # MPT makes so many biases.
    most = base.config.max_seq_len if hasattr(base.get_decoder(), "build_mpt_alibi_tensor") else None
    tested, attention = is_tested(base), attention_of(config)
    reads_encoder = not base.config.is_encoder_decoder and ENCODED in arguments
    return ModelFacts(
        config=config,
        device=device_of(base),
        dtype=base.get_input_embeddings().weight.dtype,
        is_tested=tested,
        attention=attention,
        arguments=arguments,
        position_argument=_position_argument(base, arguments, reads_encoder),
        reads_encoder=reads_encoder,
        input_size=tokens_known(base),
        position_table=table,
        table_end=min((size for size in (table, most) if size is not None), default=None),
        rope=ChangingRope.find(base),
        windows={kind: window for kind, window in windows.items() if kind not in UNMASKED},
        unmasked=tuple(kind for kind in windows if kind in UNMASKED),
        layers=layers,
        keeps_states=keep_states(layers),
        chunk=getattr(config, "attention_chunk_size", None) if CHUNKED in windows else None,
        layer_weights=base.num_parameters() / max(config.num_hidden_layers, 1),
        may_pack=attention == ORDINARY and tested and one_config,
    )


def forward_of(model: PreTrainedModel, base: PreTrainedModel) -> Callable[..., ModelOutput]:
    """Return `model`, or an adapter if its forward names the cache differently or takes no positions (Mamba).
    `base`: the unwrapped model."""
    facts = facts_of(base)
    if CACHE in facts.arguments and facts.position_argument or not {CACHE, MAMBA_CACHE} & facts.arguments:
        return model

    def run(position_ids: object = None, **inputs: object) -> ModelOutput:
        if CACHE in inputs and CACHE not in facts.arguments:
            inputs[MAMBA_CACHE] = inputs.pop(CACHE)
        return model(**inputs)

    return run


def _position_argument(base: PreTrainedModel, arguments: frozenset[str], reads_encoder: bool) -> str | None:
    encodes = base.config.is_encoder_decoder
    name = "decoder_position_ids" if encodes else "position_ids"
    if name in arguments:
        return name
    # Some pass further arguments on to an inner decoder: one of another model type, `EncoderDecoderModel` those that
    # begin with "decoder_".
    composite = encodes and base.config.model_type == "encoder-decoder"
    decoder = base.decoder if composite and hasattr(base, "decoder") else base.get_decoder()
    more = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(base.forward).parameters.values())
    elsewhere = not encodes and more and type(decoder).__module__ != type(base).__module__
    if not (composite or reads_encoder or elsewhere):
        return None
    return name if "position_ids" in inspect.signature(decoder.forward).parameters else None


def _table_size(base: PreTrainedModel) -> int | None:
    sizes = [_size(getattr(module, name, None)) for module in base.get_decoder().modules() for name in TABLES]
    return min((size for size in sizes if size is not None), default=None)


def _size(table: object) -> int | None:
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa's positions begin after its padding index.
        first = 0 if table.padding_idx is None else table.padding_idx + 1
        return table.num_embeddings - max(first, getattr(table, "offset", 0))
    return table.shape[0] if isinstance(table, torch.Tensor) and table.dim() == 2 else None


def _windows(config: PreTrainedConfig) -> dict[str, int | None]:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    masks = [mask for kind in kinds for mask in HYBRID.get(kind, (kind,))]
    return {kind: window if kind == SLIDING else None for kind in dict.fromkeys(masks)}
