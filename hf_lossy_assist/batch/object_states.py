"""How the state of one object is read, compared and put back, by its kind."""

import copy
import functools
import pickle
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


def copied(x: Any) -> Any:
    """Copy an object by its `fork`, or deeply. Raises: `CannotRestore`."""
    try:
        return x.fork() if callable(getattr(x, "fork", None)) else copy.deepcopy(x)
    except Exception as error:
        raise CannotRestore(f"holds a {type(x).__name__}, which cannot be copied") from error


def is_python(x: Any) -> bool:
    """Return whether attributes are all that an object has: `object` can then reduce it by itself."""
    kind = type(x)
    by_object = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not by_object or isinstance(getattr(kind, "__getstate__", None), types.FunctionType):
        return any(isinstance(getattr(kind, n), types.FunctionType) for n in ("__reduce__", "__reduce_ex__", "__getstate__") if hasattr(kind, n))  # fmt: skip
    try:
        object.__reduce_ex__(x, 2)
    except TypeError:
        return False
    return True


def is_immutable(kind: type) -> bool:
    """Return whether a type that is not written in Python compares and hashes by value, as dates and fractions do."""
    by_value = kind.__eq__ is not object.__eq__ and kind.__hash__ not in (None, object.__hash__)
    return by_value and not isinstance(kind.__eq__, types.FunctionType)


def is_library(kind: type) -> bool:
    """Return whether a class comes with Python or an installed package."""
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    return kind.__module__ != "__main__" and (file is None or file.startswith(LIBRARIES))


@functools.lru_cache(maxsize=1024)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Names that a function and those within it may look up among the globals."""
    inner = [n for x in code.co_consts if isinstance(x, types.CodeType) for n in global_names(x)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


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


def set_attributes(x: Any, names: list[str], values: list[Any]) -> None:
    """Set attributes, and delete those whose value is `MISSING`."""
    for name, value in zip(names, values, strict=True):
        if value is not MISSING:
            setattr(x, name, value)
        elif hasattr(x, name):
            delattr(x, name)


def _set_list(x: Any, state: list[Any]) -> None:
    x[:] = state


def _set_others(x: Any, state: list[Any]) -> None:
    x.clear()
    x.update(state) if isinstance(x, set) else x.extend(state)


def _set_dict(x: dict, state: list[Any]) -> None:
    half = len(state) // 2
    x.clear()
    x.update(zip(state[:half], state[half:], strict=True))


def numpy_state() -> bytes:
    """Return the state of NumPy's global random numbers."""
    return pickle.dumps(np.random.get_state())


CONTAINERS: dict[type, tuple[Callable, Callable]] = {
    dict: (lambda x: [*x.keys(), *x.values()], _set_dict),
    list: (list, _set_list),
    set: (list, _set_others),
    deque: (list, _set_others),
}
VALUES: dict[type, tuple[Callable, Callable, Callable]] = {
    torch.Generator: (lambda x: x.get_state(), lambda x, state: x.set_state(state), torch.equal),
    random.Random: (lambda x: x.getstate(), lambda x, state: x.setstate(state), lambda a, b: a == b),
    np.ndarray: (lambda x: x.copy(), lambda x, state: np.copyto(x, state), np.array_equal),
    np.random.Generator: (
        lambda x: pickle.dumps(x.bit_generator.state),
        lambda x, state: setattr(x.bit_generator, "state", pickle.loads(state)),
        lambda a, b: a == b,
    ),
}
