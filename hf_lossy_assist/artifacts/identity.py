"""Identities and hashes of models: which models an artifact was made with, and whether the given ones are the same."""

import hashlib
import json
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..models.introspection import SUFFIX, base_of, blocks_of, dtype_of, weights_version
from ..validation import listed, one_line, shown
from .files import check_types


T = TypeVar("T")
LONGEST = 100  # characters of a name in a message: a record from the Hub may contain any length
SAMPLED = 256  # values of each tensor that enter the hash of weights
OTHER_WEIGHTS = "other weights under the same name"


@dataclass(frozen=True)
class ModelIdentity:
    """A record of a model; a head's config has one for each model that it was trained with."""

    id: str  # Hub id, or the folder's name without its path
    revision: str | None  # commit on the Hub, where known
    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "ModelIdentity":
        """Return the identity of a loaded Transformers model, or the one that a drafter has."""
        if isinstance(identity := getattr(model, "identity", None), cls):
            return identity
        base = base_of(model)
        config = base.config.get_text_config(decoder=True)
        name = base.config.name_or_path or type(base).__name__
        folder = Path(SUFFIX.sub("", name))  # a model derived from another has a suffix after the folder's name
        return cls(
            id=Path(name).name if folder.is_absolute() or folder.is_dir() else name,
            revision=getattr(base.config, "_commit_hash", None),
            model_type=base.config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers if (blocks := blocks_of(base)) is None else len(blocks),
            vocab_size=config.vocab_size,
        )

    @classmethod
    def from_dict(cls, spec: Mapping[str, Any]) -> "ModelIdentity":
        """Return the identity whose `to_dict` is `spec`. Raises: `TypeError`, one line, for other entries or types."""
        identity = cls(**spec)
        check_types(identity)
        return identity

    def __str__(self) -> str:
        sizes = f"{self.num_layers} layers × {self.hidden_size}, {self.vocab_size} tokens"
        return f"{one_line(listed([self.id]), LONGEST)} ({one_line(listed([self.model_type]), LONGEST)}, {sizes})"

    def conflict(self, other: "ModelIdentity") -> str | None:
        """Return the first difference that makes an artifact trained with `self` meaningless with `other`, or None."""
        return self._differ(other, ("model_type", "hidden_size", "num_layers", "vocab_size"))

    def doubt(self, other: "ModelIdentity") -> str | None:
        """Return a sign that models of equal sizes differ (id or revision), or None."""
        return self._differ(other, ("id",) if None in (self.revision, other.revision) else ("id", "revision"))

    def _differ(self, other: "ModelIdentity", names: Sequence[str]) -> str | None:
        for name in names:
            there, here = getattr(self, name), getattr(other, name)
            if there != here:
                return f"{name} {shown(there)} there, {shown(here)} here"
        return None

    def check(
        self,
        model: Any,
        name: str,
        what: str,
        instead: str,
        weights: str = "",
        *,
        strict: bool = True,
        exact: bool = False,
    ) -> None:
        """Refuse a model where it conflicts with this record; warn where it may be another one.

        name: the model's role ("target", "draft"); what: the record's artifact ("the profile"); instead: what to do about
        it; weights: precision and `weights_hash` of the recorded model, "float32:…"; strict: if False, conflicts only warn;
        exact: refuse other weights in the same precision, too. Raises: `ValueError`.
        """
        here = ModelIdentity.of(model)
        dtype, _, digest = weights.partition(":")
        conflict, other = self.conflict(here), doubt_weights(digest, dtype, model) if digest else None
        if (strict and conflict) or (exact and other == OTHER_WEIGHTS):
            line = f"{what} was made for the {name} {self}, and the {name} here is {here}: {conflict or other}."
            raise ValueError(f"{line} Use the models it names, or {instead}")
        if doubt := conflict or self.doubt(here) or other:
            warnings.warn(
                f"{what}'s {name} and this {name} may differ: {doubt}; it was made for the former", stacklevel=4
            )

    def to_dict(self) -> dict[str, str | int | None]:
        return asdict(self)


