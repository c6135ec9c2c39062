"""The file formats of drafters: a folder's config.json and weights become those of a network.

EAGLE-3 in the format of `speculators` and in the plain one (SpecForge, AngelSlim, DeepSpec, EAGLE); DFlash and DFlash 2
in those of z-lab and `speculators` (whose PARD-2 is DFlash trained otherwise); DSpark in those of DeepSpec, the
authors' code, and `speculators`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers import PreTrainedConfig, Qwen3Config

from ...validation import check_flag, check_int, check_number, listed, one_line, shown
from ..base import Proposal
from ..hidden_state import HiddenStateDrafter
from ..networks.base import CAUSAL, AttentionWindow
from ..networks.corrected_networks import MARKOV_HEADS, DFlash2Config, DSparkConfig
from ..networks.dflash_network import DFlashConfig
from ..networks.eagle_network import LAYER_KINDS, Eagle3Config
from ..trained import DFlash2Drafter, DFlashDrafter, DSparkDrafter, Eagle3Drafter


PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "Qwen3Eagle3Model")  # the last is DeepSpec's
ORDINARY = ("LlamaForCausalLM",)  # in EAGLE's repositories, where only EAGLE-3 has a separate draft vocabulary
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CONFIGS = {kind: modules.config for kind, modules in LAYER_KINDS.items()}
LONGEST_BLOCK, WIDEST = 1024, 2**30  # the largest block and window accepted
FULL, SLIDING = "full_attention", "sliding_attention"  # Transformers' kinds of layers
Weights = dict[str, torch.Tensor]  # by their names in files
# Sizes in a decoder's config, and the largest accepted: the network is built before its weights are seen.
SIZES = {
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "num_hidden_layers": 64,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "vocab_size": 2**21,
}
NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Settings of a decoder layer; other entries of a file are not passed to Transformers.
LAYER_SETTINGS = set(SIZES) | set(
    "hidden_act max_position_embeddings rms_norm_eps attention_bias mlp_bias".split()
    + ["rope_theta", "rope_scaling", "rope_parameters"]
)

Spec: TypeAlias = Mapping[str, Any]  # content of a config.json


def names_one_of(spec: Spec, architectures: tuple[str, ...]) -> bool:
    """Return whether a config names one of these classes."""
    names = spec.get("architectures")
    return isinstance(names, list) and any(name in architectures for name in names)


def layer_spec(spec: Spec, where: str) -> Spec:
    """Return the settings of the decoder layers, which `speculators` nests in a separate object."""
    layer = spec if spec.get("speculators_model_type") is None else spec.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{where}: transformer_layer_config: expected an object, got {shown(layer)}")
    return layer


def read_layer(spec: Spec, where: str, kinds: Mapping[str, type[PreTrainedConfig]], default: str) -> PreTrainedConfig:
    """Return the config of the decoder layers, of a class in `kinds` by `model_type`."""
    layer = layer_spec(spec, where)
    kind = layer.get("model_type", default)
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{where}: layers of model_type {shown(kind)} are not known here, which has {listed(kinds)}")
    for name, most in SIZES.items():
        if layer.get(name) is not None:
            check_int(f"{where}: {name}", layer[name], 1, most)
        elif name in NEEDED:
            raise ValueError(f"{where}: {name} is missing")
    try:
        return kinds[kind](**{name: value for name, value in layer.items() if name in LAYER_SETTINGS})
    except Exception as error:  # any error of Transformers
        raise ValueError(f"{where}: {one_line(error, 300)}") from None


def read_layer_ids(ids: object, name: str, where: str, first: int) -> tuple[int, ...]:
    """Return the layers whose states are read, as in `hidden_states`; `first`: 1 if the file counts blocks from 0."""
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: {name}: expected a list of layers, got {shown(ids)}")
    for layer in ids:
        check_int(f"{where}: {name}", layer, -first, 10_000)  # the embeddings come before block 0
    return tuple(first + layer for layer in ids)


def read_width(spec: Spec, where: str, layer: PreTrainedConfig) -> int:
    """Return the width of the target's states."""
    width = spec.get("target_hidden_size") or layer.hidden_size
    check_int(f"{where}: target_hidden_size", width, 1, SIZES["hidden_size"])
    return int(width)


