"""File formats of block drafters: DFlash and DFlash 2 in those of z-lab and `speculators` (whose PARD-2 is DFlash trained otherwise), DSpark in those of
DeepSpec, the authors' code, and `speculators`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...validation import check_flag, check_int, check_number, listed, shown
from ..networks.dflash2_network import DFlash2Config, DFlash2Network
from ..networks.dflash_network import DFlashConfig, DFlashNetwork
from ..networks.dspark_network import MARKOV_HEADS, DSparkConfig, DSparkNetwork
from ..networks.sight import WIDEST, Sight, read_windows
from .configs import SIZES, Spec, layer_spec, names_one_of, read_layer, read_layer_ids, read_width
from .weights import assign_weights


LONGEST_BLOCK = 1024
Config = TypeVar("Config", DFlashConfig, DFlash2Config, DSparkConfig)


def is_dflash(spec: Spec) -> bool:
    """Return whether a config is DFlash's, in either format."""
    kind = spec.get("speculators_model_type")
    return kind in ("dflash", "pard2") or (kind is None and names_one_of(spec, ("DFlashDraftModel",)))


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


def _dflash_sights(settings: Spec, where: str, layers: int) -> tuple[Sight, ...]:
    """Return what each layer sees; windowed layers are causal unless a file says otherwise, as in vLLM and z-lab's code."""
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
        sights.append(Sight(reach, window is not None and not speculators, among))
    return tuple(sights)


def _spread(blocks: int, layers: int) -> list[int]:
    """Return a target block for each of the network's layers, evenly spaced from the second on, for files that name none."""
    if layers == 1:
        return [blocks // 2]
    return [round(1 + i * (blocks - 4) / (layers - 1)) for i in range(layers)]


def make_dflash(config: DFlashConfig, weights: dict[str, torch.Tensor], where: str) -> DFlashNetwork:
    """Return the network with these weights."""
    config = _with_head(config, weights)
    return assign_weights(DFlashNetwork, config, Qwen3RotaryEmbedding, weights, where)


def _with_head(config: Config, weights: dict[str, torch.Tensor]) -> Config:
    """Return the config with the head that the file has: of the whole vocabulary it is the target's, and need not be there."""
    if config.reduced:
        return config
    config = replace(config, draft_vocab_size=config.layer.vocab_size if "lm_head.weight" in weights else None)
    weights["d2t"] = torch.zeros(config.draft_vocab_size or 0, dtype=torch.int64)
    return config


def is_dflash2(spec: Spec) -> bool:
    """Return whether a config is DFlash 2's, in either format."""
    kind = spec.get("speculators_model_type")
    return kind == "dflash2" or (kind is None and names_one_of(spec, ("DFlash2DraftModel",)))


def read_dflash2(spec: Spec, where: str) -> DFlash2Config:
    """Return the config of a DFlash 2 network."""
    base, nested = read_dflash(spec, where), spec.get("dflash_config")
    settings = {**spec, **(nested if isinstance(nested, Mapping) else {})}
    highest = {
        "conv_kernel_size": base.block,
        "conv_group_size": base.layer.hidden_size,
        "selector_rank": SIZES["hidden_size"],
    }
    highest["selector_top_k"] = base.layer.vocab_size
    for name, high in highest.items():
        check_int(f"{where}: {name}", settings.get(name), 1, high)
    taps, group, rank, candidates = (int(settings[name]) for name in highest)
    if base.layer.hidden_size % group:
        raise ValueError(
            f"{where}: conv_group_size: expected a divisor of hidden_size {base.layer.hidden_size}, got {group}"
        )
    if base.reduced:
        raise ValueError(
            f"{where}: draft_vocab_size: a DFlash 2 drafter has the target's whole vocabulary, got {base.draft_vocab_size}"
        )
    return DFlash2Config(**vars(base), taps=taps, group=group, rank=rank, candidates=candidates)


def make_dflash2(config: DFlash2Config, weights: dict[str, torch.Tensor], where: str) -> DFlash2Network:
    """Return the network with these weights."""
    config = _with_head(config, weights)
    return assign_weights(DFlash2Network, config, Qwen3RotaryEmbedding, weights, where)


def is_dspark(spec: Spec) -> bool:
    """Return whether a config is DSpark's, in either format."""
    kind = spec.get("speculators_model_type")
    return kind == "dspark" or (kind is None and names_one_of(spec, ("Qwen3DSparkModel",)))


def read_dspark(spec: Spec, where: str) -> DSparkConfig:
    """Return the config of a DSpark network: without a Markov and a confidence head it is DFlash, of which DeepSpec's files have this form, too."""
    base, rank = read_dflash(spec, where, anchor=True), spec.get("markov_rank", 256)
    if (base.scale, base.cap) != (1, None):
        raise ValueError(
            f"{where}: output_multiplier and final_logit_softcapping are not supported in a DSpark drafter"
        )
    check_int(f"{where}: markov_rank", rank, 0, SIZES["hidden_size"])
    kind = spec.get("markov_head_type", "vanilla")
    if kind not in MARKOV_HEADS:
        raise ValueError(
            f"{where}: markov_head_type {shown(kind)} is not known here, which has {listed(MARKOV_HEADS)}"
        )
    if rank and kind == "rnn" and not base.from_anchor:
        raise ValueError(f"{where}: a Markov head 'rnn' with sample_from_anchor false is not supported here")
    confidence = spec.get("enable_confidence_head", True)
    with_token = spec.get("confidence_head_with_markov", confidence)
    check_flag(f"{where}: enable_confidence_head", confidence)
    check_flag(f"{where}: confidence_head_with_markov", with_token)
    if confidence and with_token and not rank:
        raise ValueError(f"{where}: confidence_head_with_markov needs a Markov head, and markov_rank is 0")
    return DSparkConfig(**vars(base), rank=rank, markov=kind, confidence=confidence, confidence_reads_token=with_token)


def make_dspark(config: DSparkConfig, weights: dict[str, torch.Tensor], where: str) -> DSparkNetwork:
    """Return the network with these weights."""
    config = _with_head(config, weights)
    return assign_weights(DSparkNetwork, config, Qwen3RotaryEmbedding, weights, where)


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
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence and config.confidence_reads_token,
    }
