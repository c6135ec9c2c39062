"""Read, compare and restore the state of mutable objects of Python, NumPy and torch."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


Accessors = tuple[Callable[..., Any], Callable[..., Any]]  # read and write an object's state


class Value:
    """A copy of a state. Compares by value; in arrays NaN equals NaN."""

    __slots__ = ("state",)

    def __init__(self, state: object):
        self.state = copy.deepcopy(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and is_equal(self.state, other.state)


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two states are equal: numbers, strings and arrays, nested in dicts and tuples."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return bool(a == b)


def _refill(kind: Any, add: Callable[[Any, list[Any]], Any], x: Any, state: list[Any]) -> None:
    kind.clear(x)
    add(x, state)


def by_value(get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> Accessors:
    """Return accessors for an object whose state is one value, read by `get` and written by `put`."""
    return lambda x: [Value(get(x))], lambda x, state: put(x, state[0].state)


# Accessors of containers as lists of objects; unbound methods, since subclasses may override them.
CONTAINERS: dict[type, Accessors] = {
    dict: (
        lambda x: [part for item in dict.items(x) for part in item],
        functools.partial(_refill, dict, lambda x, state: dict.update(x, zip(state[::2], state[1::2], strict=True))),
    ),
    list: (lambda x: list(list.__iter__(x)), functools.partial(_refill, list, list.extend)),
    set: (lambda x: list(set.__iter__(x)), functools.partial(_refill, set, set.update)),
    deque: (lambda x: list(deque.__iter__(x)), functools.partial(_refill, deque, deque.extend)),
}
# Accessors of other objects.
VALUES: dict[type, Accessors] = {
    torch.Generator: by_value(lambda x: x.get_state().numpy(), lambda x, state: x.set_state(torch.from_numpy(state))),
    random.Random: by_value(random.Random.getstate, random.Random.setstate),
    np.ndarray: by_value(np.asarray, np.copyto),
    bytearray: by_value(bytes, lambda x, state: x.__setitem__(slice(None), state)),
    np.random.Generator: by_value(lambda x: x.bit_generator.state, lambda x, s: setattr(x.bit_generator, "state", s)),
    np.random.RandomState: by_value(lambda x: x.get_state(), lambda x, state: x.set_state(state)),
    np.random.BitGenerator: by_value(lambda x: x.state, lambda x, state: setattr(x, "state", state)),
}
