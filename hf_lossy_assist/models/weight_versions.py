"""The weights of a model: their precision, and a number that changes with them."""

import itertools
import re
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedModel

from .introspection import base_of


SUFFIX = re.compile(r"(:int8|\[:\d+\])+$")  # after a model's name: it is in int8, or has so many layers


def dtype_of(model: PreTrainedModel) -> str:
    """Return a model's compute precision as written in records: "float32", "bfloat16", "int8"."""
    in_int8 = getattr(model, "in_int8", None)  # a drafter's
    if in_int8 is None:
        in_int8 = named_int8(str(base_of(model).config.name_or_path))
    return "int8" if in_int8 else str(model.dtype).removeprefix("torch.")


def plain_name(name: str) -> str:
    """Return a model's name without the suffixes for int8 and early exit."""
    return SUFFIX.sub("", name)


def named_int8(name: str) -> bool:
    """Return whether a model's name says that it is in int8, or an early exit of such a model."""
    found = SUFFIX.search(name)
    return found is not None and ":int8" in found[0]


LOOKED = 16  # values of each tensor that `weights_version` reads
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size: NaN equals NaN in bits
TENSORS = (torch.Tensor, torch.nn.Parameter)
_versions: WeakKeyDictionary[torch.nn.Module, tuple[object, int]] = WeakKeyDictionary()
_numbers: dict[int, tuple[int, Any]] = {}  # by `id`, while the object lives; with the reference that tracks it
_count = itertools.count()


def number(thing: Any) -> int:
    """Return the number of an object. It is never reused, unlike an `id`."""
    key = id(thing)
    if key not in _numbers:
        try:
            alive = ref(thing, lambda _: _numbers.pop(key, None))
        except TypeError:  # this type has no weak references
            alive = thing
        _numbers[key] = next(_count), alive
    return _numbers[key][0]


def weights_version(model: torch.nn.Module) -> int:
    """Return a number that changes with a model's weights and modules, and never returns to an earlier one.

    Read: every module's identity; every tensor's address, dtype and count of changes in place; `LOOKED` evenly spaced values of each, since a change
    through `.data` is not counted. One that leaves those values alone is not noticed. Takes 5 µs of CPU time a tensor.
    """
    modules, samples = list(model.modules()), dict[tuple[torch.device, int], list[torch.Tensor]]()
    state: list[object] = [number(module) for module in modules]
    state += [number(packed) for module in modules if (packed := vars(module).get("_packed_params")) is not None]
    tables = (table for module in modules for table in (module._parameters, module._buffers))
    with torch.no_grad():
        for tensor in (tensor for table in tables for tensor in table.values() if tensor is not None):
            version = None if tensor.is_inference() else tensor._version
            whole = type(tensor) in TENSORS and tensor.layout is torch.strided and not tensor.is_quantized
            state.append((tensor.data_ptr() if whole else number(tensor), tensor.dtype, version))
            if whole and not tensor.is_meta and tensor.numel() and tensor.element_size() in INTEGERS:
                room = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
                size = min(tensor.numel(), room)
                values = tensor.as_strided((min(LOOKED, size),), (max(1, size // LOOKED),))
                key = tensor.device, tensor.element_size()
                samples.setdefault(key, []).append(values.view(INTEGERS[tensor.element_size()]))
        state += [torch.cat(values).cpu().numpy().tobytes() for values in samples.values()]
    if model not in _versions or _versions[model][0] != state:
        _versions[model] = state, next(_count)
    return _versions[model][1]
