"""How the state of one object is read, compared and put back, by its kind."""

import copy
import dis
import functools
import random
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
import torch


MISSING: Any = object()
NUMBERS = bool, int, float, complex, str, bytes
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class CannotRestore(ValueError):
    """An object whose state can neither be copied nor put back; the message says which."""


def same_objects(now: list[Any], then: list[Any]) -> bool:
    """Return whether two lists hold the same objects; numbers and strings may be equal ones."""
    if len(now) != len(then):
        return False
    if all(map(is_, now, then)):  # nearly always, and fast
        return True
    return all(
        a is b or (type(a) is type(b) and type(a) in NUMBERS and a == b) for a, b in zip(now, then, strict=True)
    )


def copied(x: Any, shared: dict[int, Any]) -> Any:
    """Copy an object by its `fork`, or deeply but for what `shared` holds by its id. Raises: `CannotRestore`."""
    try:
        return x.fork() if has_fork(x) else copy.deepcopy(x, dict(shared))
    except Exception as error:
        raise CannotRestore(f"holds a {type(x).__name__}, which cannot be copied") from error


def has_fork(x: Any) -> bool:
    """Return whether an object copies itself by a method `fork`, as matchers of grammars do."""
    return callable(getattr(type(x), "fork", None))


def is_python(x: Any) -> bool:
    """Return whether attributes are all that an object has: `object` can then reduce it by itself."""
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


def is_immutable(kind: type) -> bool:
    """Return whether a type that is not written in Python compares and hashes by value, as dates and fractions do."""
    by_value = kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)
    return by_value and not isinstance(kind.__eq__, types.FunctionType)


def is_library(module: str) -> bool:
    """Return whether the module of this name comes with Python or an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or file.startswith(LIBRARIES))


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the globals that a function and those within it name, and the attributes."""
    found = list(dis.get_instructions(code))
    names = frozenset(x.argval for x in found if x.opname.endswith(("_GLOBAL", "_NAME")))
    attributes = frozenset(x.argval for x in found if x.opname.endswith(("_ATTR", "_METHOD")))
    for inner in (x for x in code.co_consts if isinstance(x, types.CodeType)):
        inner_names, inner_attributes = global_names(inner)
        names, attributes = names | inner_names, attributes | inner_attributes
    return names, attributes


def version_of(x: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, or −1 where Torch does not count that."""
    return -1 if x.is_inference() else x._version


def differ(x: torch.Tensor, saved: torch.Tensor) -> bool:
    """Return whether two tensors differ in shape, dtype or a number; NaN equals NaN."""
    if x.shape != saved.shape or x.dtype != saved.dtype:
        return True
    return not (
        torch.equal(x, saved) or (x.is_floating_point() and torch.allclose(x, saved, 0.0, 0.0, equal_nan=True))
    )


@torch.no_grad()
def fill(x: torch.Tensor, saved: torch.Tensor) -> None:
    """Give `x` the numbers of `saved` again, in place."""
    if x.shape == saved.shape and x.dtype == saved.dtype:
        x.copy_(saved)
    else:
        x.data = saved.clone()


def cell_contents(x: types.CellType) -> list[Any]:
    """Return what a variable of a closure holds, as a list of one entry, or an empty one before its assignment."""
    try:
        return [x.cell_contents]
    except ValueError:  # empty
        return []


def attributes(x: Any, names: list[str]) -> list[Any]:
    """Return the attributes of these names, `MISSING` for one that is not set."""
    return [getattr(x, name, MISSING) for name in names]


def set_attributes(x: Any, names: list[str], values: list[Any]) -> None:
    """Set attributes, and delete those whose value is `MISSING`."""
    set_one, delete = (
        (type.__setattr__, type.__delattr__) if isinstance(x, type) else (object.__setattr__, object.__delattr__)
    )
    for name, value in zip(names, values, strict=True):
        if value is not MISSING:
            set_one(x, name, value)
        elif getattr(x, name, MISSING) is not MISSING:
            delete(x, name)


def entries(x: dict, names: list[str]) -> list[Any]:
    """Return a dict's entries of these names, `MISSING` for one that is not there."""
    return [x.get(name, MISSING) for name in names]


def set_entries(x: dict, names: list[str], values: list[Any]) -> None:
    """Set entries of a dict, and delete those whose value is `MISSING`."""
    x.update({name: value for name, value in zip(names, values, strict=True) if value is not MISSING})
    for name in [name for name, value in zip(names, values, strict=True) if value is MISSING and name in x]:
        del x[name]


def same_values(a: Any, b: Any) -> bool:
    """Return whether two states agree: numbers, texts and arrays within dicts and tuples."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_values(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(map(same_values, a, b))
    return same_array(a, b) if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) else bool(a == b)


def same_array(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays agree in shape, dtype and every entry; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _set_list(x: Any, state: list[Any]) -> None:
    list.__setitem__(x, slice(None), state)


def _set_set(x: Any, state: list[Any]) -> None:
    set.clear(x)
    set.update(x, state)


def _set_deque(x: Any, state: list[Any]) -> None:
    deque.clear(x)
    deque.extend(x, state)


def _set_dict(x: dict, state: list[Any]) -> None:
    half = len(state) // 2
    dict.clear(x)
    dict.update(x, zip(state[:half], state[half:], strict=True))


def _dict_items(x: dict) -> list[Any]:
    return [*dict.keys(x), *dict.values(x)]


# How a container is read as a list of objects, and written; unbound, as a subclass may have other methods.
CONTAINERS: dict[type, tuple[Callable, Callable]] = {
    dict: (_dict_items, _set_dict),
    list: (lambda x: list(list.__iter__(x)), _set_list),
    set: (lambda x: list(set.__iter__(x)), _set_set),
    deque: (lambda x: list(deque.__iter__(x)), _set_deque),
}
# How what has a value of its own is read, written and compared.
VALUES: dict[type, tuple[Callable, Callable, Callable]] = {
    torch.Generator: (lambda x: x.get_state(), lambda x, state: x.set_state(state), torch.equal),
    random.Random: (lambda x: x.getstate(), lambda x, state: x.setstate(state), lambda a, b: a == b),
    np.ndarray: (lambda x: np.array(x), lambda x, state: np.copyto(x, state), same_array),
    bytearray: (bytes, lambda x, state: x.__setitem__(slice(None), state), lambda a, b: a == b),
    np.random.Generator: (
        lambda x: copy.deepcopy(x.bit_generator.state),
        lambda x, state: setattr(x.bit_generator, "state", state),
        same_values,
    ),
    np.random.RandomState: (
        lambda x: copy.deepcopy(x.get_state()),
        lambda x, state: x.set_state(state),
        same_values,
    ),
    np.random.BitGenerator: (
        lambda x: copy.deepcopy(x.state),
        lambda x, state: setattr(x, "state", state),
        same_values,
    ),
}
