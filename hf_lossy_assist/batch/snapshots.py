"""Snapshots of what a caller's objects remember, so that it can be put back after a rejected draft."""

import functools
import io
import logging
import random
import re
import threading
import types
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from . import object_states as states
from .object_states import CONTAINERS, LIBRARIES, MISSING, NUMBERS, VALUES, CannotRestore, copied


MOST_ENTRIES = 1 << 18  # of one container; of a larger one, a table, only the length is watched
MOST_PARTS = 1 << 16  # of one snapshot; containers beyond them are tables, too
MOST_NUMBERS = 1 << 20  # of one tensor; a larger one may not be changed in place
SMALL = (
    4096  # numbers of a tensor that are compared; of a larger one only the version, which each change in place raises
)

PACKAGE = __name__.partition(".")[0]
_BOUND = types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial
_METHODS = types.FunctionType, classmethod, staticmethod
_SHARED_ROOTS = {"tokenizers", "sentencepiece"}  # packages whose objects are not looked into
_SHARED = (
    *NUMBERS, type(None), range, slice, type(...), Enum, PurePath, np.generic, np.dtype, re.Pattern, re.Match, logging.Logger,
    types.CodeType, types.MappingProxyType, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, type(threading.Lock()),
    type(threading.RLock()), io.TextIOWrapper, io.BufferedWriter, torch.dtype, torch.device, torch.layout, torch.memory_format,
    PreTrainedModel, PreTrainedTokenizerBase, PreTrainedConfig, GenerationConfig,
)  # fmt: skip


class Part:
    """One thing that can change: `read` gives its state, `write` puts one back, `same` compares two."""

    __slots__ = "read", "same", "state", "thing", "write"  # compared at each place of a text

    def __init__(
        self, thing: Any, read: Callable[[], Any], write: Callable[[Any], Any], same: Callable[[Any, Any], bool]
    ):
        self.thing, self.read, self.write, self.same = thing, read, write, same
        self.state = read()


