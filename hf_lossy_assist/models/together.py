"""Rows of several calls on one cache."""

from .cached_model import CachedModel, NotJoined
from .introspection import base_of, has_fixed_rows
from .row_model import RowModel


def together(first: CachedModel, seats: int) -> RowModel:
    """A model on up to `seats` rows, the first of which is the one that `first` has; its storage is copied.

    Raises: `NotJoined`, one line, where other texts could not take the places of this model's rows.
    """
    if type(first) is not RowModel:
        raise NotJoined("a model, or its compiled rounds, keep the rows that a call began with")
    reasons = {
        "its RoPE changes with the length of the text, or it reads token_type_ids": not first.joins,
        "adapters are named for each row": has_fixed_rows(base_of(first.model)),
    }
    for reason, found in reasons.items():
        if found:
            raise NotJoined(f"{type(base_of(first.model)).__name__}: {reason}")
    out = RowModel(first.model, seats, first.cache.limit)
    out.narrow, out.lengths = first.narrow, []
    out.take(0, first)
    return out
