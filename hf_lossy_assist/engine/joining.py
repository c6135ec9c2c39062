"""One-row calls decoded as one batch, in which a text that has ended gives its place to the next one."""

from dataclasses import replace
from typing import Any

from ..batch.joined_rows import ProcessingTogether, RandomnessTogether, RowsTogether
from ..models.cached_model import NotJoined
from ..models.row_model import RowModel
from ..models.together import together
from ..stats.clock import Clock
from .call import Call
from .loop import keep_rows


PACKAGE = __name__.partition(".")[0]


def joined(first: Call, seats: int, clock: Clock) -> Call:
    """Make a call of up to `seats` rows, of which `first` is the first; others come by `seat`. `clock` counts for all of them.

    Each is a call of one row with the same settings, and has read its prompt. Raises: `NotJoined`, one line, for what keeps the rows
    that a call began with.
    """
    _check(first)
    rows = RowsTogether(first.rows, seats)
    processing = ProcessingTogether(first.processing, seats)
    stop = first.stop.settings.start(seats)
    if first.stop_context is not None:
        stop.pair(*first.stop_context)
    out = replace(
        first,
        rows=rows,
        target=together(first.target, seats),
        drafter=first.drafter.together(seats, stop, processing),
        stop=stop,
        rule=first.policy.rule.start(rows.token_ids() * seats),
        processing=processing,
        randomness=RandomnessTogether(first.randomness, seats),
        clock=clock,
        companion=None if first.companion is None else together(first.companion, seats),
    )
    out.clock.add(first.clock)
    return out


def seat(call: Call, guest: Call) -> int:
    """Give the text of `guest`, a call of one row, a free place, or that of a row that has ended; return the place."""
    rows, target = call.rows, call.target
    if rows.eos != guest.rows.eos:
        raise NotJoined("texts with other end tokens")
    assert isinstance(rows, RowsTogether) and isinstance(target, RowModel)
    assert isinstance(call.processing, ProcessingTogether) and isinstance(call.randomness, RandomnessTogether)
    b = rows.finished.index(True) if True in rows.finished else len(rows.row_id_list)
    number = rows.row_id_list[b] if b < len(rows.row_id_list) else rows.free
    assert number is not None, "there are no more rows than seats"
    # What needs memory first: where there is none, the row is no row of the call.
    target.take(b, guest.target)
    call.drafter.take(b, number, guest.drafter)
    if call.companion is not None and guest.companion is not None:
        call.companion.take(b, guest.companion)
    rows.take(b, number, guest.rows)
    for run, other in ((call.stop, guest.stop), (call.rule, guest.rule)):
        run.take(number, other)  # type: ignore[arg-type]
    call.processing.take(number, guest.processing)
    call.randomness.take(number, guest.randomness)
    call.clock.add(guest.clock)
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
