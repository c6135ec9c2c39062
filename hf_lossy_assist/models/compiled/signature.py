"""A model's signature: everything that a compiled graph assumes about the model, read once per call.

A graph compiled for one signature never runs a model with another. User code, which cannot be read, is left to the guards of `torch.compile`.
"""

import itertools
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import chain, combinations
from operator import attrgetter, is_, methodcaller
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# Transformers leaves its hooks on a model that once returned hidden states; they do nothing until these are requested again.
CAPTURING = "transformers.utils.output_capturing"
# Packages whose modules are determined by their class, tensors and config, and whose functions read nothing else.
OF_PACKAGE = tuple("hf_lossy_assist." + name for name in ("models.prepack", "models.int8", "drafters.networks."))
TRUSTED = ("torch.nn.", "transformers.", *OF_PACKAGE)
# Packages whose functions may appear in those classes and files.
LIBRARIES = sys.stdlib_module_names | {"torch", "transformers", "huggingface_hub", "safetensors", "hf_lossy_assist"}
PLAIN = frozenset([bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device])
TENSORS = (torch.Tensor, torch.nn.Parameter)
# Submodules, tensors and hooks of every module, which are read separately.
TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
# Attributes that no forward reads, or that belong to `CAPTURING`; the last two hold the functions that Transformers' `generate` compiled.
UNREAD = {
    "generation_config",
    "generate",
    "save_pretrained",
    "warnings_issued",
    "_output_capturing_hooks_installed",
    "_compiled_call",
    "_last_compile_config",
}
PACKED = "its weights are packed by PyTorch's own quantisation, into which torch.compile cannot look"
# Attributes of `torch.nn.Module` that no forward runs; torch.compile replaces them when it first compiles in a process.
BUILDING = {"__init__", "__setstate__", "___needs_generation_tag_patch"}
EMPTY = CellType()
ASIDE = set(PreTrainedModel.__mro__) - {torch.nn.Module}  # classes whose methods load, save and generate
FUNCTIONS = FunctionType | BuiltinFunctionType


class Signature(NamedTuple):
    """Everything that a graph of a model relies on besides its inputs, read from the model once per call."""

    key: int  # equal for two models, or two states of one, that are alike to a graph
    trusted: bool  # the key covers everything; else torch.compile also guards the user code's inputs
    hooked: str | None  # why a graph cannot be made, or would skip something once compiled
    devices: frozenset[torch.device]
    tensors: dict[int, int]  # number of each of the model's tensors, by its `id`

    @classmethod
    def of(cls, model: torch.nn.Module) -> "Signature":
        known = _readings.get(model)
        if known is not None and known[0].holds(model):
            return known[1]
        reader = Reader(model)
        if torch.nn.modules.module._global_forward_hooks or torch.nn.modules.module._global_forward_pre_hooks:
            reader.hooked = "a forward hook stands on every module"
        reader.read(model)
        key = _keys.setdefault(tuple(reader.seen), len(_keys))
        signature = cls(key, reader.trusted, reader.hooked, frozenset(reader.devices), reader.tensors)
        if reader.trusted and reader.remembers:
            reader.sources.found = reader.sources.look()
            _readings[model] = reader.sources, signature
        return signature


