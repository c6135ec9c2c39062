"""Read the config.json of drafters from untrusted sources: the parts that all formats share. `where` names the file in errors."""

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedConfig

from ...validation import check_int, check_number, listed, one_line, shown
from ..base import Proposal
from ..networks.sight import WIDEST


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
LAYER_SETTINGS = {
    *SIZES, "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias",
}  # fmt: skip


Spec: TypeAlias = Mapping[str, Any]  # content of a config.json


def names_one_of(spec: Spec, architectures: tuple[str, ...]) -> bool:
    """Return whether a config names one of these classes."""
    given = spec.get("architectures")
    return isinstance(given, list) and any(name in architectures for name in given)


def layer_spec(spec: Spec, where: str) -> Spec:
    """Return the settings of the decoder layers, which `speculators` nests in a separate object."""
    layer = spec if spec.get("speculators_model_type") is None else spec.get("transformer_layer_config")
    if not isinstance(layer, Mapping):
        raise ValueError(f"{where}: transformer_layer_config: expected an object, got {shown(layer)}")
    return layer


def read_trained_length(spec: Spec, where: str) -> int | None:
    """Return the length of texts that a drafter was made for, or None if its file does not say it."""
    length = layer_spec(spec, where).get("max_position_embeddings")
    if length is not None:
        check_int(f"{where}: max_position_embeddings", length, 1, WIDEST)
    return length


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
    """Return the layers whose states the network reads, numbered as in `hidden_states`. `first`: 1 if the file counts blocks from 0."""
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: {name}: expected a list of layers, got {shown(ids)}")
    for number in ids:
        check_int(f"{where}: {name}", number, -first, 10_000)  # the embeddings come before block 0
    return tuple(first + number for number in ids)


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