def weights_hash(model: PreTrainedModel) -> str:
    """Return SHA-256 of evenly spaced values of every tensor of a model, with names and shapes: it distinguishes checkpoints of one name.

    Takes some milliseconds. The hash depends on the precision, but not on the device.
    """
    digest = hashlib.sha256()
    for name, tensor in _tensors(base_of(model).state_dict().items()):
        if tensor.is_meta:  # not in memory
            continue
        if tensor.is_quantized:
            one = tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric)
            scale = tensor.q_scale() if one else tensor.q_per_channel_scales().tolist()
            digest.update(f"{scale};".encode())
            tensor = tensor.int_repr()
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype};".encode())
        if tensor.numel():
            flat = tensor.detach().reshape(-1)
            chosen = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
            digest.update(chosen.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _tensors(named: Iterable[tuple[str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state dict: PyTorch's dynamic int8 has a layer's weights and bias in a tuple."""
    for name, value in named:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, tuple):
            yield from _tensors((f"{name}.{i}", item) for i, item in enumerate(value))


# By model: the version of its weights, and the hash. By tokenizer: its size, and the hash (a quarter of a second for 150,000 tokens).
_hashes: WeakKeyDictionary[object, tuple[object, str]] = WeakKeyDictionary()


def _hash_once(owner: T, state: object, make: Callable[[T], str]) -> str:
    if owner not in _hashes or _hashes[owner][0] != state:
        _hashes[owner] = state, make(owner)
    return _hashes[owner][1]


def weights_hash_once(model: PreTrainedModel) -> str:
    """Return `weights_hash`, cached until `weights_version` changes."""
    base = base_of(model)
    modules = base if isinstance(base, torch.nn.Module) else base.network  # a drafter's
    return _hash_once(base, weights_version(modules), weights_hash)


def doubt_weights(weights: object, dtype: object, model: PreTrainedModel) -> str | None:
    """Return a sign that a model differs from one with this `weights_hash` and `dtype_of`, or None."""
    if dtype != (here := dtype_of(model)):
        return f"{shown(dtype)} there, {shown(here)} here"
    try:
        if weights == weights_hash_once(model):
            return None
        if not any(tensor.is_meta for _, tensor in _tensors(base_of(model).state_dict().items())):
            return OTHER_WEIGHTS
    except (RuntimeError, TypeError, ValueError):  # packed for the CPU, or tensors of a type unknown to torch
        pass
    return "its weights cannot be read here, so they may be others"


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return SHA-256 of the vocabulary: every token with its id, ordered by id."""
    return _hash_once(tokenizer, len(tokenizer), _hash_vocabulary)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase | None, recorded: str | None, what: str, instead: str) -> None:
    """Refuse a tokenizer with another vocabulary than the recorded hash's; None is not compared. Raises: `ValueError`, one line."""
    if None not in (tokenizer, recorded) and (here := tokenizer_hash(tokenizer)) != recorded:
        raise ValueError(
            f"{what} was made with a tokenizer of hash {one_line(str(recorded)[:12])}…, and the tokenizer here has {here[:12]}…: token ids mean other "
            f"words. Use the models it names, or {instead}"
        )


def _hash_vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: (pair[1], pair[0]))
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=True).encode()).hexdigest()


def same_ids(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    """Return whether two tokenizers share more than 90% of the smaller one's tokens, all under the same ids."""
    first, second = one.get_vocab(), other.get_vocab()
    shared = first.keys() & second.keys()
    return len(shared) > 0.9 * min(len(first), len(second)) and all(first[token] == second[token] for token in shared)


def versions() -> dict[str, str]:
    """Return the versions of Python, this package and its main dependencies, for records."""
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("hf_lossy_assist", "torch", "transformers")
    }


def check_same(expected: Mapping[str, str], actual: Mapping[str, str]) -> None:
    """Refuse a worker with other versions or weights than the process that started the job. Raises: `ValueError`, one line."""
    for name, there in actual.items():
        if (here := expected.get(name, there)) != there:
            raise ValueError(
                f"{name}: {here[:12]} where the job was started, {there[:12]} here: install the same everywhere"
            )


def hash_weights(models: Sequence[Any]) -> dict[str, str]:
    """Return the hash of the weights of the target, and of the draft or the drafts by name."""
    drafts = models[1] if isinstance(models[1], dict) else {"draft": models[1]}
    return {
        f"weights of the {role}": weights_hash(model)
        for role, model in {"target": models[0], **drafts}.items()
        if hasattr(model, "state_dict")
    }
