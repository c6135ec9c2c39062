"""Snapshots of the state of a caller's logits processors, to restore after a rejected draft."""

import copy
import dis
import functools
import io
import logging
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from abc import ABC
from collections.abc import Callable, Sequence
from enum import Enum
from operator import is_
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .object_values import CONTAINERS, VALUES, Value, by_value
from .processor_kinds import PACKAGE, names, way_out


MOST_ENTRIES = 1 << 18  # of one container; a larger one is a table, of which only the length is watched
MOST_PARTS = 1 << 16  # of one snapshot; further containers are tables, too
MOST_NUMBERS = 1 << 20  # of one tensor; a larger one must not be changed in place
SMALL = 4096  # elements of a tensor that is compared by value; a larger one by version

MISSING: Any = object()
COPYING = "fork", "deep_copy"  # copy methods of xgrammar's and llguidance's matchers
REGISTRY = type(vars(ABC)["_abc_impl"])  # an abstract class's cache of subclass checks
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_NUMBERS = bool, int, float, complex, str, bytes, Value
_BOUND = types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial
_METHODS = types.FunctionType, classmethod, staticmethod
_SHARED = (
    *_NUMBERS, type(None), range, slice, type(...), Enum, PurePath, np.generic, np.dtype, re.Pattern, re.Match, logging.Logger,
    types.CodeType, types.MappingProxyType, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, io.TextIOWrapper,
    io.BufferedWriter, torch.dtype, torch.device, torch.layout, torch.memory_format, PreTrainedModel, PreTrainedTokenizerBase,
    PreTrainedConfig, GenerationConfig, type(threading.Lock()), type(threading.RLock()), threading.Barrier, threading.Condition,
    threading.Event, threading.Semaphore, threading.Thread,
)  # fmt: skip


class Part:
    """A mutable object: `read` lists what it holds, `write` restores such a list."""

    __slots__ = "read", "state", "thing", "write"  # compared at each position of a text

    def __init__(self, thing: object, read: Callable[[], list[Any]], write: Callable[[list[Any]], Any]):
        self.thing, self.read, self.write, self.state = thing, read, write, read()

    def is_same(self) -> bool:
        """Return whether the object holds the same objects, or equal numbers and strings."""
        now, then = self.read(), self.state
        if len(now) != len(then):
            return False
        if all(map(is_, now, then)):  # nearly always, and fast
            return True
        pairs = zip(now, then, strict=True)
        return all(a is b or (type(a) is type(b) and type(a) in _NUMBERS and a == b) for a, b in pairs)


