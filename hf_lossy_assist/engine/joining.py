"""One-row calls decoded as one batch, in which a text that has ended gives its place to the next one."""

from dataclasses import replace
from typing import Any

from ..batch.joined_rows import ProcessingTogether, RandomnessTogether, RowsTogether
from ..models.cached_model import NotJoined
from ..models.row_model import RowModel, together
from ..stats.clock import Clock
from .call import Call
from .loop import keep_rows


PACKAGE = __name__.partition(".")[0]


def joined(first: Call, max_rows: int, clock: Clock) -> Call:
    """Make a call of up to `max_rows` rows, of which `first` is the first; others come by `add_row`. `clock` counts for all of them.

    Each is a call of one row with the same settings, and has read its prompt. Raises: `NotJoined`, one line, for what keeps the rows
    that a call began with.
    """
    _check(first)
    rows = RowsTogether(first.rows, max_rows)
    processing = ProcessingTogether(first.processing, max_rows)
    stop = first.stop.settings.start(max_rows)
    if first.stop_context is not None:
        stop.pair(*first.stop_context)
    out = replace(
        first,
        rows=rows,
        target=together(first.target, max_rows),
        drafter=first.drafter.together(max_rows, stop, processing),
        stop=stop,
        rule=first.policy.rule.start(rows.token_ids() * max_rows),
        processing=processing,
        randomness=RandomnessTogether(first.randomness, max_rows),
        clock=clock,
        companion=None if first.companion is None else together(first.companion, max_rows),
    )
    out.clock.add(first.clock)
    return out


def add_row(call: Call, other: Call) -> int:
    """Give the text of `other`, a call of one row, a free place, or that of a row that has ended; return the place."""
    rows, target = call.rows, call.target
    if rows.eos != other.rows.eos:
        raise NotJoined("texts with other end tokens")
    assert isinstance(rows, RowsTogether) and isinstance(target, RowModel)
    assert isinstance(call.processing, ProcessingTogether) and isinstance(call.randomness, RandomnessTogether)
    b = rows.finished.index(True) if True in rows.finished else len(rows.row_id_list)
    number = rows.row_id_list[b] if b < len(rows.row_id_list) else rows.free
    assert number is not None, "there are no more rows than max_rows"
    # What needs memory first: where there is none, the row is no row of the call.
    target.take(b, other.target)
    call.drafter.take(b, number, other.drafter)
    if call.companion is not None and other.companion is not None:
        call.companion.take(b, other.companion)
    rows.take(b, number, other.rows)
    for run, joining in ((call.stop, other.stop), (call.rule, other.rule)):
        run.take(number, joining)  # type: ignore[arg-type]
    call.processing.take(number, other.processing)
    call.randomness.take(number, other.randomness)
    call.clock.add(other.clock)
    return number


def drop(call: Call) -> None:
    """Take the rows that have ended out of the batch."""
    going = [b for b, finished in enumerate(call.rows.finished) if not finished]
    if len(going) < len(call.rows.row_id_list):
        keep_rows(call, going)


def cached_models(call: Call) -> list[Any]:
    """Return the models of a call that have a cache."""
    return [m for m in (call.target, *call.drafter.cached_models, call.companion) if m is not None]


def _check(call: Call) -> None:
    """Refuse what keeps the rows that a call began with."""
    for run in (call.stop, call.rule):
        kind: Any = type(run)
        if kind.__module__.partition(".")[0] != PACKAGE and "take" not in vars(kind):
            raise NotJoined(f"{kind.__name__} has no method take(row, other)")
    if call.compiled:
        raise NotJoined("compiled rounds keep the rows that a call began with")
