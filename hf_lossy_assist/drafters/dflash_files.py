"""DFlash drafters in files: z-lab's own form, and `speculators`'. `loading` hands the config and the weights over."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..models.dflash import DFlashConfig, DFlashNetwork
from ..validation import check_flag, check_int, one_line, shown
from .eagle3_files import layer_settings
from .weights import SIZES, assigned, check_sizes, unloaded


OWN = "DFlashDraftModel"
LONGEST = 1024  # of a block


def is_its(spec: Mapping[str, Any]) -> bool:
    """Whether a config is one of DFlash's, of either form."""
    architectures = spec.get("architectures")
    kind = spec.get("speculators_model_type")
    return kind == "dflash" or (kind is None and isinstance(architectures, list) and OWN in architectures)


def read_config(spec: Mapping[str, Any], where: str) -> DFlashConfig:
    """A `DFlashConfig` from what a config.json holds; `where` names it in errors."""
    speculators = spec.get("speculators_model_type") is not None
    layer = spec.get("transformer_layer_config") if speculators else spec
    if not isinstance(layer, Mapping):
        raise ValueError(f"{where}: transformer_layer_config: expected an object, got {shown(layer)}")
    found = _layer(layer, where)
    own = spec.get("dflash_config")
    more = {**spec, **(own if isinstance(own, Mapping) else {})}
    name = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    ids = more.get(name)
    if ids is None and not speculators and spec.get("num_target_layers") is not None:
        check_int(f"{where}: num_target_layers", spec["num_target_layers"], 4, 10_000)
        ids = _spread(spec["num_target_layers"], found.num_hidden_layers)
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: {name}: expected a list of layers, got {shown(ids)}")
    for number in ids:
        check_int(f"{where}: {name}", number, 0, 10_000)
    block, mask = more.get("block_size", 16), more.get("mask_token_id")
    check_int(f"{where}: block_size", block, 2, LONGEST)
    check_int(f"{where}: mask_token_id", mask, 0, SIZES["vocab_size"])
    width = spec.get("target_hidden_size") or found.hidden_size
    check_int(f"{where}: target_hidden_size", width, 1, SIZES["hidden_size"])
    for setting in ("final_logit_softcapping", "output_multiplier", "input_embedding_scale"):
        if more.get(setting) not in (None, 1, 1.0):
            raise ValueError(f"{where}: {setting} is not supported here")
    anchor = more.get("sample_from_anchor", False)
    check_flag(f"{where}: sample_from_anchor", anchor)
    draft = spec.get("draft_vocab_size") if speculators else None
    if draft is not None:
        check_int(f"{where}: draft_vocab_size", draft, 1, found.vocab_size)
    # speculators numbers layers as `hidden_states` does, DFlash itself by the block whose output it is.
    layers = tuple(number if speculators else number + 1 for number in ids)
    assert isinstance(mask, int)
    return DFlashConfig(found, layers, block, mask, width, anchor, draft)


def _spread(blocks: int, layers: int) -> list[int]:
    """Whose outputs a network of so many layers reads of a target with so many blocks, where nothing is said: evenly from the second on."""
    if layers == 1:
        return [blocks // 2]
    return [round(1 + i * (blocks - 4) / (layers - 1)) for i in range(layers)]


def _layer(spec: Mapping[str, Any], where: str) -> Any:
    """The config of its layers."""
    kind = spec.get("model_type", "qwen3")
    if kind != "qwen3":
        raise ValueError(f"{where}: layers of model_type {shown(kind)} are not known here, which has qwen3")
    check_sizes(spec, where)
    kinds = spec.get("layer_types")
    if spec.get("is_causal") or (kinds is not None and set(kinds) != {"full_attention"}):
        raise ValueError(
            f"{where}: its layers see a window, or no later token of their block, which is not supported here"
        )
    try:
        return Qwen3Config(**{name: value for name, value in spec.items() if name in layer_settings("qwen3")})
    except Exception as error:  # whatever Transformers stumbles over in a file that anybody may have written
        raise ValueError(f"{where}: {one_line(error, 300)}") from None


def network_of(config: DFlashConfig, weights: dict[str, torch.Tensor], where: str) -> DFlashNetwork:
    """The network with these weights, by their names in files. `where` names them in errors."""
    if not config.reduced:
        weights["d2t"] = torch.zeros(config.draft_vocab_size or 0, dtype=torch.int64)
    own = "embed_tokens.weight" in weights
    network = unloaded(lambda: DFlashNetwork(config, own), lambda: Qwen3RotaryEmbedding(config.layer), where)
    return assigned(network, weights, where)
