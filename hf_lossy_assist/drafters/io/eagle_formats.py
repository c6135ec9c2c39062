"""File formats of EAGLE's drafters: EAGLE-3 in the format of `speculators` and in the plain one (SpecForge, AngelSlim, DeepSpec, EAGLE)."""

from collections.abc import Mapping

import torch

from ...validation import check_flag, check_int, listed, shown
from ..networks.eagle_network import LAYER_KINDS, Eagle3Config, Eagle3Network
from ..networks.sight import CAUSAL, Sight, read_windows
from .configs import Spec, layer_spec, names_one_of, read_layer, read_layer_ids, read_width
from .weights import assign_weights


PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3", "Qwen3Eagle3Model")  # the last is DeepSpec's
# The class in EAGLE's repositories, where only EAGLE-3 has a separate draft vocabulary.
ORDINARY = ("LlamaForCausalLM",)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
CONFIGS = {kind: modules.config for kind, modules in LAYER_KINDS.items()}


def _eagle_sights(spec: Spec, where: str, layers: int) -> tuple[Sight, ...]:
    """Return what each layer of an EAGLE network sees; a window counts the last known pair."""
    windows = read_windows(layer_spec(spec, where), where, layers)
    return tuple(CAUSAL if window is None else Sight(window - 1, causal=True) for window in windows)


def read_eagle3(spec: Spec, where: str) -> Eagle3Config:
    """Return the config of an EAGLE-3 network."""
    kind = spec.get("speculators_model_type")
    plain = names_one_of(spec, PLAIN) or names_one_of(spec, ORDINARY) and "draft_vocab_size" in spec
    if kind not in (None, "eagle3") or not (kind or plain):
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
    return assign_weights(Eagle3Network, config, config.kind.rotary, weights, where)


def eagle3_entries(config: Eagle3Config) -> dict[str, object]:
    """Return the entries of a config in the format of `speculators` that only EAGLE-3 has."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "eagle_aux_hidden_state_layer_ids": None if config.target_layers is None else list(config.target_layers),
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": False,
    }