class Sources:
    """Objects that a model's signature was read from. It holds while the same objects are there, which is faster to check than to read again."""

    def __init__(self, model: torch.nn.Module):
        """Take the model's attributes, not `model` itself: a reference to it would keep it alive."""
        self.attributes, self.kind = _attributes(model), type(model)
        self.modules: list[torch.nn.Module] = []
        hooks = torch.nn.modules.module
        self.mappings: list[Mapping[Any, object]] = [hooks._global_forward_hooks, hooks._global_forward_pre_hooks]
        self.code: dict[int, Mapping[str, object]] = {}  # of classes and files, by `id`
        self.collections: list[Collection[object]] = []
        self.functions: list[FunctionType] = []
        self.cells: list[CellType] = []
        self.tensors: list[torch.Tensor] = []
        self.configs: list[PreTrainedConfig] = []
        self.found: tuple[list[object], Hashable] = [], None

    def add(self, value: object) -> None:
        """Add the parts of a value that may change."""
        if isinstance(value, torch.nn.Module):
            self.modules.append(value)
            self.mappings.append(vars(value))
        elif isinstance(value, torch.Tensor):
            self.tensors.append(value)
        elif isinstance(value, dict):
            self.mappings.append(value)
        elif isinstance(value, list | set):
            self.collections.append(value)
        elif isinstance(value, FunctionType):
            self.functions.append(value)
            self.cells += value.__closure__ or ()

    def holds(self, model: torch.nn.Module) -> bool:
        """Return whether everything that was read is still there, object by object."""
        if self.kind is not type(model) or not _are(_attributes(model), self.attributes):
            return False
        objects, values = self.look()
        return values == self.found[1] and _are(objects, self.found[0])

    def look(self) -> tuple[list[object], Hashable]:
        """Return the current objects, with their sizes and layouts."""
        mappings = (*self.mappings, *self.code.values())
        containers = (*mappings, *self.collections)
        objects = [
            *chain.from_iterable(containers),
            *chain.from_iterable(map(methodcaller("values"), mappings)),
            *map(type, self.modules),
            *map(attrgetter("__code__"), self.functions),
            *[None if cell == EMPTY else cell.cell_contents for cell in self.cells],
            *chain.from_iterable(map(_attention, self.configs)),
        ]
        return objects, (*map(len, containers), *map(_layout, self.tensors))


def _are(now: Sequence[object], found: Sequence[object]) -> bool:
    return len(now) == len(found) and all(map(is_, now, found))


def _attributes(model: torch.nn.Module) -> list[object]:
    return [part for item in vars(model).items() if item[0] not in UNREAD for part in item]


def _attention(config: PreTrainedConfig) -> list[object]:
    return [
        table.get(config._attn_implementation) for table in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    ]


def _layout(tensor: torch.Tensor) -> Hashable:
    layout = (tensor.stride(), tensor.storage_offset()) if tensor.layout is torch.strided else tensor.layout
    keys = torch._C._dispatch_keys(tensor).raw_repr()  # e.g. created in inference mode, conjugated
    return tensor.shape, layout, tensor.dtype, tensor.device, keys


_readings: WeakKeyDictionary[torch.nn.Module, tuple[Sources, Signature]] = WeakKeyDictionary()
_keys: dict[Hashable, int] = {}  # by everything read, since an integer hashes faster


