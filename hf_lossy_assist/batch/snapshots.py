"""Snapshots of what a caller's objects remember, so that it can be put back after a rejected draft."""

import functools
import logging
import pickle
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
from .object_states import CONTAINERS, LIBRARIES, MISSING, NUMBERS, VALUES, CannotRestore, copied, set_attributes


MOST_ENTRIES = 4096  # of one container; of a larger one, a table, only the length is watched
MOST_PARTS = 20_000  # of one snapshot; containers beyond them are tables, too
MOST_NUMBERS = 1 << 20  # of one tensor; a larger one may not be changed in place

_METHODS = types.FunctionType, classmethod, staticmethod
_SHARED_ROOTS = {"torch", "tokenizers", "sentencepiece", "numpy"}  # packages whose objects are not looked into
_SHARED = (
    *NUMBERS, type(None), range, slice, type(...), Enum, PurePath, np.generic, re.Pattern, logging.Logger, types.CodeType,
    types.BuiltinFunctionType, types.MappingProxyType, weakref.ref, weakref.WeakKeyDictionary, weakref.WeakValueDictionary,
    type(threading.Lock()), type(threading.RLock()), PreTrainedModel, PreTrainedTokenizerBase, PreTrainedConfig, GenerationConfig,
)  # fmt: skip


class Part:
    """One thing that can change: `read` gives its state, `write` puts one back, `same` compares two."""

    __slots__ = "read", "same", "state", "write"  # compared at each place of a text

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], same: Callable[[Any, Any], bool]):
        self.read, self.write, self.same = read, write, same
        self.state = read()


