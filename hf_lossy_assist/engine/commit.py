"""What a round decided becomes text: written, streamed, counted."""

from collections.abc import Sequence
from functools import partial

import torch

from ..batch.finite_logits import refuse_invalid_logits, sound
from ..round import Verdict, Verified
from ..stats.speculation import Record, SpeculationStats
from .call import Call


MODELS = ("target", "draft", "companion")  # whose logits are looked at


def commit(call: Call, verified: Verified, verdict: Verdict, raw: torch.Tensor, stats: SpeculationStats) -> list[int]:
    """Append what was accepted, stop each row at the first token that ends it, stream, count; returns n of each row."""
    call.rows.write(verdict.token[:, None], verdict.accepted)
    table = pack_round(verified, verdict).tolist()  # the one device sync of a round whose filter and stop need none
    return apply_round(call, table, stats, verified.logits, raw)


def pack_round(verified: Verified, verdict: Verdict) -> torch.Tensor:
    """All that the host wants to know of a round, (B, 7 + 3γ) int64, to be read at once.

    n, the token behind the accepted ones, drafted tokens, sent ones; of each of `MODELS`, at how many places from the first it gave a
    distribution; then the drafted tokens, which of them are lossy, and which are unchecked, γ each.
    """
    good = sound(verified)
    everywhere = torch.full_like(verdict.accepted, verified.draft.gamma + 1)
    head = [verdict.accepted, verdict.token, verified.drafted, verified.sent]
    head += [good.get(model, everywhere) for model in MODELS]
    unchecked = torch.zeros_like(verdict.lossy) if verdict.unchecked is None else verdict.unchecked
    return torch.cat([torch.stack(head, dim=1), verified.tokens, verdict.lossy.long(), unchecked.long()], dim=1)


def apply_round(
    call: Call,
    table: Sequence[Sequence[int]],
    stats: SpeculationStats,
    scores: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
) -> list[int]:
    """`pack_round` as lists becomes text; returns n of each row.

    `scores` and `raw` (B, γ + 1, V): the target's logits, processed and not, where the call keeps them or a criterion reads them.
    """
    rows, gamma = call.rows, (len(table[0]) - 4 - len(MODELS)) // 3
    before, accepted = list(rows.lengths), []
    active = [b for b, finished in enumerate(rows.finished) if not finished]
    for b, (n, token, drafted, sent, *rest) in enumerate(table):
        accepted.append(n)
        if rows.finished[b]:
            continue
        row, good, rest = rows.row_id_list[b], dict(zip(MODELS, rest, strict=False)), rest[len(MODELS) :]
        new = rest[:n] + [token]
        taken = rows.commit(b, new, None if scores is None else scores[b])
        blame = partial(_blame, call, b, before[b], None if raw is None else raw[b])
        refuse_invalid_logits(good, taken, gamma, row, before[b] - rows.prompt_lengths[b], blame)
        call.processing.commit(row, taken)
        record = Record(drafted, sent, n, rest[gamma : 2 * gamma], taken, rest[2 * gamma :])
        stats.record(row, record, before[b] if rows.writes_past_end else None)
        if call.keep_scores and scores is not None:
            call.scores[row].append(scores[b, :taken].clone())
        if call.keep_logits and raw is not None:
            call.logits[row].append(raw[b, :taken].clone())
        if call.streamer is not None:
            for t in new[:taken]:
                call.streamer.put(torch.tensor([t]))

    call.stop.observe(
        [rows.row_id_list[b] for b in active], [table[b][3] for b in active], [accepted[b] for b in active]
    )
    return accepted


def _blame(call: Call, b: int, length: int, raw: torch.Tensor | None, place: int) -> str | None:
    """Return which processor made no distribution at a place of a round, where the model gave one in `raw` (γ + 1, V)."""
    if raw is None or not bool(raw[place].amax().isfinite()):
        return None
    return call.processing.blame(call.rows.ids[b], length + place, raw[place], call.rows.row_id_list[b])


def new_tokens_first(kept: Sequence[Sequence[torch.Tensor]], length: int) -> tuple[torch.Tensor, ...]:
    """Each row's scores as `generate` returns them: one (B, V) for each new token, zeros where a row had ended."""
    rows = [torch.cat(list(parts)) for parts in kept]
    full = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, length - r.shape[0])) for r in rows])  # (B, length, V)
    return tuple(full.unbind(dim=1))
