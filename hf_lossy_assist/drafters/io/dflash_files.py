"""DFlash drafters in files: z-lab's own form, and `speculators`'."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ...validation import check_flag, check_int
from ..dflash import DFlashDrafter
from ..networks.dflash_network import DFlashConfig, DFlashNetwork
from .configs import SIZES, DrafterFormat, names_one_of, read_layer, read_layer_ids, read_width
from .weights import assign_weights


LONGEST_BLOCK = 1024


def is_dflash(spec: Mapping[str, Any]) -> bool:
    """Return whether a config is DFlash's, in either form."""
    kind = spec.get("speculators_model_type")
    return kind == "dflash" or (kind is None and names_one_of(spec, ("DFlashDraftModel",)))


def read_dflash(spec: Mapping[str, Any], where: str) -> DFlashConfig:
    """Return the config of a DFlash network."""
    speculators = spec.get("speculators_model_type") is not None
    layer = read_layer(spec, where, {"qwen3": Qwen3Config}, "qwen3")
    given = spec["transformer_layer_config"] if speculators else spec
    if given.get("is_causal") or set(given.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f"{where}: its layers see a window, or no later token of their block, which is not supported here"
        )
    nested = spec.get("dflash_config")
    settings = {**spec, **(nested if isinstance(nested, Mapping) else {})}
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids, blocks = settings.get(name), spec.get("num_target_layers")
    if ids is None and not speculators and blocks is not None:
        check_int(f"{where}: num_target_layers", blocks, 4, 10_000)
        ids = _spread(blocks, layer.num_hidden_layers)
    # speculators numbers layers as `hidden_states` does, DFlash itself by the block whose output it is.
    layers = read_layer_ids(ids, name, where, 0 if speculators else 1)
    block, mask = settings.get("block_size", 16), settings.get("mask_token_id")
    check_int(f"{where}: block_size", block, 2, LONGEST_BLOCK)
    check_int(f"{where}: mask_token_id", mask, 0, SIZES["vocab_size"])
    for setting in ("final_logit_softcapping", "output_multiplier", "input_embedding_scale"):
        if settings.get(setting) not in (None, 1, 1.0):
            raise ValueError(f"{where}: {setting} is not supported here")
    anchor = settings.get("sample_from_anchor", False)
    check_flag(f"{where}: sample_from_anchor", anchor)
    size = spec.get("draft_vocab_size") if speculators else None
    if size is not None:
        check_int(f"{where}: draft_vocab_size", size, 1, layer.vocab_size)
    assert isinstance(mask, int)
    return DFlashConfig(layer, layers, block, mask, read_width(spec, where, layer), anchor, size)


def _spread(blocks: int, layers: int) -> list[int]:
    """Return blocks of a target with so many, one for each of the network's layers: evenly from the second on, for files that name none."""
    if layers == 1:
        return [blocks // 2]
    return [round(1 + i * (blocks - 4) / (layers - 1)) for i in range(layers)]


def make_dflash(config: DFlashConfig, weights: dict[str, torch.Tensor], where: str) -> DFlashNetwork:
    """Return the network with these weights."""
    if not config.reduced:
        weights["d2t"] = torch.zeros(config.draft_vocab_size or 0, dtype=torch.int64)
    return assign_weights(DFlashNetwork, config, Qwen3RotaryEmbedding, weights, where)


FORMATS = (DrafterFormat(DFlashDrafter, is_dflash, read_dflash, make_dflash),)
