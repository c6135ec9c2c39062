"""Drafters of EAGLE-1 and 2 in files, as EAGLE's own repositories hold them. `loading` hands the config and the weights over."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..models.eagle1 import Eagle1Config, Eagle1Network
from ..validation import check_flag
from .eagle3_files import layer_config
from .weights import assigned, unloaded


def is_its(spec: Mapping[str, Any]) -> bool:
    """Whether a config is one of EAGLE-1's or 2's: it names the ordinary class, and no vocabulary of its own. Weights decide in the end."""
    architectures = spec.get("architectures")
    own = isinstance(architectures, list) and "LlamaForCausalLM" in architectures
    return own and "draft_vocab_size" not in spec and spec.get("speculators_model_type") is None


def read_config(spec: Mapping[str, Any], where: str) -> Eagle1Config:
    """An `Eagle1Config` from what a config.json holds; `where` names it in errors."""
    bias = spec.get("bias", False)
    check_flag(f"{where}: bias", bias)
    return Eagle1Config(layer_config(spec, where), bias)


def network_of(config: Eagle1Config, weights: dict[str, torch.Tensor], where: str) -> Eagle1Network:
    """The network with these weights, by their names in files. `where` names them in errors."""
    if "fc.weight" not in weights:
        raise ValueError(
            f"{where} holds no drafter (no fc.weight), but perhaps a model: pass that as assistant_model itself"
        )
    config = Eagle1Config(config.layer, "fc.bias" in weights)
    weights["d2t"] = torch.zeros(0, dtype=torch.int64)
    own = "embed_tokens.weight" in weights
    network = unloaded(lambda: Eagle1Network(config, own), lambda: LlamaRotaryEmbedding(config.layer), where)
    return assigned(network, weights, where)
