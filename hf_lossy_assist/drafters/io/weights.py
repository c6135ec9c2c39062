"""Read weights of drafters from untrusted files and load them into a network."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from ...artifacts.hub import AGAIN, fetch, has_file
from ...artifacts.json_io import read_object
from ...validation import one_line, shown
from ..networks.base import HiddenStateNetwork


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"  # for sharded weights
NOT_NEEDED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d")
SHARD = re.compile(r"[\w-][\w.-]{0,200}\.safetensors")


@contextmanager
def one_line_errors(where: str) -> Iterator[None]:
    """Raise any error of torch, Transformers or safetensors as a `ValueError`, one line that names the file."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error, 300)}"
        raise ValueError(f"{where} is damaged or does not fit its {CONFIG} ({reason}): {AGAIN}") from None


def read_weights(source: str, pickle: bool, **kwargs: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a folder or repository, and the name of their file. Raises: `ValueError`, one line."""
    files = [name for name in (WEIGHTS, INDEX, PICKLE) if has_file(source, name, **kwargs)]
    if not files:
        raise ValueError(f"{source} has neither {WEIGHTS} nor {INDEX} nor {PICKLE}: there are no weights to load")
    if files == [PICKLE] and not pickle:
        raise ValueError(
            f"{source} has {PICKLE}, a pickle, and no {WEIGHTS}: pickle=True takes the tensors alone from it (torch.load(weights_only=True))"
        )
    file = fetch(source, files[:1], **kwargs)[0]
    if files[0] == INDEX:
        return _read_shards(source, file, **kwargs), str(file)
    with one_line_errors(str(file)):
        if files[0] == PICKLE:
            return dict(torch.load(file, map_location="cpu", weights_only=True)), str(file)
        return safetensors.torch.load_file(file), str(file)


def _read_shards(source: str, index: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of all files named by an index; the files are in the same folder."""
    names = read_object(index, "an object, the index of weights").get("weight_map")
    if not isinstance(names, dict) or not all(SHARD.fullmatch(str(name)) for name in names.values()):
        raise ValueError(f"{index}: weight_map: expected names of .safetensors files, got {shown(names, 200)}")
    weights: dict[str, torch.Tensor] = {}
    for file in fetch(source, sorted(set(names.values())), **kwargs):
        with one_line_errors(str(file)):
            weights |= safetensors.torch.load_file(file)
    return weights


def assign_weights(
    make: type[HiddenStateNetwork], config: Any, weights: dict[str, torch.Tensor], where: str
) -> HiddenStateNetwork:
    """Return the network `make(config, has_embeddings)` with these weights.

    It is created on the meta device, since its sizes are not trusted until the weights match; its angles, which no file contains, are computed.
    Raises: `ValueError`, one line, for any failure of Transformers, weights that do not fit, and token ids out of range.
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
