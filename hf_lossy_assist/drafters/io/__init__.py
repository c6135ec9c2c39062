"""Files of trained drafters: EAGLE, DFlash and DSpark. No code from a folder is run, and pickles are read only if the caller allows it."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from ...artifacts.files import check_readable, format_json, new_folder, write_bytes
from ...artifacts.hub import fetch
from ...artifacts.identity import ModelIdentity
from ...artifacts.json_io import read_json
from ...models.introspection import base_of
from ...validation import check_flag, shown
from ..hidden_state import HiddenStateDrafter
from ..networks.corrected_networks import DSparkConfig
from ..networks.eagle_network import Eagle3Config, Eagle3Network
from ..networks.sight import FULL, SLIDING, Sight
from ..trained import DSparkDrafter, Eagle3Drafter
from .configs import LAYER_SETTINGS, read_proposal, read_trained_length
from .formats import dspark_entries, eagle3_entries, format_of
from .weights import CONFIG, WEIGHTS, assign_weights, read_weights


SPECULATORS = "0.9.0"  # the version whose format is written


def load_drafter(source: str | Path, *, pickle: bool = False, **kwargs: Any) -> HiddenStateDrafter:
    """Load a trained drafter of EAGLE, DFlash or DSpark, for `generate(assistant_model=drafter, lossy_policy=…)`.

    Args:
        source: a folder, or `org/name` on the Hub (`org/name@revision` pins one).
        pickle: read `pytorch_model.bin` if there is no model.safetensors. Only tensors are taken from it (`torch.load(weights_only=True)`).
        kwargs: the Hub's `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises: `ValueError`, one line, for files that are missing, damaged, of another kind of drafter, or inconsistent with their config; the errors
    of `huggingface_hub` for repositories that are missing, private or gated.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"load_drafter: expected a folder, or org/name on the Hub, got {shown(source)}")
    source = str(source)
    check_flag("pickle", pickle)
    config_file = fetch(source, [CONFIG], **kwargs)[0]
    where, spec = str(config_file), read_json(config_file)
    if not isinstance(spec, dict):
        raise ValueError(f"{where}: expected an object, the config of a drafter, got {shown(spec)}")
    form = format_of(spec)
    try:
        config = form.read_config(spec, where)
        proposal, length = read_proposal(spec, where), read_trained_length(spec, where)
    except TypeError as error:  # an error of the file, not of the caller
        raise ValueError(str(error)) from None
    weights, weights_file = read_weights(source, pickle, **kwargs)
    network = assign_weights(form.drafter.networks[0], *form.prepare(config, weights), weights_file)
    return form.drafter(network, source, proposal, length)


def save_drafter(
    drafter: Eagle3Drafter | DSparkDrafter,
    folder: str | Path,
    target: PreTrainedModel | None = None,
    *,
    embeddings: bool = True,
) -> None:
    """Write an EAGLE-3 or DSpark drafter's config.json and model.safetensors in the format of `speculators`, for vLLM and SGLang; all or nothing.

    Args:
        folder: a new one.
        target: the model that it drafts for, recorded for engines.
        embeddings: if an EAGLE-3 drafter has none and `target` is given, include the target's, for engines that expect them.

    Raises: `TypeError` or `ValueError`, one line, for another kind of drafter and for one in int8.
    """
    if not isinstance(drafter, Eagle3Drafter | DSparkDrafter):
        raise TypeError(f"save_drafter: expected an Eagle3Drafter or a DSparkDrafter, got {shown(drafter)}")
    network, config, proposal = drafter.network, drafter.network.config, drafter.proposal
    if isinstance(config, DSparkConfig) and any(sight != Sight() for sight in config.sights):
        raise ValueError(
            "save_drafter: a DSpark drafter with windows is not written here: copy the files that it was loaded from"
        )
    if drafter.in_int8:
        raise ValueError("save_drafter: this drafter is in int8: save the one that int8() was called on")
    base = None if target is None else base_of(target)
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in network.state_dict().items()}
    if network.embed_tokens is None and base is not None and embeddings and isinstance(config, Eagle3Config):
        rows = base.get_input_embeddings().weight
        weights["embed_tokens.weight"] = rows.detach().to(network.dtype).contiguous().cpu()
    if config.reduced:
        weights["t2d"] = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        weights["t2d"][network.target_ids.cpu()] = True
    else:
        weights.pop("d2t")
    layer = {name: value for name, value in config.layer.to_dict().items() if name in LAYER_SETTINGS}
    reaches = [sight.reach for sight in network.sights] if isinstance(network, Eagle3Network) else []
    if (reach := max((reach for reach in reaches if reach is not None), default=None)) is not None:
        kinds = [FULL if reach is None else SLIDING for reach in reaches]
        layer |= {"layer_types": kinds, "sliding_window": reach + 1, "use_sliding_window": True}
    narrow = config.target_hidden_size == config.layer.hidden_size
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": proposal.tokens,
        "verifier_accept_k": proposal.accept_k,
        "accept_tolerance": proposal.accept_tolerance,
    }
    spec = {
        "speculators_model_type": drafter.model_type,
        "speculators_version": SPECULATORS,
        "dtype": str(network.dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size or config.layer.vocab_size,
        "target_hidden_size": None if narrow else config.target_hidden_size,
        **(eagle3_entries(config) if isinstance(config, Eagle3Config) else dspark_entries(config)),
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": config.layer.model_type, **layer},
        "speculators_config": {
            "algorithm": drafter.model_type,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": None if base is None else ModelIdentity.of(base).id,
                "architectures": [] if base is None else [type(base).__name__],
            },
        },
    }
    with new_folder(folder) as made, check_readable("this drafter", made):
        (made / CONFIG).write_text(format_json(spec), encoding="utf-8")
        write_bytes(made / WEIGHTS, safetensors.torch.save(weights))  # `save_file` raises another error on a full disk
        load_drafter(made)