class Snapshot:
    """The state reachable from processors: attributes, containers, tensors, closures, and globals that functions name.

    Transformers models, tokenizers, and modules and functions of installed libraries are shared. Raises: `ValueError`, one line, for
    an object that cannot be copied, such as a generator.
    """

    def __init__(self, processors: list[Any], before: "Snapshot | None" = None):
        """`before`: an earlier snapshot, whose copies of unchanged large tensors are reused."""
        self.processors = processors
        self.parts: list[Part] = []
        self.tables: list[tuple[Any, int]] = []  # with their length, or a large tensor's version
        self.copies: list[tuple[Any, Any]] = []  # objects that cannot be restored in place, and their copies
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by id: version and copy
        self._before = {} if before is None else before.tensors
        self._seen: dict[int, Any] = {}  # by id; references keep ids unique
        self._todo: list[Any] = [processors]
        opaque: list[Any] = []
        try:
            while self._todo:
                x = self._todo.pop()
                if id(x) not in self._seen and x is not MISSING and not isinstance(x, _SHARED):
                    self._seen[id(x)] = x
                    if not self._visit(x):
                        opaque.append(x)
        except Exception as error:
            self._fail(f"holds what cannot be looked into ({type(error).__name__})", error)
        ids = {id(x) for x in opaque}
        self._shared = {key: x for key, x in self._seen.items() if key not in ids} if opaque else {}
        self.copies = [(x, self._copied(x)) for x in opaque]
        held = {id(x) for part in self.holders() for x in part.state}
        if lost := [x for x in opaque if id(x) not in held]:
            self._fail(f"holds a {type(lost[0]).__name__} where it cannot be put back")

    def holders(self) -> list[Part]:
        """Return the parts that hold copied objects."""
        ids = {id(x) for x, _ in self.copies}
        return [part for part in self.parts if any(id(x) in ids for x in part.state)] if ids else []

    def unchanged(self) -> bool:
        """Return whether nothing has changed. Copied objects count as changed, since they cannot be compared."""
        for x, size in self.tables:
            if size != (_version(x) if isinstance(x, torch.Tensor) else len(x)):
                self._fail(f"changes a {type(x).__name__} of so many entries in place")
        try:
            return not self.copies and all(part.is_same() for part in self.parts)
        except Exception as error:
            self._fail(f"holds what cannot be compared ({type(error).__name__})", error)

    def restore(self) -> None:
        """Restore the state."""
        fresh = {id(x): self._copied(saved) for x, saved in self.copies}
        self.copies = [(fresh[id(x)], saved) for x, saved in self.copies]
        for part in self.parts:
            if fresh:
                part.state = [fresh.get(id(x), x) for x in part.state]
            try:
                if not part.is_same():
                    part.write(part.state)
                    part.state = part.read()
            except Exception as error:
                kind = type(part.thing).__name__
                self._fail(f"holds a {kind} that cannot be put back ({type(error).__name__})", error)

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        line = f"{names(self.processors)} {what}, so a rejected draft cannot be forgotten: {way_out(self.processors)}"
        raise ValueError(f"logits_processor: {line}") from cause

    def _copied(self, x: Any) -> Any:
        """Copy an object by its copy method, or deeply except for shared objects."""
        offered = next((name for name in COPYING if hasattr(type(x), name)), None)
        try:
            return copy.deepcopy(x, dict(self._shared)) if offered is None else getattr(x, offered)()
        except Exception as error:
            self._fail(f"holds a {type(x).__name__}, which cannot be copied", error)

    def _visit(self, x: Any) -> bool:
        """Add the mutable parts of `x` and queue what it holds; return False if `x` can only be copied."""
        kind = type(x)
        accessors = next((pair for base, pair in VALUES.items() if isinstance(x, base)), None)
        if kind in CONTAINERS and (len(x) > MOST_ENTRIES or len(self.parts) > MOST_PARTS):
            self.tables.append((x, len(x)))
        elif isinstance(x, tuple | frozenset):
            self._todo += x
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif isinstance(x, np.ndarray) and x.dtype.hasobject:
            return False
        elif accessors is not None:
            self._add(x, *accessors)
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, _BOUND):
            self._todo += [getattr(x, name, None) for name in ("__self__", "__func__", "func", "args", "keywords")]
        elif isinstance(x, types.CellType):
            self._add_attributes(x, ["cell_contents"])
        elif isinstance(x, type):
            self._add_class(x)
        elif not (isinstance(x, types.ModuleType | REGISTRY) or hasattr(kind, "cache_info")):  # caches are not state
            return self._add_instance(x)
        return True

    def _add(self, x: object, read: Callable[[Any], list[Any]], write: Callable[[Any, list[Any]], Any]) -> None:
        """Add an object's part, and queue what it holds."""
        self.parts.append(Part(x, functools.partial(read, x), functools.partial(write, x)))
        self._todo += self.parts[-1].state

    def _add_attributes(self, x: object, names: Sequence[str]) -> None:
        """Add attributes of `x`, unset ones included."""
        base = type if isinstance(x, type) else object

        def read(x: object) -> list[Any]:
            return [_attribute(x, name) for name in names]

        def write(x: object, values: list[Any]) -> None:
            for name, value in zip(names, values, strict=True):
                if value is not MISSING:
                    base.__setattr__(x, name, value)
                elif _attribute(x, name) is not MISSING:
                    base.__delattr__(x, name)

        self._add(x, read, write)

    def _add_instance(self, x: object) -> bool:
        """Add a container's entries or a Python object's attributes; return False for any other object."""
        kind = type(x)
        base = next((base for base in CONTAINERS if isinstance(x, base)), None)
        if base is not None:
            self._add(x, *CONTAINERS[base])
            if kind is base:
                return True
        elif kind.__module__.partition(".")[0] in ("tokenizers", "sentencepiece") or _is_immutable(kind):
            return True
        elif any(hasattr(kind, name) for name in COPYING) or not _is_python(x):
            return False
        if hasattr(x, "__dict__"):
            self._todo.append(vars(x))
        slots = [n for k in kind.__mro__ for n, y in vars(k).items() if isinstance(y, types.MemberDescriptorType)]
        if slots and base is None:
            self._add_attributes(x, slots)
        self._todo.append(kind)
        return True

    def _add_function(self, f: types.FunctionType) -> None:
        """Add a function's closure, defaults and attributes, and for a caller's function the globals that it names."""
        self._todo += [*(f.__closure__ or ()), f.__defaults__, f.__kwdefaults__, vars(f) or None]
        space = f.__globals__
        if f.__code__.co_filename.startswith(LIBRARIES):
            return
        wanted, attributes = _global_names(f.__code__)
        names = [name for name in sorted(wanted) if name in space or not hasattr(space.get("__builtins__"), name)]

        def write(_: object, values: list[Any]) -> None:
            for name, value in zip(names, values, strict=True):
                if value is not MISSING:
                    space[name] = value
                else:
                    space.pop(name, None)

        if names:
            self._add(f, lambda _: [space.get(name, MISSING) for name in names], write)
        for module in {id(x): x for x in map(space.get, names) if isinstance(x, types.ModuleType)}.values():
            if module is random:
                self._add(module, *by_value(lambda _: random.getstate(), lambda _, state: random.setstate(state)))
            elif module in (np, np.random):
                self._add(module, *by_value(lambda _: np.random.get_state(), lambda _, s: np.random.set_state(s)))
            elif not (_is_library(module.__name__) or module.__name__.partition(".")[0] == PACKAGE):
                self._todo += [y for n, y in vars(module).items() if n in attributes]

    def _add_class(self, kind: type) -> None:
        """Add a caller's class: its attributes and methods."""
        for base in kind.__mro__:
            if not _is_library(base.__module__):
                self._todo += [getattr(y, "__func__", y) for y in vars(base).values() if isinstance(y, _METHODS)]
                found = {n: y for n, y in vars(base).items() if not n.startswith("__")}
                self._add_attributes(base, [n for n, y in found.items() if not hasattr(type(y), "__get__")])

    def _add_tensor(self, x: torch.Tensor) -> None:
        """Add a tensor by its version, which in-place changes increment; a small one by value, too."""
        version = _version(x)
        if x.numel() > MOST_NUMBERS:
            self.tables.append((x, version))
            return
        whole = x.numel() <= SMALL or version < 0
        old, saved = self._before.get(id(x)), x.detach()
        saved = old[1] if not whole and old is not None and old[0] == version else saved.clone()
        self.tensors[id(x)] = version, saved

        def read(x: torch.Tensor) -> list[Any]:
            numbers = torch.cat([x.detach().cpu().reshape(-1)]).view(torch.uint8) if whole else torch.empty(0)
            return [_version(x), x.dtype, *x.shape, numbers.numpy().tobytes()]  # bytes compare fast; NaN equals NaN

        def write(x: torch.Tensor, _: object) -> None:
            with torch.no_grad():
                if x.shape == saved.shape and x.dtype == saved.dtype:
                    x.copy_(saved)
                else:
                    x.data = saved.clone()

        self._add(x, read, write)
        self._todo += [vars(x) or None] if hasattr(x, "__dict__") else []


