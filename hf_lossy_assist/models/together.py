"""Rows of several calls on one cache, and their prompts read in one forward."""

from collections.abc import Sequence

import torch

from .cached_model import CachedModel, NotJoined
from .introspection import base_of, has_fixed_rows
from .row_model import RowModel


def together(first: CachedModel, max_rows: int) -> RowModel:
    """Return a model on up to `max_rows` rows, the first of which is the one that `first` has; its storage is copied.

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
    out = RowModel(first.model, max_rows, first.cache.limit)
    out.narrow, out.lengths = first.narrow, []
    out.take(0, first)
    return out


def reads_together(models: Sequence[CachedModel]) -> bool:
    """Tell whether one forward can read for all of them: rows of one model, whose cache of a text does not depend on other rows."""
    return all(joins(model) and model.model is models[0].model for model in models)  # type: ignore[attr-defined]


def joins(model: CachedModel) -> bool:
    """Tell whether the model's row can join a batch; see `RowModel.joins`."""
    return isinstance(model, RowModel) and model.joins


def keeps_prompts(model: CachedModel) -> bool:
    """Tell whether the model can copy a prompt that was read before; see `RowModel.keeps_prompts`."""
    return isinstance(model, RowModel) and model.keeps_prompts


def read_together(models: Sequence[RowModel], texts: Sequence[torch.Tensor]) -> None:
    """Let each model read its text, (n,) token ids, after what it holds, in one forward. `reads_together` has said that it can be."""
    first, limit = models[0], max(model.cache.limit for model in models)
    if any(model.lengths[0] for model in models):
        batch = together(first, len(models))
        batch.cache.limit = limit
        for row, model in enumerate(models[1:], 1):
            batch.take(row, model)
    else:
        batch = RowModel(first.model, len(models), limit)
        batch.narrow = first.narrow
    counts = [len(text) for text in texts]
    batch.reserve(max(model.lengths[0] + count for model, count in zip(models, counts, strict=True)))
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    batch.feed(tokens, counts, keep=0)
    for row, model in enumerate(models):
        cache = batch.cache.row(row)
        cache.limit, model.cache, model.lengths = model.cache.limit, cache, [batch.lengths[row]]
