"""Insertion of rows into a running call: prompts are prefilled in a separate call, whose rows then move into this one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..batch.criteria import RowEnds
from ..batch.logits_processing import Processing
from ..batch.logprobs import RowLogprobs
from ..batch.randomness import Randomness
from ..batch.row_processing import RowProcessing
from ..batch.rows import Rows
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


def with_places(call: Call, places: int, limit: int, clock: Clock, end_tokens: frozenset[int]) -> Call:
    """Return a call like `call` with up to `places` rows, added by `insert`, of about `limit` tokens. `clock` counts for all of them.

    Raises: `NotJoined`, one line, if a part of the call cannot change rows.
    """
    stop = _stop(call, places)
    for run in (stop, call.rule):
        kind: Any = type(run)
        if kind.__module__.partition(".")[0] != PACKAGE and "take" not in vars(kind):
            raise NotJoined(f"{kind.__name__} has no method take(row, other)")
    if call.compiled:
        raise NotJoined("compiled rounds keep the rows that a call began with")
    processing, rows = RowProcessing(call.processing, places), call.rows.emptied(places, end_tokens)
    out = _on_models(replace(call, stop=stop, processing=processing, clock=clock), rows, 0, limit)
    out.rule = call.policy.rule.start([rows.ids.new_zeros(1)] * places)
    out.randomness = Randomness([torch.Generator()] * places, places)
    return out


def with_prompts(call: Call, parts: Sequence[RowParts]) -> Call:
    """Return a call like `call` that prefills the prompts of `parts`."""
    numbers, rows = range(len(parts)), call.rows.emptied(len(parts), call.rows.eos)
    rows.insert(numbers, numbers, [part.prompt for part in parts], [part.ends for part in parts])
    out = _on_models(call, rows, len(parts), rows.max_length)
    for model in cached_models(out):
        model.reserve(max(rows.lengths) - 1)
    return out


def insert(call: Call, other: Call, rows: Sequence[int], parts: Sequence[RowParts]) -> list[int]:
    """Move rows of `other`, prefilled, into free slots or over finished rows; return their row ids in the call."""
    ended = [b for b, finished in enumerate(call.rows.finished) if finished][: len(rows)]
    free = [number for number in range(len(call.rows.finished_tokens)) if number not in call.rows.row_id_list]
    first, new = len(call.rows.row_id_list), len(rows) - len(ended)
    places = [*ended, *range(first, first + new)]
    numbers = [*(call.rows.row_id_list[b] for b in ended), *free[:new]]
    # Allocate first: if memory runs out, no row has been added.
    assert isinstance(call.target, RowModel) and isinstance(other.target, RowModel)
    call.target.insert(places, other.target, rows)
    call.drafter.insert(places, numbers, other.drafter, rows)
    if call.companion is not None and other.companion is not None:
        call.companion.insert(places, other.companion, rows)
    call.rows.insert(places, numbers, [part.prompt for part in parts], [part.ends for part in parts])
    assert isinstance(call.processing, RowProcessing)
    for number, part in zip(numbers, parts, strict=True):
        call.stop.take(number, _stop(call, 1))
        call.rule.take(number, call.policy.rule.start([torch.tensor(part.prompt, device=call.rows.ids.device)]))
        call.processing.insert(number, part.processing)
        call.randomness.insert(number, part.generator)
        call.logprobs.pop(number, None)
        call.rows.memories[number] = part.memories
        if part.logprobs is not None:
            call.logprobs[number] = part.logprobs
        part.ends.begin()
    return numbers


def cached_models(call: Call) -> list[Any]:
    """Return the models of a call that have a cache."""
    return [model for model in (call.target, *call.drafter.cached_models, call.companion) if model is not None]


def _on_models(call: Call, rows: Rows, count: int, limit: int) -> Call:
    """Return a call like `call` with empty models of `count` rows."""
    if not isinstance(call.target, RowModel):
        raise NotJoined("a target on Transformers' cache keeps the row that a call began with")
    return replace(
        call,
        rows=rows,
        target=call.target.fresh(count, limit),
        drafter=call.drafter.fresh(count, limit, call.stop, call.processing, call.clock),
        companion=None if call.companion is None else call.companion.fresh(count, limit),
    )


def _stop(call: Call, rows: int) -> StopRun:
    """Start the call's stop for `rows` rows."""
    out = call.stop.settings.start(rows)
    out.trims = call.stop.trims
    if call.stop_context is not None:
        out.pair(*call.stop_context)
    return out