class Reader:
    """One pass over a model: plain values are read by value, tensors by what a kernel depends on, functions and other objects by number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.seen: list[Hashable] = []
        self.sources = Sources(model)
        self.trusted = True
        self.root = model
        self.remembers = True  # until something refers back to the model
        self.hooked: str | None = None
        self.devices: set[torch.device] = set()
        self.tensors: dict[int, int] = {}
        self._known: dict[int, Hashable] = {}  # by `id`; the objects live as long as the model
        self._waiting: list[tuple[str, torch.nn.Module]] = []

    def read(self, model: torch.nn.Module) -> None:
        self._functions(torch.nn.functional)
        self.value(model)
        while self._waiting:
            self._module(*self._waiting.pop())

    def value(self, value: object, name: str = "") -> Hashable:
        """Describe one value; `name` is that of the module it belongs to."""
        kind = type(value)
        if kind in PLAIN:
            return kind, value
        if id(value) in self._known:
            self.remembers = self.remembers and value is not self.root
        else:
            self._known[id(value)] = len(self._known)  # ends cycles
            if value is not self.root:
                self.sources.add(value)
            self._known[id(value)] = self._described(value, kind, name)
        return self._known[id(value)]

    def _described(self, value: object, kind: type, name: str) -> Hashable:
        if isinstance(value, torch.nn.Module):
            self._waiting.append((name, value))
            return len(self._known)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, list | tuple):
            return kind, *[self.value(part) for part in value]
        if isinstance(value, dict):
            return kind, *[(self.value(key), self.value(part)) for key, part in value.items()]
        if isinstance(value, set | frozenset):
            return kind, frozenset(self.value(part) for part in value)
        if isinstance(value, MethodType):
            return self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, partial):
            return self.value(value.func), self.value(value.args), self.value(value.keywords)
        if isinstance(value, FUNCTIONS):
            return self._function(value)
        if isinstance(value, Enum | type | ModuleType | torch.ScriptObject):
            return number(value)
        if is_of_a_library(kind.__module__) and hasattr(value, "__dict__"):
            self.sources.mappings.append(vars(value))
            found = [number(kind), *[(key, self.value(part)) for key, part in vars(value).items()]]
            if isinstance(value, PreTrainedConfig):
                self.sources.configs.append(value)
                found += map(self.value, _attention(value))
            return tuple(found)
        self.trusted = False
        return number(value)

    def _function(self, function: Any) -> Hashable:
        if isinstance(function, BuiltinFunctionType):
            owner = function.__self__
            self.trusted = self.trusted and isinstance(owner, ModuleType | type | None)
            return number(function)
        self.trusted = self.trusted and is_of_a_library(function.__globals__.get("__name__", ""))
        held = [cell for cell in function.__closure__ or () if cell != EMPTY]
        return number(function), function.__code__, *[self.value(cell.cell_contents) for cell in held]

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        self.trusted = self.trusted and type(tensor) in TENSORS
        self.devices.add(tensor.device)
        # A graph reads a tensor that occurs twice from its first place only.
        place = self.tensors.setdefault(id(tensor), len(self.tensors))
        return place, _layout(tensor)

    def _module(self, name: str, module: torch.nn.Module) -> None:
        kind, attributes = type(module), vars(module)
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "_hf_hook" in attributes or any(hook.__module__ != CAPTURING for hook in hooks):
            self.hooked = self.hooked or f"a forward hook stands on {name or kind.__name__}"
        self.seen.append(self._class(kind))
        for key, value in attributes.items():
            if key not in TABLES and key not in UNREAD:
                if isinstance(value, torch.ScriptObject):
                    self.hooked = self.hooked or PACKED
                self.seen += (key, self.value(value))
        for table in (module._forward_hooks, module._forward_pre_hooks, module._modules):
            self.sources.mappings.append(table)
        for tensors in (module._parameters, module._buffers):
            self.sources.mappings.append(tensors)
            self.seen += [(key, None if tensor is None else self.value(tensor)) for key, tensor in tensors.items()]
        for key, part in module._modules.items():
            self.seen += (key, None if part is None else self.value(part, f"{name}.{key}" if name else key))

    def _class(self, kind: type) -> Hashable:
        """Describe a module's class with its replaceable members, and the functions in its file."""
        if id(kind) not in self._known:
            self._known[id(kind)] = number(kind)
            self.trusted = self.trusted and kind.__module__.startswith(TRUSTED)
            self.sources.code |= {id(part): vars(part) for part in kind.__mro__ if part not in ASIDE}
            members = [(part, *item) for part in kind.__mro__ if part not in ASIDE for item in vars(part).items()]
            parts = [value for part, name, value in members if part is not torch.nn.Module or name not in BUILDING]
            self.seen += [self.value(part) for part in parts if type(part) in PLAIN or isinstance(part, FunctionType)]
            self._functions(sys.modules.get(kind.__module__))
        return self._known[id(kind)]

    def _functions(self, file: ModuleType | None) -> None:
        if file is not None:
            self.sources.code[id(file)] = vars(file)
            self.seen += [self.value(part) for part in vars(file).values() if isinstance(part, FUNCTIONS)]


def is_of_a_library(module: str) -> bool:
    """Return whether a module's code belongs to PyTorch, Transformers, Python or this package, not to the user."""
    return module.partition(".")[0] in LIBRARIES


def number(thing: Any) -> int:
    """Return the number of a function, a class or another object. It is never reused, unlike an `id`."""
    key = id(thing)
    if key not in _numbers:
        try:
            alive = ref(thing, lambda _: _numbers.pop(key, None))
        except TypeError:  # this type has no weak references
            alive = thing
        _numbers[key] = next(_count), alive
    return _numbers[key][0]


_numbers: dict[int, tuple[int, Any]] = {}  # by `id`, while the object lives; with the reference that tracks it
_count = itertools.count()


def shared(signatures: Sequence[Signature]) -> tuple[tuple[int, ...], ...]:
    """Return the tensors that two models share, as pairs of model and tensor numbers: a graph reads only one of the two places."""
    return tuple(
        (i, j, number, other.tensors[tensor])
        for (i, one), (j, other) in combinations(enumerate(signatures), 2)
        if not one.tensors.keys().isdisjoint(other.tensors)
        for tensor, number in one.tensors.items()
        if tensor in other.tensors
    )