class Snapshot:
    """The state of all that is reachable from `roots`: attributes, containers, tensors, closures, globals that functions name.

    Models of Transformers, tokenizers, and modules and functions of installed libraries are shared. Raises: `CannotRestore` for an
    object that cannot be copied, such as a generator.
    """

    def __init__(self, roots: list[Any], before: "Snapshot | None" = None):
        """`before`: an earlier one, whose copies of tensors that have not changed since are shared."""
        self.parts: list[Part] = []
        self.tables: list[tuple[Any, int]] = []  # with their length, or a large tensor's version
        self.copies: list[tuple[Any, Any]] = []  # what cannot be put back in place, and a copy of it
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by id: the version, and a copy
        self._before = {} if before is None else before.tensors
        self._seen: dict[int, Any] = {}  # by id, and held: no id is used twice
        self._opaque: list[Any] = []
        self._todo: list[Any] = [roots]
        try:
            while self._todo:
                self._visit(self._todo.pop())
        except CannotRestore:
            raise
        except Exception as error:
            raise CannotRestore(f"holds what cannot be looked into ({type(error).__name__})") from error
        shared = (
            {key: x for key, x in self._seen.items() if not any(x is y for y in self._opaque)} if self._opaque else {}
        )
        self.copies = [(x, copied(x, shared)) for x in self._opaque]
        self._shared = shared
        held = {id(x) for part in self.holders() for x in part.state}
        for x, _ in self.copies:
            if id(x) not in held:
                raise CannotRestore(f"holds a {type(x).__name__} where it cannot be put back")

    def holders(self) -> list[Part]:
        """Return the parts that hold what had to be copied."""
        opaque = {id(x) for x, _ in self.copies}
        lists = [part for part in self.parts if isinstance(part.state, list)] if opaque else []
        return [part for part in lists if any(id(x) in opaque for x in part.state)]

    def unchanged(self) -> bool:
        """Return whether everything is as it was. What had to be copied counts as changed: nobody can look into it."""
        for x, size in self.tables:
            if size != (states.version_of(x) if isinstance(x, torch.Tensor) else len(x)):
                raise CannotRestore(f"changes a {type(x).__name__} of so many entries in place")
        try:
            return not self.copies and all(part.same(part.read(), part.state) for part in self.parts)
        except Exception as error:
            raise CannotRestore(f"holds what cannot be compared ({type(error).__name__})") from error

    def restore(self) -> None:
        """Put everything back as it was."""
        fresh = {id(x): copied(saved, self._shared) for x, saved in self.copies}
        self.copies = [(fresh[id(x)], saved) for x, saved in self.copies]
        for part in self.parts:
            if fresh and isinstance(part.state, list):
                part.state = [fresh.get(id(x), x) for x in part.state]
            try:
                if not part.same(part.read(), part.state):
                    part.write(part.state)
                    part.state = part.read()
            except Exception as error:
                raise CannotRestore(
                    f"holds a {type(part.thing).__name__} that cannot be put back ({type(error).__name__})"
                ) from error

    def _visit(self, x: Any) -> None:
        if id(x) in self._seen or isinstance(x, _SHARED) or x is MISSING:
            return
        self._seen[id(x)] = x
        kind = type(x)
        value = next((value for base, value in VALUES.items() if isinstance(x, base)), None)
        if kind in CONTAINERS and (len(x) > MOST_ENTRIES or len(self.parts) > MOST_PARTS):
            self.tables.append((x, len(x)))
        elif isinstance(x, tuple | frozenset):
            self._todo += x
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif value is not None:
            read, write, same = value
            self._add(x, functools.partial(read, x), functools.partial(write, x), same)
            if isinstance(x, np.ndarray) and x.dtype == object:
                self._todo += x.ravel().tolist()
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, _BOUND):
            self._todo += [getattr(x, name, None) for name in ("__self__", "__func__", "func", "args", "keywords")]
        elif isinstance(x, types.CellType):
            write = functools.partial(states.set_attributes, x, ["cell_contents"])
            self._add_objects(x, functools.partial(states.cell_contents, x), lambda state: write(state or [MISSING]))
        elif isinstance(x, type):
            self._add_class(x)
        elif not (isinstance(x, types.ModuleType) or hasattr(kind, "cache_info")):  # a cache of answers is no state
            self._add_instance(x)

    def _add_instance(self, x: Any) -> None:
        """Add a container by what it holds, a Python object by its attributes, any other by a copy."""
        kind = type(x)
        base = next((base for base in CONTAINERS if isinstance(x, base)), None)
        if base is not None:
            read, write = CONTAINERS[base]
            self._add_objects(x, functools.partial(read, x), functools.partial(write, x))
            if kind is base:
                return
        elif kind.__module__.partition(".")[0] in _SHARED_ROOTS or states.is_immutable(kind):
            return
        elif states.has_fork(x) or not states.is_python(x):
            self._opaque.append(x)
            return
        if hasattr(x, "__dict__"):
            self._todo.append(vars(x))
        slots = [n for k in kind.__mro__ for n, y in vars(k).items() if isinstance(y, types.MemberDescriptorType)]
        if slots and base is None:
            self._add_objects(
                x, lambda: states.attributes(x, slots), functools.partial(states.set_attributes, x, slots)
            )
        self._todo.append(kind)

    def _add_function(self, f: types.FunctionType) -> None:
        """Add what a function closes over, its defaults and attributes, and the globals that a caller's function names."""
        self._todo += [*(f.__closure__ or ()), f.__defaults__, f.__kwdefaults__, vars(f) or None]
        space = f.__globals__
        if f.__code__.co_filename.startswith(LIBRARIES):
            return
        wanted, attributes = states.global_names(f.__code__)
        names = [name for name in sorted(wanted) if name in space or not hasattr(space.get("__builtins__"), name)]
        if not names:
            return
        self._add_objects(f, lambda: states.entries(space, names), functools.partial(states.set_entries, space, names))
        for module in {id(x): x for x in map(space.get, names) if isinstance(x, types.ModuleType)}.values():
            if module is random:
                self._add(module, random.getstate, random.setstate, lambda a, b: a == b)
            elif module in (np, np.random):
                self._add(module, np.random.get_state, np.random.set_state, states.same_values)
            elif not (states.is_library(module.__name__) or module.__name__.partition(".")[0] == PACKAGE):
                self._todo += [y for n, y in vars(module).items() if n in attributes]

    def _add_class(self, kind: type) -> None:
        """Add a caller's class: its attributes, and what its methods name."""
        for base in kind.__mro__:
            if states.is_library(base.__module__):
                continue
            self._todo += [getattr(y, "__func__", y) for y in vars(base).values() if isinstance(y, _METHODS)]
            names = [n for n, y in vars(base).items() if not n.startswith("__") and not hasattr(type(y), "__get__")]
            if names:
                read = functools.partial(lambda k, names: [vars(k).get(n, MISSING) for n in names], base, names)
                self._add_objects(base, read, functools.partial(states.set_attributes, base, names))

    def _add_tensor(self, x: torch.Tensor) -> None:
        """Add a tensor by its version, which a change in place raises; a small one by its numbers, too."""
        version = states.version_of(x)
        if x.numel() > MOST_NUMBERS:
            self.tables.append((x, version))
            return
        small = x.numel() <= SMALL or version < 0
        old = self._before.get(id(x))
        known = old is not None and old[0] == version >= 0 and not (small and states.differ(x, old[1]))
        saved = old[1] if old is not None and known else x.detach().clone()
        self.tensors[id(x)] = version, saved

        def same(now: int, then: int) -> bool:
            return now == then and not (small and states.differ(x, saved))

        self._add(x, functools.partial(states.version_of, x), lambda _: states.fill(x, saved), same)
        self._todo += [vars(x) or None] if hasattr(x, "__dict__") else []

    def _add_objects(self, x: Any, read: Callable[[], list[Any]], write: Callable[[list[Any]], Any]) -> None:
        """Add what holds other objects, and visit these."""
        self._add(x, read, write, states.same_objects)
        self._todo += self.parts[-1].state

    def _add(
        self, x: Any, read: Callable[[], Any], write: Callable[[Any], Any], same: Callable[[Any, Any], bool]
    ) -> None:
        self.parts.append(Part(x, read, write, same))
