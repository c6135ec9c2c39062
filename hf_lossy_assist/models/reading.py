"""Prompts of several one-row models read in one forward."""

from collections.abc import Sequence

import torch

from .cached_model import CachedModel
from .row_model import RowModel
from .together import together


def reads_together(models: Sequence[CachedModel]) -> bool:
    """Whether one forward can read for all of them: rows of one model, which hold the same of a text whatever stands beside it."""
    return all(joins(its) and its.model is models[0].model for its in models)  # type: ignore[attr-defined]


def joins(model: CachedModel) -> bool:
    """Tell whether the model's row can join a batch; see `RowModel.joins`."""
    return isinstance(model, RowModel) and model.joins


def keeps_prompts(model: CachedModel) -> bool:
    """Tell whether the model can copy a prompt that was read before; see `RowModel.keeps_prompts`."""
    return isinstance(model, RowModel) and model.keeps_prompts


def read_together(models: Sequence[RowModel], texts: Sequence[torch.Tensor]) -> None:
    """One forward in which each model reads its text, (n,) token ids, behind what it holds. `reads_together` has said that it can be."""
    first, limit = models[0], max(its.cache.limit for its in models)
    if any(its.lengths[0] for its in models):
        batch = together(first, len(models))
        batch.cache.limit = limit
        for row, its in enumerate(models[1:], 1):
            batch.take(row, its)
    else:
        batch = RowModel(first.model, len(models), limit)
        batch.narrow = first.narrow
    counts = [len(text) for text in texts]
    batch.reserve(max(its.lengths[0] + count for its, count in zip(models, counts, strict=True)))
    tokens = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    batch.feed(tokens, counts, keep=0)
    for row, its in enumerate(models):
        own = batch.cache.row(row)
        own.limit, its.cache, its.lengths = its.cache.limit, own, [batch.lengths[row]]