class Snapshot:
    """The state of all that is reachable from `roots`: attributes, containers, tensors, closures, globals that functions name.

    Models, tokenizers, modules and functions of installed libraries are shared. Raises: `CannotRestore` for an object that cannot be
    copied, such as a generator.
    """

    def __init__(self, roots: list[Any], before: "Snapshot | None" = None):
        """`before`: an earlier one, whose copies of tensors that have not changed since are shared."""
        self.parts: list[Part] = []
        self.tables: list[tuple[Any, int]] = []  # with their length, or a large tensor's version
        self.copies: list[tuple[Any, Any]] = []  # what cannot be put back in place, and a copy of it
        self.tensors: dict[int, tuple[int, torch.Tensor]] = {}  # by id: the version, and a copy
        self._before = {} if before is None else before.tensors
        self._seen: dict[int, Any] = {}  # by id, and held: no id is used twice
        self._todo: list[Any] = [roots]
        while self._todo:
            self._visit(self._todo.pop())
        held = (
            {id(x) for part in self.parts if isinstance(part.state, list) for x in part.state}
            if self.copies
            else set()
        )
        for x, _ in self.copies:
            if id(x) not in held:
                raise CannotRestore(f"holds a {type(x).__name__} where it cannot be put back")

    def unchanged(self) -> bool:
        """Return whether everything is as it was. What had to be copied counts as changed: nobody can look into it."""
        for x, size in self.tables:
            if size != (states.version_of(x) if isinstance(x, torch.Tensor) else len(x)):
                raise CannotRestore(f"changes a {type(x).__name__} of more than {MOST_ENTRIES} entries in place")
        return not self.copies and all(part.same(part.read(), part.state) for part in self.parts)

    def restore(self) -> None:
        """Put everything back as it was."""
        fresh = {id(x): copied(saved) for x, saved in self.copies}
        self.copies = [(fresh[id(x)], saved) for x, saved in self.copies]
        for part in self.parts:
            if fresh and isinstance(part.state, list):
                part.state = [fresh.get(id(x), x) for x in part.state]
            if not part.same(part.read(), part.state):
                part.write(part.state)
                part.state = part.read()

    def _visit(self, x: Any) -> None:
        if id(x) in self._seen or isinstance(x, _SHARED) or x is MISSING:
            return
        self._seen[id(x)] = x
        kind = type(x)
        if kind in CONTAINERS and (len(x) > MOST_ENTRIES or len(self.parts) > MOST_PARTS):
            self.tables.append((x, len(x)))
        elif isinstance(x, tuple | frozenset):
            self._todo += x
        elif isinstance(x, torch.Tensor):
            self._add_tensor(x)
        elif kind in VALUES:
            read, write, same = VALUES[kind]
            self._add(functools.partial(read, x), functools.partial(write, x), same)
        elif isinstance(x, types.FunctionType):
            self._add_function(x)
        elif isinstance(x, types.MethodType):
            self._todo += [x.__self__, x.__func__]
        elif isinstance(x, functools.partial):
            self._todo += [x.func, x.args, x.keywords]
        elif isinstance(x, types.CellType):
            self._add_objects(
                lambda: states.cell_contents(x), lambda state: setattr(x, "cell_contents", *state) if state else None
            )
        elif isinstance(x, type):
            self._add_class(x)
        elif not (isinstance(x, types.ModuleType) or hasattr(x, "cache_info")):  # a cache of answers is no state
            self._add_instance(x)

    def _add_instance(self, x: Any) -> None:
        """Add a container by what it holds, a Python object by its attributes, any other by a copy."""
        kind = type(x)
        base = next((base for base in CONTAINERS if isinstance(x, base)), None)
        if base is not None:
            read, write = CONTAINERS[base]
            self._add_objects(functools.partial(read, x), functools.partial(write, x))
            if kind is base:
                return
        elif kind.__module__.partition(".")[0] in _SHARED_ROOTS or states.is_immutable(kind):
            return
        elif callable(getattr(x, "fork", None)) or not states.is_python(x):
            self.copies.append((x, copied(x)))
            return
        if hasattr(x, "__dict__"):
            self._todo.append(vars(x))
        slots = [n for k in kind.__mro__ for n, y in vars(k).items() if isinstance(y, types.MemberDescriptorType)]
        if slots:
            self._add_objects(
                lambda: [getattr(x, n, MISSING) for n in slots], functools.partial(set_attributes, x, slots)
            )
        self._todo.append(kind)

    def _add_function(self, f: types.FunctionType) -> None:
        """Add what a function closes over, its defaults and attributes, and the globals that a caller's function names."""
        self._todo += [*(f.__closure__ or ()), f.__defaults__, f.__kwdefaults__, vars(f) or None]
        space = f.__globals__
        if f.__code__.co_filename.startswith(LIBRARIES):
            return
        if names := [n for n in states.global_names(f.__code__) if n in space]:
            self._add_objects(
                lambda: [space.get(n) for n in names], lambda state: space.update(zip(names, state, strict=True))
            )
        if any(space[n] is random for n in names):
            self._add(random.getstate, random.setstate, lambda a, b: a == b)
        if any(space[n] is np or space[n] is np.random for n in names):
            self._add(states.numpy_state, lambda state: np.random.set_state(pickle.loads(state)), lambda a, b: a == b)

    def _add_class(self, kind: type) -> None:
        """Add a caller's class: its attributes, and what its methods name."""
        for base in kind.__mro__:
            if states.is_library(base):
                continue
            self._todo += [getattr(y, "__func__", y) for y in vars(base).values() if isinstance(y, _METHODS)]
            names = [n for n, y in vars(base).items() if not n.startswith("__") and not hasattr(y, "__get__")]
            if names:
                read = functools.partial(lambda k, names: [vars(k).get(n, MISSING) for n in names], base, names)
                self._add_objects(read, functools.partial(set_attributes, base, names))

    def _add_tensor(self, x: torch.Tensor) -> None:
        """Add a tensor by its version, which a change in place raises; a small one by its numbers, too."""
        version = states.version_of(x)
        if x.numel() > MOST_NUMBERS:
            self.tables.append((x, version))
            return
        old = self._before.get(id(x))
        saved = old[1] if old is not None and old[0] == version >= 0 else x.detach().clone()
        self.tensors[id(x)] = version, saved
        small = x.numel() <= MOST_ENTRIES or version < 0

        def same(now: int, then: int) -> bool:
            return now == then and not (small and states.differ(x, saved))

        self._add(lambda: states.version_of(x), lambda _: states.fill(x, saved), same)

    def _add_objects(self, read: Callable[[], list[Any]], write: Callable[[list[Any]], Any]) -> None:
        """Add what holds other objects, and visit these."""
        self._add(read, write, states.same_objects)
        self._todo += self.parts[-1].state

    def _add(self, read: Callable[[], Any], write: Callable[[Any], Any], same: Callable[[Any, Any], bool]) -> None:
        self.parts.append(Part(read, write, same))
