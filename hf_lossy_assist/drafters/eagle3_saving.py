"""EAGLE-3 drafters written as `speculators` writes them, which vLLM and SGLang load."""

from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ..artifacts.files import check_readable, format_json, new_folder, write_bytes
from ..models.eagle3 import Eagle3Config
from ..models.identity import ModelIdentity
from ..models.introspection import base_of
from ..validation import shown
from .eagle3 import Eagle3Drafter
from .eagle3_files import FLAGS, layer_settings
from .loading import load_drafter
from .weights import CONFIG, WEIGHTS


SPECULATORS = "0.9.0"  # whose form it is


def save_drafter(drafter: Eagle3Drafter, folder: str | Path, target: Any = None, *, embeddings: bool = True) -> None:
    """Write config.json and model.safetensors into a folder, all or nothing. `target`: the model that it drafts for, for engines to find.

    `embeddings`: where the drafter has none of its own and `target` is given, the target's come with it, for engines that expect them.
    """
    if not isinstance(drafter, Eagle3Drafter):
        raise TypeError(f"save_drafter: expected an Eagle3Drafter, got {shown(drafter)}")
    network, proposal = drafter.network, drafter.proposal
    config = network.config
    if not isinstance(config, Eagle3Config):
        raise TypeError(f"save_drafter: expected an EAGLE-3 drafter, got one of {type(config).__name__}")
    if drafter.in_int8:
        raise ValueError("save_drafter: this drafter is in int8: save the one that int8() was called on")
    weights = {name: tensor.detach().contiguous().cpu() for name, tensor in network.state_dict().items()}
    if network.embed_tokens is None and target is not None and embeddings:
        rows = base_of(target).get_input_embeddings().weight
        weights["embed_tokens.weight"] = rows.detach().to(network.dtype).contiguous().cpu()
    if config.reduced:
        weights["t2d"] = torch.zeros(config.layer.vocab_size, dtype=torch.bool)
        weights["t2d"][network.kept.cpu()] = True
    else:
        weights.pop("d2t")
    layer = {
        name: value
        for name, value in config.layer.to_dict().items()
        if name in layer_settings(config.layer.model_type)
    }
    base = None if target is None else base_of(target)
    spec = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "dtype": str(network.dtype).removeprefix("torch."),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": None if config.target_hidden_size == config.layer.hidden_size else config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": None if config.target_layers is None else list(config.target_layers),
        **{name: getattr(config, name) for name in FLAGS},
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": config.layer.model_type, **layer},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": proposal.tokens,
                    "verifier_accept_k": proposal.accept_k,
                    "accept_tolerance": proposal.accept_tolerance,
                }
            ],
            "verifier": {
                "name_or_path": None if base is None else ModelIdentity.of(base).id,
                "architectures": [] if base is None else [type(base).__name__],
            },
        },
    }  # fmt: skip
    with new_folder(folder) as made, check_readable("this drafter", made):
        (made / CONFIG).write_text(format_json(spec), encoding="utf-8")
        write_bytes(made / WEIGHTS, safetensors.torch.save(weights))  # `save_file` raises its own error on a full disk
        load_drafter(made)
