"""Read weights of drafters from untrusted files, check them and load them into a network."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError
from transformers import PreTrainedConfig

from ...artifacts.hub import AGAIN, fetch, has_file
from ...artifacts.json_io import read_object
from ...validation import listed, one_line, shown
from ..networks.base import HiddenStateNetwork
from ..networks.dflash2_network import DFlash2Config
from ..networks.dflash_network import DFlashConfig
from ..networks.dspark_network import DSparkConfig
from ..networks.eagle_network import Eagle3Config


CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"  # for sharded weights
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
NOT_NEEDED = ("verifier_lm_head.weight", "verifier_norm.weight", "rotary_emb.inv_freq", "t2d")
SHARD = re.compile(r"[\w-][\w.-]{0,200}\.safetensors")
Network = TypeVar("Network", bound=HiddenStateNetwork)
Config = TypeVar("Config", Eagle3Config, DFlashConfig, DFlash2Config, DSparkConfig)


def read_weights(source: str, pickle: bool, **kwargs: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of a folder or repository, and the name of their file. Raises: `ValueError`, one line."""
    if has_file(source, WEIGHTS, **kwargs):
        file = fetch(source, [WEIGHTS], **kwargs)[0]
        return _read(file), str(file)
    if has_file(source, INDEX, **kwargs):
        return _read_shards(source, fetch(source, [INDEX], **kwargs)[0], **kwargs)
    if not has_file(source, PICKLE, **kwargs):
        raise ValueError(f"{source} has neither {WEIGHTS} nor {INDEX} nor {PICKLE}: there are no weights to load")
    if not pickle:
        raise ValueError(
            f"{source} has {PICKLE}, a pickle, and no {WEIGHTS}: pickle=True takes the tensors alone from it (torch.load(weights_only=True))"
        )
    file = fetch(source, [PICKLE], **kwargs)[0]
    return _unpickled(file), str(file)


def assign_weights(
    make: Callable[[Config, bool], Network],
    config: Config,
    rotary: Callable[[PreTrainedConfig], torch.nn.Module],
    weights: dict[str, torch.Tensor],
    where: str,
) -> Network:
    """Return the network `make(config, own_embeddings)` with these weights, by their names in files.

    It is created on the meta device, since its sizes are not trusted until the weights match; `rotary` makes its angles, which no file contains.
    Raises: `ValueError`, one line, for any failure of Transformers, weights that do not fit, NaN, and token ids out of range.
    """
    try:
        with torch.device("meta"):
            network = make(config, "embed_tokens.weight" in weights)
        network.rotary_emb = angles = rotary(config.layer)
    except Exception as error:
        raise ValueError(
            f"{where}: no network can be made of its {CONFIG} ({type(error).__name__}: {one_line(error, 300)}): it is damaged, or needs a newer Transformers"
        ) from None
    if not bool(angles.get_buffer("inv_freq").isfinite().all()):
        raise ValueError(f"{where}: {CONFIG}: its RoPE settings give angles that are no numbers")
    t2d = weights.get("t2d")
    weights = {name: tensor for name, tensor in weights.items() if name not in NOT_NEEDED}
    for name, tensor in weights.items():
        if name != "d2t" and tensor.dtype not in DTYPES:
            raise ValueError(
                f"{where}: {name} is of dtype {tensor.dtype}; expected {listed(DTYPES)}: load the drafter's unquantised files"
            )
    try:
        network.load_state_dict(weights, strict=True, assign=True)
    except RuntimeError as error:
        reason = one_line(str(error).partition(":")[2], 300)  # after the name of a class
        raise ValueError(f"{where} does not fit its {CONFIG} ({reason}): take both from one place ({AGAIN})") from None
    for name, tensor in network.named_parameters():
        tensor.data = tensor.data.to(network.dtype)  # some files have a head in another precision
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{where}: {name} holds NaN or infinities: download it again ({AGAIN})")
    _check_ids(network, t2d, where)
    return network.eval().requires_grad_(False)


def _check_ids(network: HiddenStateNetwork, t2d: torch.Tensor | None, where: str) -> None:
    """Refuse a reduced vocabulary that is not a subset of the target's."""
    size, d2t = network.config.layer.vocab_size, network.d2t
    if d2t.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{where}: d2t is of dtype {d2t.dtype}; expected whole numbers: it is damaged ({AGAIN})")
    network.d2t = d2t.long()
    ids = network.target_ids
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) < len(ids)):
        raise ValueError(
            f"{where}: d2t names tokens twice, or outside of a vocabulary of {size}: it is damaged ({AGAIN})"
        )
    if t2d is not None and (t2d.shape != (size,) or not torch.equal(t2d.nonzero()[:, 0], ids.sort().values)):
        raise ValueError(f"{where}: d2t and t2d name other tokens: it is damaged, download it again ({AGAIN})")


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        return safetensors.torch.load_file(file)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{file} is not a whole safetensors file ({one_line(error)}): download it again ({AGAIN})"
        ) from None


def _read_shards(source: str, index: Path, **kwargs: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors of all files named by an index; the files are in the same folder."""
    names = read_object(index, "an object, the index of weights").get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) and SHARD.fullmatch(name) for name in names.values())
    ):
        raise ValueError(
            f"{index}: weight_map: expected tensors' names with that of the .safetensors file each is in, got {shown(names, 200)}"
        )
    found: dict[str, torch.Tensor] = {}
    for file in fetch(source, sorted(set(names.values())), **kwargs):
        found |= _read(file)
    if found.keys() != names.keys():
        other = sorted(found.keys() ^ names.keys())
        raise ValueError(f"{index} and its files name other tensors ({listed(other, 5)}): download it again ({AGAIN})")
    return found, str(index)


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged, or more than tensors: refused either way
        reason = one_line(error, 200) or type(error).__name__
        raise ValueError(
            f"{file} holds more than tensors, or is damaged: {reason}: download it again ({AGAIN})"
        ) from None
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: expected tensors by name, got {type(found).__name__}")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{file}: expected tensors by name, got {shown(name)} with {type(tensor).__name__}: save the state_dict itself, best as {WEIGHTS}"
            )
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(
                f"{file}: {name}: expected a plain tensor with its numbers, got one of layout {tensor.layout} on {tensor.device}"
            )
    return dict(found)
