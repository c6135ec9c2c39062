"""Insertion of rows into a running call: prompts are prefilled in a separate call, whose rows then move into this one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..batch.criteria import RowEnds
from ..batch.logits_processing import Processing, RowProcessing
from ..batch.logprobs import RowLogprobs
from ..batch.randomness import Randomness
from ..batch.suffix_memory import SuffixMemory
from ..models.cached_model import NotJoined
from ..models.row_model import RowModel
from ..stats.clock import Clock
from ..stops import StopRun
from .call import Call


PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class RowParts:
    """The per-row state of a row to insert.

    Args:
        prompt: token ids.
        ends, end_tokens: when the text ends.
        processing: logits processors of a call with this row alone.
        generator: source of the row's random numbers.
        logprobs: the row's log-probabilities, if requested.
        memories: texts from which it may be drafted.
    """

    prompt: list[int]
    ends: RowEnds
    end_tokens: frozenset[int]
    processing: Processing
    generator: torch.Generator
    logprobs: RowLogprobs | None = None
    memories: Sequence[SuffixMemory] = ()


def with_places(call: Call, size: int, limit: int, clock: Clock, end_tokens: frozenset[int]) -> Call:
    """Return a call like `call` with up to `size` rows, added by `insert`, of about `limit` tokens. `clock` counts for all of them.

    Raises: `NotJoined`, one line, if a part of the call cannot change rows.
    """
    stop = _stop(call, size)
    for kind in (type(stop), type(call.rule)):
        if kind.__module__.partition(".")[0] != PACKAGE and "take" not in vars(kind):
            raise NotJoined(f"{kind.__name__} has no method take(row, other)")
    if call.compiled:
        raise NotJoined("compiled rounds keep the rows that a call began with")
    rows = call.rows.emptied(size, end_tokens)
    out = call.on_rows(rows, 0, limit, stop, RowProcessing(call.processing, size), clock)
    out.rule = call.policy.rule.start([rows.ids.new_zeros(1)] * size)
    out.randomness = Randomness([torch.Generator()] * size, size)
    return out


def with_prompts(call: Call, new: Sequence[RowParts]) -> Call:
    """Return a call like `call` that prefills the prompts of `new` rows."""
    row_ids, rows = range(len(new)), call.rows.emptied(len(new), call.rows.eos)
    rows.insert(row_ids, row_ids, [row.prompt for row in new], [row.ends for row in new])
    out = call.on_rows(rows, len(new), rows.max_length, call.stop, call.processing, call.clock)
    for model in cached_models(out):
        model.reserve(max(rows.lengths) - 1)
    return out


def insert(call: Call, source: Call, rows: Sequence[int], new: Sequence[RowParts]) -> list[int]:
    """Move `rows` of the `source`, prefilled, into free slots or over finished rows; return their row ids in the call."""
    finished = [b for b, is_over in enumerate(call.rows.finished) if is_over][: len(rows)]
    free = [row_id for row_id in range(len(call.rows.finished_tokens)) if row_id not in call.rows.row_id_list]
    size, more = len(call.rows.row_id_list), len(rows) - len(finished)
    slots = [*finished, *range(size, size + more)]
    row_ids = [*(call.rows.row_id_list[b] for b in finished), *free[:more]]
    # Allocate first: if memory runs out, no row has been added.
    assert isinstance(call.target, RowModel) and isinstance(source.target, RowModel)
    call.target.insert(slots, source.target, rows)
    call.drafter.insert(slots, row_ids, source.drafter, rows)
    if call.companion is not None and source.companion is not None:
        call.companion.insert(slots, source.companion, rows)
    call.rows.insert(slots, row_ids, [row.prompt for row in new], [row.ends for row in new])
    assert isinstance(call.processing, RowProcessing)
    for row_id, row in zip(row_ids, new, strict=True):
        call.stop.take(row_id, _stop(call, 1))
        call.rule.take(row_id, call.policy.rule.start([torch.tensor(row.prompt, device=call.rows.ids.device)]))
        call.processing.insert(row_id, row.processing)
        call.randomness.insert(row_id, row.generator)
        call.logprobs.pop(row_id, None)
        call.rows.memories[row_id] = row.memories
        if row.logprobs is not None:
            call.logprobs[row_id] = row.logprobs
        row.ends.begin()
    return row_ids


def cached_models(call: Call) -> list[Any]:
    """Return the models of a call that have a cache."""
    return [model for model in (call.target, *call.drafter.cached_models, call.companion) if model is not None]


def _stop(call: Call, rows: int) -> StopRun:
    """Start the call's stop for `rows` rows."""
    out = call.stop.settings.start(rows)
    out.trims = call.stop.trims
    if call.stop_context is not None:
        out.pair(*call.stop_context)
    return out
