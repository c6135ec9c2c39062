"""EAGLE-3 drafters in files as others write them: `speculators` and the plain form of `LlamaForCausalLMEagle3` (SpecForge, AngelSlim, EAGLE itself).

Read: config.json and model.safetensors. No code of a folder is run, and no pickle is read unless the caller says so.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from ..artifacts.hub import AGAIN, fetch, holds
from ..artifacts.reading import read_json
from ..models.eagle3 import KINDS, Eagle3Config, Eagle3Network
from ..validation import check_flag, check_int, check_number, listed, one_line, shown
from .eagle3 import Eagle3Drafter, Proposal


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
PLAIN = ("LlamaForCausalLMEagle3", "Qwen3ForCausalLMEagle3")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Sizes of a decoder's config, and the most that is believed: what a file says is built before its weights are seen.
SIZES = {
    "hidden_size": 2**17, "intermediate_size": 2**20, "num_hidden_layers": 64, "num_attention_heads": 2**12, "num_key_value_heads": 2**12,
    "head_dim": 2**12, "vocab_size": 2**21,
}  # fmt: skip
NOT_NEEDED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d")


def load_drafter(source: str | Path, *, pickle: bool = False, **kwargs: Any) -> Eagle3Drafter:
    """A trained EAGLE-3 drafter from a folder or from the Hub, for `generate(assistant_model=drafter, lossy_policy=…)`.

    Args:
        source: a folder, or `org/name` on the Hub (`org/name@revision` pins one).
        pickle: read `pytorch_model.bin` where there is no model.safetensors. Tensors alone are taken from it (`torch.load(weights_only=True)`).
        kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`, as everywhere on the Hub.

    Raises: `ValueError`, one line, for files that are missing, damaged, of another kind of drafter, or do not fit their config; the errors
    of `huggingface_hub` for repositories that are missing, private or gated.
    """
    source = str(source)
    check_flag("pickle", pickle)
    config_file = fetch(source, [CONFIG], **kwargs)[0]
    spec = read_json(config_file)
    config = read_config(spec, str(config_file))
    if holds(source, WEIGHTS, **kwargs):
        weights_file = fetch(source, [WEIGHTS], **kwargs)[0]
        weights = _read(weights_file)
    elif holds(source, PICKLE, **kwargs):
        if not pickle:
            raise ValueError(
                f"{source} has {PICKLE}, a pickle, and no {WEIGHTS}: pickle=True takes the tensors alone from it (torch.load(weights_only=True))"
            )
        weights_file = fetch(source, [PICKLE], **kwargs)[0]
        weights = _unpickled(weights_file)
    else:
        raise ValueError(f"{source} has neither {WEIGHTS} nor {PICKLE}: there are no weights to load")
    proposal = read_proposal(spec, str(config_file))
    return Eagle3Drafter(network_of(config, weights, str(weights_file)), source, proposal)


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
    found = _layer(layer, where)
    more = spec.get("eagle_config") if isinstance(spec.get("eagle_config"), Mapping) else {}
    assert isinstance(more, Mapping)
    ids = spec.get("eagle_aux_hidden_state_layer_ids", more.get("eagle_aux_hidden_state_layer_ids"))
    if ids is not None:
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{where}: eagle_aux_hidden_state_layer_ids: expected a list of layers, got {shown(ids)}")
        for number in ids:
            check_int(f"{where}: eagle_aux_hidden_state_layer_ids", number, 0, 10_000)
    draft = spec.get("draft_vocab_size", found.vocab_size)
    check_int(f"{where}: draft_vocab_size", draft, 1, found.vocab_size)
    width = spec.get("target_hidden_size") or found.hidden_size
    check_int(f"{where}: target_hidden_size", width, 1, SIZES["hidden_size"])
    flags = {name: spec.get(name, False) for name in FLAGS}
    for name, value in flags.items():
        check_flag(f"{where}: {name}", value)
    return Eagle3Config(found, None if ids is None else tuple(ids), draft, width, **flags)


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


def _layer(spec: Mapping[str, Any], where: str) -> Any:
    """The config of the decoder layers."""
    kind = spec.get("model_type", "llama")
    if kind not in KINDS:
        raise ValueError(f"{where}: layers of model_type {shown(kind)} are not known here, which has {listed(KINDS)}")
    for name, most in SIZES.items():
        if spec.get(name) is not None:
            check_int(f"{where}: {name}", spec[name], 1, most)
        elif name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"):
            raise ValueError(f"{where}: {name} is missing")
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
    weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in weights.items()}
    t2d = weights.get("t2d")
    weights = {name: tensor for name, tensor in weights.items() if name not in NOT_NEEDED}
    if not config.reduced:
        weights.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    with torch.device("meta"):  # its sizes are not to be trusted before the weights have them
        network = Eagle3Network(config, own_embeddings="embed_tokens.weight" in weights)
    network.rotary_emb = config.kind.rotary(config.layer)
    try:
        network.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"{where} does not fit its {CONFIG}: {one_line(error, 400)}") from None
    for name, tensor in network.named_parameters():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"{where}: {name} is of dtype {tensor.dtype}; expected {listed(DTYPES)}")
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{where}: {name} holds NaN or infinities: download it again ({AGAIN})")
    _check_ids(network, t2d, where)
    return network.eval().requires_grad_(False)


def _check_ids(network: Eagle3Network, t2d: torch.Tensor | None, where: str) -> None:
    """Refuse a reduced vocabulary that is no part of the target's."""
    size, d2t = network.config.layer.vocab_size, network.d2t
    if d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: d2t is of dtype {d2t.dtype}; expected whole numbers")
    network.d2t = d2t.long()
    kept = network.kept
    if int(kept.min()) < 0 or int(kept.max()) >= size or len(kept.unique()) < len(kept):
        raise ValueError(f"{where}: d2t names tokens twice, or outside of a vocabulary of {size}")
    if t2d is not None and (t2d.shape != (size,) or not torch.equal(t2d.nonzero()[:, 0], kept.sort().values)):
        raise ValueError(f"{where}: d2t and t2d name other tokens: it is damaged, download it again ({AGAIN})")


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({one_line(error)}): download it again ({AGAIN})"
        ) from None


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, or more than tensors: refused either way
        raise ValueError(f"{file} holds more than tensors, or is damaged: {one_line(error, 200)}") from None
    if not isinstance(found, Mapping) or not all(isinstance(its, torch.Tensor) for its in found.values()):
        raise ValueError(f"{file}: expected tensors by name, got {type(found).__name__}")
    return dict(found)
