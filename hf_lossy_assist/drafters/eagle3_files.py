"""EAGLE-3 drafters in files as others write them: `speculators` and the plain form of `LlamaForCausalLMEagle3` (SpecForge, AngelSlim, EAGLE itself).

`loading` hands the config and the weights over.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..models.eagle3 import KINDS, Eagle3Config, Eagle3Network
from ..validation import check_flag, check_int, check_number, listed, one_line, shown
from .states import Proposal
from .weights import SIZES, assigned, check_sizes, unloaded


PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "Qwen3Eagle3Model")  # the last is DeepSpec's
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def read_config(spec: Any, where: str) -> Eagle3Config:
    """An `Eagle3Config` from what a config.json holds; `where` names it in errors."""
    if not isinstance(spec, Mapping):
        raise ValueError(f"{where}: expected an object, the config of a drafter, got {shown(spec)}")
    kind, architectures = spec.get("speculators_model_type"), spec.get("architectures")
    plain = isinstance(architectures, list) and any(name in PLAIN for name in architectures)
    # EAGLE's own repositories name the ordinary class; its drafters alone have a vocabulary of their own.
    plain = plain or (
        isinstance(architectures, list) and "LlamaForCausalLM" in architectures and "draft_vocab_size" in spec
    )
    if kind not in (None, "eagle3") or not (kind or plain):
        found = f"speculators_model_type {shown(kind)}" if kind else f"architectures {shown(architectures)}"
        raise ValueError(
            f"{where} is of no EAGLE-3 drafter ({found}): expected speculators_model_type 'eagle3' or one of {listed(PLAIN)}"
        )
    layer = spec.get("transformer_layer_config") if kind else spec
    if not isinstance(layer, Mapping):
        raise ValueError(f"{where}: transformer_layer_config: expected an object, got {shown(layer)}")
    found = layer_config(layer, where)
    more = spec.get("eagle_config") if isinstance(spec.get("eagle_config"), Mapping) else {}
    assert isinstance(more, Mapping)
    # DeepSpec numbers layers by the block whose output it is, the others as `hidden_states` does.
    name, first = ("target_layer_ids", 1) if "target_layer_ids" in spec else ("eagle_aux_hidden_state_layer_ids", 0)
    ids = spec.get(name, more.get(name))
    if ids is not None:
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{where}: {name}: expected a list of layers, got {shown(ids)}")
        for number in ids:
            check_int(f"{where}: {name}", number, 0, 10_000)
    draft = spec.get("draft_vocab_size", found.vocab_size)
    check_int(f"{where}: draft_vocab_size", draft, 1, found.vocab_size)
    width = spec.get("target_hidden_size") or found.hidden_size
    check_int(f"{where}: target_hidden_size", width, 1, SIZES["hidden_size"])
    flags = {name: spec.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        check_flag(f"{where}: {name}", value)
    return Eagle3Config(found, None if ids is None else tuple(first + number for number in ids), draft, width, **flags)


def read_proposal(spec: Mapping[str, Any], where: str) -> Proposal:
    """How the files suggest to draft and to accept: the first proposal method of `speculators_config`."""
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


def layer_config(spec: Mapping[str, Any], where: str) -> Any:
    """The config of the decoder layers."""
    kind = spec.get("model_type", "llama")
    if kind not in KINDS:
        raise ValueError(f"{where}: layers of model_type {shown(kind)} are not known here, which has {listed(KINDS)}")
    check_sizes(spec, where)
    given = {name: value for name, value in spec.items() if name in layer_settings(kind)}
    try:
        layer = KINDS[kind].config(**given)
    except Exception as error:  # whatever Transformers stumbles over in a file that anybody may have written
        raise ValueError(f"{where}: {one_line(error, 300)}") from None
    if any(its != "full_attention" for its in getattr(layer, "layer_types", None) or ()):
        raise ValueError(f"{where}: its layers see a window of the text (layer_types), which is not supported")
    return layer


def layer_settings(kind: str) -> set[str]:
    """Settings of a decoder layer: no other entry of a file reaches Transformers."""
    return {
        *SIZES, "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
    }  # fmt: skip


def network_of(config: Eagle3Config, weights: dict[str, torch.Tensor], where: str) -> Eagle3Network:
    """The network with these weights, by their names in files. `where` names them in errors."""
    twice = sorted(
        name for name in weights if name.startswith("midlayer.") and name.replace("midlayer.", "layers.0.") in weights
    )
    if twice:
        raise ValueError(
            f"{where} has two first layers, midlayer.* and layers.0.*: both hold {listed([its.partition('.')[2] for its in twice], 3)}"
        )
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    if not config.reduced:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    own = "embed_tokens.weight" in weights
    network = unloaded(lambda: Eagle3Network(config, own), lambda: config.kind.rotary(config.layer), where)
    return assigned(network, weights, where)
