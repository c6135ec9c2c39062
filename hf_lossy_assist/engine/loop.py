"""One generate call, round by round: draft → select → verify → accept → commit.

p = target, q = draft, γ = drafted tokens of a round, n = accepted (Leviathan et al., huggingface.co/papers/2211.17192).
"""

import torch

from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.compiled.static_model import StaticRowModel
from ..round import Verified
from ..rules import accept
from ..stats.clock import Clock
from ..stats.speculation import RowStats, SpeculationStats
from ..stops import DraftStop
from ..validation import check_int, shown
from .call import Call
from .compiled_loop import CompiledRounds
from .stages import commit, propose, select, verify


def decode(call: Call) -> SpeculationStats:
    """Decode every row to its end. `prefill` must have run for every model."""
    rows = call.rows
    stats = call.make_stats([RowStats() for _ in rows.row_id_list])

    compiled = CompiledRounds.of(call, stats) if call.compiled else None
    while rows.unfinished:
        limits = start_round(call)
        if compiled is None or not compiled.fits(limits) or not compiled.run(limits, stats):
            run_stages(call, limits, stats)
        rows.check_time()
        drop_finished(call)

    for model in (call.target, *call.drafter.cached_models):
        if isinstance(model, StaticRowModel):
            stats.num_compiled_forwards += model.num_compiled
            stats.num_graphs += model.num_graphs
    stats.settle(rows.ends())
    stats.close(call.clock)
    return stats


def run_stages(call: Call, limits: list[int], stats: SpeculationStats) -> None:
    """Run one eager round; row b drafts up to `limits[b]` tokens."""
    verified, raw_logits = draft_and_verify(call, limits)
    verdict = accept(call.rule, verified, call.randomness)
    accepted = commit(call, verified, verdict, raw_logits, stats)
    if call.on_round is not None:
        call.on_round(verified, verdict)
    roll_back(call, verified, accepted)


def draft_and_verify(call: Call, limits: list[int]) -> tuple[Verified, torch.Tensor]:
    """Run draft, select and verify; return the verified draft and the target's raw logits (B, γ + 1, V)."""
    call.upload_places(limits)
    draft = propose(call, limits)
    selection = select(call, draft)
    return verify(call, selection)


def start_round(call: Call) -> list[int]:
    """Begin a round; return each row's draft limit: the stop's plan, lowered to the room left, 0 for finished rows."""
    rows = call.rows
    call.randomness.begin_round(rows.row_id_list)
    active = [row for row, finished in zip(rows.row_id_list, rows.finished, strict=True) if not finished]
    planned = dict(zip(active, check_limits(call.stop.begin_round(active), active, call.stop.settings), strict=True))
    call.positions.check(rows, call.name_row)
    limits = call.positions.room(rows.budgets(), rows.cached_lengths())
    return [min(planned.get(row, 0), limit) for row, limit in zip(rows.row_id_list, limits, strict=True)]


def check_limits(planned: list[int], rows: list[int], stop: DraftStop) -> list[int]:
    """Check a user-defined stop's limits: one integer per row, from 0 to its `longest`, to which statistics count."""
    if not isinstance(planned, list | tuple) or len(planned) != len(rows):
        raise TypeError(
            f"{type(stop).__name__}.limits: expected a list of {len(rows)} numbers, one a row, got {shown(planned)}"
        )
    longest = stop.longest
    for limit in planned:
        if type(limit) is not int or not 0 <= limit <= longest:
            check_int(f"{type(stop).__name__}.limits", limit, 0, longest)
    return planned


def roll_back(call: Call, verified: Verified, accepted: list[int]) -> None:
    """Roll every cache back to the accepted tokens."""
    rows, companion = call.rows, call.companion
    call.target.rollback(rows.cached_lengths())
    if companion is not None:
        valid = verified.selection.valid_prefix_lengths(rows.cached_lengths(), accepted)
        companion.rollback([min(pair) for pair in zip(companion.lengths, valid, strict=True)])
    call.drafter.learn(rows, verified, accepted)


def drop_finished(call: Call) -> None:
    """Drop finished rows once they are a quarter of the batch, when the copy of the caches pays."""
    rows = call.rows
    keep = [b for b, finished in enumerate(rows.finished) if not finished]
    if call.fixed_rows:
        return
    if call.compiled:
        keep = round_up_rows(rows.finished)
    if keep and 4 * (len(rows.finished) - len(keep)) >= len(rows.finished):
        keep_rows(call, keep)


def keep_rows(call: Call, keep: list[int]) -> None:
    """Shrink the batch to the rows in `keep`."""
    call.rows.select(keep)
    call.target.select(keep)
    call.drafter.select(keep)
    if call.companion is not None:
        call.companion.select(keep)


def round_up_rows(finished: list[bool]) -> list[int]:
    """Choose rows to keep: the unfinished, filled up with finished ones to a power of two, since each size is
    compiled."""
    going = [b for b, over in enumerate(finished) if not over]
    size = 1 << max(len(going) - 1, 0).bit_length()
    fill = [b for b, over in enumerate(finished) if over][: max(size - len(going), 0)]
    return sorted(going + fill)


def prefill(model: CachedModel, rows: Rows, clock: Clock, wholly: bool = False) -> None:
    """Prefill each prompt except its last token, which starts the first round. No logits are computed.

    Prompts of equal length are left to the first round's forward, unless `wholly` is set.
    """
    tokens, counts = rows.uncached_tokens(model.lengths)
    if tokens.shape[1] > 1 and (wholly or len(set(counts)) > 1 or model.needs_prefill):
        with clock.time("prefill"):
            model.feed(tokens[:, :-1], [c - 1 for c in counts], keep=0)
