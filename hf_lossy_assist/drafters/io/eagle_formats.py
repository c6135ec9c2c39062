"""File formats of EAGLE's drafters: EAGLE-3 and P-EAGLE in the format of `speculators` and in the plain one (SpecForge, AngelSlim, DeepSpec, EAGLE)."""

from collections.abc import Mapping

import torch

from ...validation import check_flag, check_int, listed, shown
from ..networks.eagle_network import (
    LAYER_KINDS,
    Eagle3Config,
    Eagle3Network,
    ParallelEagleConfig,
    ParallelEagleNetwork,
)
from ..networks.sight import CAUSAL, Sight, read_windows
from .configs import SIZES, Spec, layer_spec, names_one_of, read_layer, read_layer_ids, read_proposal, read_width
from .weights import assign_weights


PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "Qwen3Eagle3Model")  # the last is DeepSpec's
# The class in EAGLE's repositories, where only EAGLE-3 has a separate draft vocabulary.
ORDINARY = ("LlamaForCausalLM",)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
MASKS = ("mask_token_id", "ptd_token_id", "pard_token")  # the mask token's names in P-EAGLE's configs
PARALLEL_DRAFTS = 8  # tokens that speculators trains by default
CONFIGS = {kind: modules.config for kind, modules in LAYER_KINDS.items()}


def _eagle_sights(spec: Spec, where: str, layers: int) -> tuple[Sight, ...]:
    """Return what each layer of an EAGLE network sees; a window counts the last known pair, and P-EAGLE's moves on with each pair."""
    windows = read_windows(layer_spec(spec, where), where, layers)
    return tuple(CAUSAL if window is None else Sight(window - 1, is_peagle(spec), causal=True) for window in windows)


def read_eagle3(spec: Spec, where: str) -> Eagle3Config:
    """Return the config of an EAGLE-3 network."""
    kind = spec.get("speculators_model_type")
    plain = names_one_of(spec, PLAIN) or names_one_of(spec, ORDINARY) and "draft_vocab_size" in spec
    if kind not in (None, "eagle3", "peagle") or not (kind or plain):
        given = shown(kind or spec.get("architectures"))
        found = f"speculators_model_type {given}" if kind else f"architectures {given}"
        if kind is None and names_one_of(spec, ORDINARY):
            raise ValueError(
                f"{where} is a model, or a drafter of EAGLE-1 or 2, which are not read: pass a model as assistant_model itself"
            )
        raise ValueError(
            f"{where} is of no known drafter ({found}): expected DFlash, DFlash 2, DSpark, or EAGLE-3 (speculators_model_type 'eagle3' or one of {listed(PLAIN)})"
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
    sights = _eagle_sights(spec, where, layer.num_hidden_layers)
    return Eagle3Config(layer, layers, size, read_width(spec, where, layer), **flags, sights=sights)


def make_eagle3(config: Eagle3Config, weights: dict[str, torch.Tensor], where: str) -> Eagle3Network:
    """Return the network with these weights."""
    first = {name: name.replace("midlayer.", "layers.0.") for name in weights if name.startswith("midlayer.")}
    twice = sorted(name.partition(".")[2] for name, plain in first.items() if plain in weights)
    if twice:
        raise ValueError(f"{where} has two first layers, midlayer.* and layers.0.*: both hold {listed(twice, 3)}")
    weights = {first.get(name, name): tensor for name, tensor in weights.items()}
    if not config.reduced:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    if isinstance(config, ParallelEagleConfig):
        return assign_weights(ParallelEagleNetwork, config, config.kind.rotary, weights, where)
    return assign_weights(Eagle3Network, config, config.kind.rotary, weights, where)


def is_peagle(spec: Spec) -> bool:
    """Return whether a config is P-EAGLE's, in the format of `speculators` or in the plain one."""
    kind = spec.get("speculators_model_type")
    return kind == "peagle" or (kind is None and names_one_of(spec, PLAIN) and any(name in spec for name in MASKS[1:]))


def read_peagle(spec: Spec, where: str) -> ParallelEagleConfig:
    """Return the config of a P-EAGLE network."""
    base = read_eagle3(spec, where)
    mask = next((spec[name] for name in MASKS if spec.get(name) is not None), None)
    check_int(f"{where}: mask_token_id", mask, 0, SIZES["vocab_size"])
    drafts = read_proposal(spec, where).tokens if "speculators_config" in spec else PARALLEL_DRAFTS
    return ParallelEagleConfig(**vars(base) | {"mask": mask, "drafts": drafts})


def make_peagle(config: ParallelEagleConfig, weights: dict[str, torch.Tensor], where: str) -> ParallelEagleNetwork:
    """Return the network with these weights. Files have the learned state in several shapes."""
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].reshape(1, 1, -1)
    network = make_eagle3(config, weights, where)
    assert isinstance(network, ParallelEagleNetwork)
    return network


def eagle3_entries(config: Eagle3Config) -> dict[str, object]:
    """Return the entries of a config in the format of `speculators` that only EAGLE-3 has."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": None if config.target_layers is None else list(config.target_layers),
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": False,
    }
