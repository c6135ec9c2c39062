"""Files of trained drafters: EAGLE, DFlash and DSpark.
No code from a folder is run, and pickles are read only if the caller allows it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import PreTrainedModel

from ...artifacts.files import format_json, new_folder, read_object, write_bytes
from ...artifacts.hub import AGAIN, fetch
from ...artifacts.identity import ModelIdentity
from ...models.introspection import base_of
from ...validation import check_flag, one_line, shown
from ..hidden_state import HiddenStateDrafter
from ..networks.base import AttentionWindow, HiddenStateNetwork
from ..networks.corrected_networks import DSparkConfig
from ..networks.eagle_network import Eagle3Config, Eagle3Network
from ..trained import DSparkDrafter, Eagle3Drafter
from .formats import FULL, LAYER_SETTINGS, SLIDING, dspark_entries, eagle3_entries, format_of, read_proposal


SPECULATORS = "0.9.0"  # the version whose format is written
CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"  # for sharded weights
# DSpark's confidence head is no better than q's largest probability (docs/log.md).
CONFIDENCE = ("confidence_head.proj.weight", "confidence_head.proj.bias")
NOT_NEEDED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d", *CONFIDENCE)
SHARD = re.compile(r"[\w-][\w.-]{0,200}\.safetensors")


def load_drafter(source: str | Path, *, pickle: bool = False, **kwargs: Any) -> HiddenStateDrafter:
    """Load a trained drafter of EAGLE, DFlash or DSpark, for `generate(assistant_model=drafter, lossy_policy=…)`.

    Args:
        source: a folder, or `org/name` on the Hub (`org/name@revision` pins one).
        pickle: read `pytorch_model.bin` if there is no model.safetensors. Only tensors are taken from it
            (`torch.load(weights_only=True)`).
        kwargs: the Hub's `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises: `ValueError`, one line, for files that are missing, damaged, of another kind of drafter, or inconsistent
    with their config; the errors of `huggingface_hub` for repositories that are missing, private or gated.
    """
    if not isinstance(source, str | Path):
        raise TypeError(f"load_drafter: expected a folder, or org/name on the Hub, got {shown(source)}")
    source = str(source)
    check_flag("pickle", pickle)
    folder = fetch(source, [CONFIG, INDEX, "*.safetensors"], **kwargs)
    where, spec = str(folder / CONFIG), read_object(folder / CONFIG)
    form = format_of(spec)
    try:
        config = form.read_config(spec, where)
        proposal = read_proposal(spec, where)
    except TypeError as error:  # an error of the file, not of the caller
        raise ValueError(str(error)) from None
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        folder = fetch(source, [CONFIG, PICKLE], **kwargs)
    weights, weights_file = read_weights(folder, pickle)
    network = assign_weights(form.drafter.networks[0], *form.prepare(config, weights), weights_file)
    return form.drafter(network, source, proposal)


def save_drafter(
    drafter: Eagle3Drafter | DSparkDrafter,
    folder: str | Path,
    target: PreTrainedModel | None = None,
    *,
    embeddings: bool = True,
) -> None:
    """Write an EAGLE-3 or DSpark drafter's config.json and model.safetensors in the format of `speculators`, for vLLM
    and SGLang; all or nothing.

    Args:
        folder: a new one.
        target: the model that it drafts for, recorded for engines.
        embeddings: if an EAGLE-3 drafter has none and `target` is given, include the target's, for engines that expect
            them.

    Raises: `TypeError` or `ValueError`, one line, for another kind of drafter and for one in int8.
    """
    if not isinstance(drafter, Eagle3Drafter | DSparkDrafter):
        raise TypeError(f"save_drafter: expected an Eagle3Drafter or a DSparkDrafter, got {shown(drafter)}")
    network, config, proposal = drafter.network, drafter.network.config, drafter.proposal
    if isinstance(config, DSparkConfig) and any(sight != AttentionWindow() for sight in config.sights):
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
    with new_folder(folder) as out:
        (out / CONFIG).write_text(format_json(spec), encoding="utf-8")
        write_bytes(out / WEIGHTS, safetensors.torch.save(weights))  # `save_file` raises another error on a full disk
        load_drafter(out)


@contextmanager
def one_line_errors(where: str) -> Iterator[None]:
    """Raise any error of torch, Transformers or safetensors as a `ValueError`, one line that names the file."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
        raise ValueError(f"{where} is damaged or does not fit its {CONFIG} ({reason}): {AGAIN}") from None


def read_weights(folder: Path, pickle: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a folder, and the name of their file. Raises: `ValueError`, one line."""
    files = [folder / name for name in (WEIGHTS, INDEX, PICKLE) if (folder / name).is_file()]
    if not files:
        raise ValueError(f"{folder} has neither {WEIGHTS} nor {INDEX} nor {PICKLE}: there are no weights to load")
    file = files[0]
    if file.name == PICKLE and not pickle:
        raise ValueError(
            f"{folder} has {PICKLE}, a pickle, and no {WEIGHTS}: pickle=True takes the tensors alone from it "
            "(torch.load(weights_only=True))"
        )
    if file.name == INDEX:
        return _read_shards(file), str(file)
    with one_line_errors(str(file)):
        if file.name == PICKLE:
            return dict(torch.load(file, map_location="cpu", weights_only=True)), str(file)
        return safetensors.torch.load_file(file), str(file)


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all files named by an index; the files are in the same folder."""
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(SHARD.fullmatch(str(name)) for name in names.values()):
        raise ValueError(f"{index}: weight_map: expected names of .safetensors files, got {shown(names, 200)}")
    weights: dict[str, torch.Tensor] = {}
    for file in sorted({index.parent / name for name in names.values()}):
        with one_line_errors(str(file)):
            weights |= safetensors.torch.load_file(file)
    return weights


def assign_weights(
    make: type[HiddenStateNetwork], config: Any, weights: dict[str, torch.Tensor], where: str
) -> HiddenStateNetwork:
    """Return the network `make(config, has_embeddings)` with these weights.

    It is created on the meta device, since its sizes are not trusted until the weights match; its angles, which no file
    contains, are computed.
    Raises: `ValueError`, one line, for any failure of Transformers, weights that do not fit, and token ids out of
    range.
    """
    weights = {name: tensor for name, tensor in weights.items() if name not in NOT_NEEDED}
    with one_line_errors(where):
        with torch.device("meta"):
            network = make(config, "embed_tokens.weight" in weights)
        network.rotary_emb = type(network.rotary_emb)(config.layer)
        network.load_state_dict(weights, strict=True, assign=True)
        for name, tensor in (*network.named_parameters(), *network.rotary_emb.named_buffers()):
            if not tensor.is_floating_point() or not bool(tensor.isfinite().all()):
                raise ValueError(f"{name}: expected finite numbers of a float dtype, got {tensor.dtype}")
        network.to(network.dtype)  # some files have a head in another precision
        network.d2t = network.d2t.long()
    ids, size = network.target_ids, config.layer.vocab_size
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:  # on a GPU the process would end
        raise ValueError(f"{where}: d2t names tokens outside of a vocabulary of {size}: it is damaged ({AGAIN})")
    return network.eval().requires_grad_(False)
