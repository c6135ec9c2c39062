"""How the state of Python's, NumPy's and torch's mutable objects is read, compared and written back."""

import copy
import functools
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


Accessors = tuple[Callable[..., Any], Callable[..., Any]]  # what reads an object's state, and what writes it


class Value:
    """A copy of a state, equal to another with the same numbers, NaN with NaN, too."""

    __slots__ = ("state",)

    def __init__(self, state: object):
        self.state = copy.deepcopy(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and is_equal(self.state, other.state)


def is_equal(a: Any, b: Any) -> bool:
    """Return whether two states agree: numbers, texts and arrays within dicts and tuples."""
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
    """Return accessors of an object whose state `get` reads, and `put` writes back, as one value."""
    return lambda x: [Value(get(x))], lambda x, state: put(x, state[0].state)


# How a container is read as a list of objects, and written; unbound, as a subclass may have other methods.
CONTAINERS: dict[type, Accessors] = {
    dict: (
        lambda x: [part for item in dict.items(x) for part in item],
        functools.partial(_refill, dict, lambda x, state: dict.update(x, zip(state[::2], state[1::2], strict=True))),
    ),
    list: (lambda x: list(list.__iter__(x)), functools.partial(_refill, list, list.extend)),
    set: (lambda x: list(set.__iter__(x)), functools.partial(_refill, set, set.update)),
    deque: (lambda x: list(deque.__iter__(x)), functools.partial(_refill, deque, deque.extend)),
}
# How the state of other objects is read and written.
VALUES: dict[type, Accessors] = {
    torch.Generator: by_value(lambda x: x.get_state().numpy(), lambda x, state: x.set_state(torch.from_numpy(state))),
    random.Random: by_value(random.Random.getstate, random.Random.setstate),
    np.ndarray: by_value(np.asarray, np.copyto),
    bytearray: by_value(bytes, lambda x, state: x.__setitem__(slice(None), state)),
    np.random.Generator: by_value(lambda x: x.bit_generator.state, lambda x, s: setattr(x.bit_generator, "state", s)),
    np.random.RandomState: by_value(lambda x: x.get_state(), lambda x, state: x.set_state(state)),
    np.random.BitGenerator: by_value(lambda x: x.state, lambda x, state: setattr(x, "state", state)),
}
