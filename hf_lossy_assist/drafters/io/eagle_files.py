"""EAGLE drafters in files: EAGLE-3 of `speculators` and in the plain form (SpecForge, AngelSlim, DeepSpec, EAGLE itself), EAGLE-1 and 2 of EAGLE's own."""

from collections.abc import Mapping
from typing import Any

import torch

from ...validation import check_flag, check_int, listed, shown
from ..eagle import Eagle3Drafter
from ..networks.eagle_network import LAYER_KINDS, Eagle1Config, Eagle1Network, Eagle3Config, Eagle3Network
from .configs import DrafterFormat, names_one_of, read_layer, read_layer_ids, read_width
from .weights import assign_weights


PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "Qwen3Eagle3Model")  # the last is DeepSpec's
ORDINARY = (
    "LlamaForCausalLM",
)  # as EAGLE's own repositories have it, where EAGLE-3 alone has a vocabulary of its own
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CONFIGS = {kind: modules.config for kind, modules in LAYER_KINDS.items()}


def is_eagle1(spec: Mapping[str, Any]) -> bool:
    """Return whether a config may be EAGLE-1's or 2's; weights decide in the end."""
    others = "draft_vocab_size" in spec or spec.get("speculators_model_type") is not None
    return names_one_of(spec, ORDINARY) and not others


def read_eagle1(spec: Mapping[str, Any], where: str) -> Eagle1Config:
    """Return the config of an EAGLE-1 network."""
    bias = spec.get("bias", False)
    check_flag(f"{where}: bias", bias)
    return Eagle1Config(read_layer(spec, where, CONFIGS, "llama"), bias)


def make_eagle1(config: Eagle1Config, weights: dict[str, torch.Tensor], where: str) -> Eagle1Network:
    """Return the network with these weights."""
    if "fc.weight" not in weights:
        raise ValueError(
            f"{where} holds no drafter (no fc.weight), but perhaps a model: pass that as assistant_model itself"
        )
    config = Eagle1Config(config.layer, "fc.bias" in weights)
    weights["d2t"] = torch.zeros(0, dtype=torch.int64)
    return assign_weights(Eagle1Network, config, LAYER_KINDS["llama"].rotary, weights, where)


def read_eagle3(spec: Mapping[str, Any], where: str) -> Eagle3Config:
    """Return the config of an EAGLE-3 network."""
    kind = spec.get("speculators_model_type")
    plain = names_one_of(spec, PLAIN) or names_one_of(spec, ORDINARY) and "draft_vocab_size" in spec
    if kind not in (None, "eagle3") or not (kind or plain):
        given = shown(kind or spec.get("architectures"))
        found = f"speculators_model_type {given}" if kind else f"architectures {given}"
        raise ValueError(
            f"{where} is of no EAGLE-3 drafter ({found}): expected speculators_model_type 'eagle3' or one of {listed(PLAIN)}"
        )
    layer = read_layer(spec, where, CONFIGS, "llama")
    more = spec.get("eagle_config")
    # DeepSpec numbers layers by the block whose output it is, the others as `hidden_states` does.
    name, first = ("target_layer_ids", 1) if "target_layer_ids" in spec else ("eagle_aux_hidden_state_layer_ids", 0)
    ids = spec.get(name, more.get(name) if isinstance(more, Mapping) else None)
    layers = None if ids is None else read_layer_ids(ids, name, where, first)
    size = spec.get("draft_vocab_size", layer.vocab_size)
    check_int(f"{where}: draft_vocab_size", size, 1, layer.vocab_size)
    flags = {name: spec.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        check_flag(f"{where}: {name}", value)
    return Eagle3Config(layer, layers, size, read_width(spec, where, layer), **flags)


def make_eagle3(config: Eagle3Config, weights: dict[str, torch.Tensor], where: str) -> Eagle3Network:
    """Return the network with these weights."""
    first = {name: name.replace("midlayer.", "layers.0.") for name in weights if name.startswith("midlayer.")}
    twice = sorted(name.partition(".")[2] for name, plain in first.items() if plain in weights)
    if twice:
        raise ValueError(f"{where} has two first layers, midlayer.* and layers.0.*: both hold {listed(twice, 3)}")
    weights = {first.get(name, name): tensor for name, tensor in weights.items()}
    if not config.reduced:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    return assign_weights(Eagle3Network, config, config.kind.rotary, weights, where)


FORMATS = (
    DrafterFormat(Eagle3Drafter, is_eagle1, read_eagle1, make_eagle1),
    DrafterFormat(Eagle3Drafter, lambda spec: True, read_eagle3, make_eagle3),  # which refuses what no format matches
)