def read_proposal(spec: Spec, where: str) -> Proposal:
    """Return the suggested settings for drafting and acceptance: the first proposal method in `speculators_config`."""
    methods = spec.get("speculators_config")
    methods = methods.get("proposal_methods") if isinstance(methods, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], Mapping) else {}
    default, what = Proposal(), f"{where}: proposal_methods"
    tokens, k = first.get("speculative_tokens", default.tokens), first.get("verifier_accept_k", default.accept_k)
    tolerance = first.get("accept_tolerance", default.accept_tolerance)
    check_int(f"{what}: speculative_tokens", tokens, 1, 1000)
    check_int(f"{what}: verifier_accept_k", k, 1, 2**21)
    check_number(f"{what}: accept_tolerance", tolerance, 0.0, math.inf)
    return Proposal(tokens, k, float(tolerance))


def read_windows(config: Mapping[str, Any], where: str, layers: int) -> list[int | None]:
    """Return each layer's `sliding_window`, None: it sees all, by the rules of Transformers' configs."""
    kinds, window, used = (config.get(name) for name in ("layer_types", "sliding_window", "use_sliding_window"))
    if kinds is None:
        if used is not None:
            check_flag(f"{where}: use_sliding_window", used)
        first = config.get("max_window_layers") or 0
        check_int(f"{where}: max_window_layers", first, 0)
        # Qwen's configs have a window that is not in use; those of Llama have one only if it is.
        on = used if used is not None else window is not None and config.get("model_type") != "qwen3"
        kinds = [SLIDING if on and layer >= first else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ValueError(
            f"{where}: layer_types: expected {layers} of {listed((FULL, SLIDING))}, one a layer, got {shown(kinds)}"
        )
    if SLIDING in kinds:
        check_int(f"{where}: sliding_window", window, 1, WIDEST)
    return [window if kind == SLIDING else None for kind in kinds]


def read_eagle3(spec: Spec, where: str) -> Eagle3Config:
    """Return the config of an EAGLE-3 network."""
    kind = spec.get("speculators_model_type")
    plain = names_one_of(spec, PLAIN) or names_one_of(spec, ORDINARY) and "draft_vocab_size" in spec
    if kind not in (None, "eagle3") or not (kind or plain):
        name = "speculators_model_type" if kind else "architectures"
        raise ValueError(
            f"{where} is of no known drafter ({name} {shown(spec.get(name))}): expected DFlash, DFlash 2, DSpark, or "
            f"EAGLE-3 (speculators_model_type 'eagle3' or one of {listed(PLAIN)}), not EAGLE-1 or 2; pass a model as "
            "assistant_model itself"
        )
    layer = read_layer(spec, where, CONFIGS, "llama")
    more = spec.get("eagle_config")
    # DeepSpec numbers a layer by the block whose output it is, the others as in `hidden_states`.
    name, first = ("target_layer_ids", 1) if "target_layer_ids" in spec else ("eagle_aux_hidden_state_layer_ids", 0)
    ids = spec.get(name, more.get(name) if isinstance(more, Mapping) else None)
    layers = None if ids is None else read_layer_ids(ids, name, where, first)
    size = spec.get("draft_vocab_size", layer.vocab_size)
    check_int(f"{where}: draft_vocab_size", size, 1, layer.vocab_size)
    flags = {name: spec.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        check_flag(f"{where}: {name}", value)
    windows = read_windows(layer_spec(spec, where), where, layer.num_hidden_layers)
    # A window counts the last known pair.
    sights = tuple(CAUSAL if width is None else AttentionWindow(width - 1, causal=True) for width in windows)
    return Eagle3Config(layer, layers, size, read_width(spec, where, layer), **flags, sights=sights)


def eagle3_entries(config: Eagle3Config) -> dict[str, object]:
    """Return the entries of a config in the format of `speculators` that only EAGLE-3 has."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": None if config.target_layers is None else list(config.target_layers),
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": False,
    }


def read_dflash(spec: Spec, where: str, anchor: bool = False) -> DFlashConfig:
    """Return the config of a DFlash network. `anchor`: the default of `sample_from_anchor`."""
    speculators = spec.get("speculators_model_type") is not None
    layer = read_layer(spec, where, {"qwen3": Qwen3Config}, "qwen3")
    nested = spec.get("dflash_config")
    settings = {**spec, **(nested if isinstance(nested, Mapping) else {})}
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids, blocks = settings.get(name), spec.get("num_target_layers")
    if ids is None and not speculators and blocks is not None:
        check_int(f"{where}: num_target_layers", blocks, 4, 10_000)
        ids = _spread(blocks, layer.num_hidden_layers)
    # speculators numbers layers as in `hidden_states`, DFlash by the block whose output they are.
    layers = read_layer_ids(ids, name, where, 0 if speculators else 1)
    block = settings.get("block_size", None if speculators or anchor else 16)
    mask = settings.get("mask_token_id")
    check_int(f"{where}: block_size", block, 2, LONGEST_BLOCK)
    check_int(f"{where}: mask_token_id", mask, 0, SIZES["vocab_size"])
    if settings.get("input_embedding_scale") not in (None, 1, 1.0):
        raise ValueError(f"{where}: input_embedding_scale is not supported here")
    scale, cap = (settings.get(name) for name in ("output_multiplier", "final_logit_softcapping"))
    scale, cap = 1.0 if scale is None else scale, None if cap == 0 else cap
    check_number(f"{where}: output_multiplier", scale, 1e-6, 1e6)
    check_number(f"{where}: final_logit_softcapping", 1.0 if cap is None else cap, 1e-6, 1e6)
    anchor = settings.get("sample_from_anchor", anchor)
    check_flag(f"{where}: sample_from_anchor", anchor)
    size = spec.get("draft_vocab_size") if speculators else None
    if size is not None:
        check_int(f"{where}: draft_vocab_size", size, 1, layer.vocab_size)
    assert isinstance(block, int) and isinstance(mask, int)
    sights = _dflash_sights(settings, where, layer.num_hidden_layers)
    return DFlashConfig(layer, layers, block, mask, read_width(spec, where, layer), anchor, size, sights, scale, cap)


def _dflash_sights(settings: Spec, where: str, layers: int) -> tuple[AttentionWindow, ...]:
    """Return what each layer sees; windowed ones are causal unless a file says otherwise, as in vLLM."""
    speculators = settings.get("speculators_model_type") is not None
    for name in ("is_causal", "causal", "use_swa", "sliding_window_non_causal"):
        if settings.get(name) is not None:
            check_flag(f"{where}: {name}", settings[name])
    windows = read_windows(layer_spec(settings, where), where, layers)
    if settings.get("use_swa"):  # ModelOpt's: all layers, whatever their kinds
        width = settings.get("swa_window_size", settings.get("sliding_window"))
        check_int(f"{where}: swa_window_size", width, 1, WIDEST)
        windows = [width] * layers
    causal = next((settings[name] for name in ("is_causal", "causal") if settings.get(name) is not None), None)
    if speculators:
        whole = settings["speculators_model_type"] == "dflash2"
        causal = False if settings.get("sliding_window_non_causal", whole) else None
    sights = []
    for window in windows:
        among = window is not None if causal is None else causal
        reach = None if window is None else window if speculators else window - 1
        sights.append(AttentionWindow(reach, window is not None and not speculators, among))
    return tuple(sights)


def _spread(blocks: int, layers: int) -> list[int]:
    """Return a target block for each of the network's layers, evenly from the second on, for files that name none."""
    spread = [round(1 + i * (blocks - 4) / max(layers - 1, 1)) for i in range(layers)]
    return spread if layers > 1 else [blocks // 2]


def read_dflash2(spec: Spec, where: str) -> DFlash2Config:
    """Return the config of a DFlash 2 network."""
    base, nested = read_dflash(spec, where), spec.get("dflash_config")
    settings = {**spec, **(nested if isinstance(nested, Mapping) else {})}
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    sizes = (base.block, base.layer.hidden_size, SIZES["hidden_size"], base.layer.vocab_size)
    highest = dict(zip(names, sizes, strict=True))
    for name, high in highest.items():
        check_int(f"{where}: {name}", settings.get(name), 1, high)
    taps, group, rank, candidates = (int(settings[name]) for name in highest)
    if base.reduced:
        raise ValueError(f"{where}: draft_vocab_size: a DFlash 2 drafter has the whole vocabulary of its target")
    return DFlash2Config(**vars(base), taps=taps, group=group, rank=rank, candidates=candidates)


def read_dspark(spec: Spec, where: str) -> DSparkConfig:
    """Return the config of a DSpark network; without its heads it is DFlash, whose DeepSpec files have this form."""
    base, rank = read_dflash(spec, where, anchor=True), spec.get("markov_rank", 256)
    if (base.scale, base.cap) != (1, None):
        raise ValueError(f"{where}: a DSpark drafter has no output_multiplier and final_logit_softcapping here")
    check_int(f"{where}: markov_rank", rank, 0, SIZES["hidden_size"])
    kind = spec.get("markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        raise ValueError(
            f"{where}: markov_head_type {shown(kind)} is not known here, which has {listed(MARKOV_HEADS)}"
        )
    if rank and kind == "rnn" and not base.from_anchor:
        raise ValueError(f"{where}: a Markov head 'rnn' with sample_from_anchor false is not supported here")
    return DSparkConfig(**vars(base), rank=rank, markov=kind)


def dspark_entries(config: DSparkConfig) -> dict[str, object]:
    """Return those that only DSpark has."""
    return {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": list(config.target_layers),
        "block_size": config.block,
        "mask_token_id": config.mask,
        "sample_from_anchor": config.from_anchor,
        "markov_rank": config.rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": False,
    }


class DrafterFormat(NamedTuple):
    """A file format of drafters.

    Args:
        drafter: the class that such files are loaded as.
        types, architectures: the format's `speculators_model_type`s; for a config with none, its `architectures`.
        read_config: makes the network's config; raises `ValueError` or `TypeError`, one line.
        prepare: makes the network's config and weights from that config and the file's weights.
    """

    drafter: type[HiddenStateDrafter]
    types: tuple[str, ...]
    architectures: tuple[str, ...]
    read_config: Callable[[Spec, str], Any]
    prepare: Callable[[Any, Weights], tuple[Any, Weights]]


def prepare_eagle3(config: Eagle3Config, weights: Weights) -> tuple[Eagle3Config, Weights]:
    """See `DrafterFormat`: some files call the first layer `midlayer`."""
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    if not config.reduced:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    return config, weights


def prepare_block(config: DFlashConfig, weights: Weights) -> tuple[DFlashConfig, Weights]:
    """See `DrafterFormat`: a head of the whole vocabulary is the target's, and need not be there."""
    if not config.reduced:
        config = replace(config, draft_vocab_size=config.layer.vocab_size if "lm_head.weight" in weights else None)
        weights = weights | {"d2t": torch.zeros(config.draft_vocab_size or 0, dtype=torch.int64)}
    return config, weights


FORMATS = (
    DrafterFormat(DSparkDrafter, ("dspark",), ("Qwen3DSparkModel",), read_dspark, prepare_block),
    DrafterFormat(DFlashDrafter, ("dflash", "pard2"), ("DFlashDraftModel",), read_dflash, prepare_block),
    DrafterFormat(DFlash2Drafter, ("dflash2",), ("DFlash2DraftModel",), read_dflash2, prepare_block),
    DrafterFormat(Eagle3Drafter, ("eagle3",), PLAIN, read_eagle3, prepare_eagle3),
)


def format_of(spec: Spec) -> DrafterFormat:
    """Return the format of a config; that of EAGLE-3, which reports configs of none, if it matches no other."""
    kind = spec.get("speculators_model_type")
    for form in FORMATS:
        if kind in form.types or (kind is None and names_one_of(spec, form.architectures)):
            return form
    return FORMATS[-1]
