"""Models whose forward takes no `position_ids` and counts positions from the cache's length (BART's decoder and its kin): in a batch each
row's tokens get those of their own row.

Such a decoder asks a table of positions for `cache_length … cache_length + Q − 1`; of rows of different length a cache has only one length. Here the
table is asked for the columns at which each row's tokens stand, which is what `generate` counts, padding and holes included.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .cache_name import CACHE_NAMES
from .calling import takes_positions


LENGTH = {f"{name}_length" for name in CACHE_NAMES}
_tables: WeakKeyDictionary[Any, list[torch.nn.Module]] = WeakKeyDictionary()
_places: ContextVar[torch.Tensor | None] = ContextVar("places", default=None)
_forwards: dict[int, int] = {}  # under way in all threads with this table's forward replaced, by the `id` of the table
_lock = threading.Lock()


def tables_of(base: Any) -> list[torch.nn.Module]:
    """The tables of positions that a model which takes none asks by the cache's length."""
    if base not in _tables:
        found = [] if takes_positions(base) else [part for part in base.modules() if _counts(part)]
        _tables[base] = found
    return _tables[base]


def _counts(part: torch.nn.Module) -> bool:
    names = set(inspect.signature(part.forward).parameters)
    return isinstance(part, torch.nn.Embedding) and bool(names & LENGTH) and "position_ids" in names


def with_places(model: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """`model`, or for one that has such tables a callable like it that also takes `position_ids` (1 or B, Q)."""
    tables = tables_of(base)
    return partial(_run, model, tables) if tables else model


def _run(model: Callable[..., Any], tables: Sequence[torch.nn.Module], position_ids: torch.Tensor, **inputs: Any) -> Any:  # fmt: skip
    token = _places.set(position_ids)
    try:
        with _replaced(tables):
            return model(**inputs)
    finally:
        _places.reset(token)


@contextmanager
def _replaced(tables: Sequence[torch.nn.Module]) -> Iterator[None]:
    """`_forward` in place of these tables' own. They belong to all threads; in another one it does what theirs did."""
    counted = []
    try:  # around all that is to be undone: a stop from the keyboard may come between any two lines
        with _lock:
            for table in tables:
                if not _forwards.get(id(table)):
                    table.forward = partial(_forward, table.forward, "forward" in vars(table))
                _forwards[id(table)] = _forwards.get(id(table), 0) + 1
                counted.append(table)
        yield
    finally:
        with _lock:
            for table in counted:
                _forwards[id(table)] -= 1
                if not _forwards[id(table)]:
                    del _forwards[id(table)]
                    own, was_set = vars(table)["forward"].args
                    delattr(table, "forward")
                    if was_set:  # by accelerate, say
                        table.forward = own


def _forward(own: Callable[..., Any], _was_set: bool, shape: Any, *args: Any, **kwargs: Any) -> Any:
    places = _places.get()
    if places is None:  # another thread's
        return own(shape, *args, **kwargs)
    found = own(shape, 0, position_ids=places.flatten())  # some put a row before them
    return found.view(*places.shape, found.shape[-1])