def _attribute(x: object, name: str) -> Any:
    try:
        return getattr(x, name)
    except (AttributeError, ValueError):  # not set; an empty cell
        return MISSING


def _version(x: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor, or −1 if torch does not count them."""
    return -1 if x.is_inference() else x._version


def _is_python(x: object) -> bool:
    """Return whether an object's state is its attributes alone, so that `object` can reduce it."""
    kind = type(x)
    for name in ("__reduce__", "__reduce_ex__", "__getstate__"):
        method = getattr(kind, name, None)
        if isinstance(method, types.FunctionType):
            return True
        if method is not getattr(object, name, None):  # written in C
            return kind is types.SimpleNamespace
    try:
        object.__reduce_ex__(x, 2)
    except TypeError:
        return False
    return True


def _is_immutable(kind: Any) -> bool:
    """Return whether a type not written in Python compares and hashes by value, like dates and fractions."""
    by_value = kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)
    return by_value and not isinstance(kind.__eq__, types.FunctionType)


def _is_library(module: str) -> bool:
    """Return whether a module belongs to Python or an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or file.startswith(LIBRARIES))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and of attributes in a function's code, nested functions included."""
    found = list(dis.get_instructions(code))
    names = frozenset(x.argval for x in found if x.opname.endswith(("_GLOBAL", "_NAME")))
    attributes = frozenset(x.argval for x in found if x.opname.endswith(("_ATTR", "_METHOD")))
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        inner_names, inner_attributes = _global_names(inner)
        names, attributes = names | inner_names, attributes | inner_attributes
    return names, attributes
