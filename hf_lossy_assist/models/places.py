"""Models whose forward takes no `position_ids` and counts positions from the cache's length (BART's decoder and its kin): in a batch each
row's tokens get those of their own row.

Such a decoder asks a table of positions for `cache_length … cache_length + Q − 1`; of rows of different length a cache has only one length. Here the
table is asked for the columns at which each row's tokens stand, which is what `generate` counts, padding and holes included.
"""

import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch

from .cache_name import CACHE_NAMES
from .calling import takes_positions
from .replaced import Replacing


LENGTH = {f"{name}_length" for name in CACHE_NAMES}
_tables: WeakKeyDictionary[Any, list[torch.nn.Module]] = WeakKeyDictionary()
_places: ContextVar[torch.Tensor | None] = ContextVar("places", default=None)


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
        with _asked.within(tables):
            return model(**inputs)
    finally:
        _places.reset(token)


def _asking(table: torch.nn.Module) -> dict[str, Any]:
    return {"forward": partial(_forward, table.forward)}


_asked = Replacing(_asking)


def _forward(own: Callable[..., Any], shape: Any, *args: Any, **kwargs: Any) -> Any:
    places = _places.get()
    if places is None:  # another thread's
        return own(shape, *args, **kwargs)
    found = own(shape, 0, position_ids=places.flatten())  # some put a row before them
    return found.view(*places.shape, found.shape[-1])
