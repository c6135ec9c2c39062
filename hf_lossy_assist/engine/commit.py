"""The last stage of a round: append the accepted tokens, stream them and update the statistics."""

import struct
from collections.abc import Sequence

import torch

from ..batch.logprobs import add_logprobs
from ..round import Verdict, Verified
from ..stats.speculation import Record, SpeculationStats
from .call import Call


MODELS = ("target", "draft", "companion")  # models whose logits are checked for NaN and infinity
COUNTS = 4 + len(MODELS)  # columns of `pack_round` before the drafted tokens


def commit(call: Call, verified: Verified, verdict: Verdict, raw: torch.Tensor, stats: SpeculationStats) -> list[int]:
    """Append the accepted tokens, truncate each row at its end, stream, count; return n of each row."""
    call.rows.write(verdict.token[:, None], verdict.accepted)
    table = pack_round(verified, verdict).tolist()  # the only device sync, unless the filter or the stop needs one
    return apply_round(call, table, stats, verified.logits, raw)


def pack_round(verified: Verified, verdict: Verdict) -> torch.Tensor:
    """Pack everything that the host needs from a round into one tensor, (B, 7 + 3γ) int64, or (B, 7 + 4γ) for lossy rules.

    Columns: n; the token after the accepted ones; number of drafted tokens; number of sent tokens; for each of `MODELS`, the number
    of leading positions with valid logits; then γ drafted tokens, γ lossy flags, γ unchecked flags and, for lossy rules,
    the bits of γ overshoots (float32).
    """
    draft, companion = verified.draft, verified.selection.companion
    places = torch.arange(draft.gamma + 1, device=verified.logits.device)
    beyond = places[: draft.gamma] >= draft.lengths[:, None]
    everywhere = torch.full_like(verdict.accepted, draft.gamma + 1)
    finite = [
        _finite_places(verified.logits.amax(dim=-1), places > verified.sent[:, None]),
        everywhere if draft.validity is None else _finite_places(draft.validity, beyond),
        everywhere if companion is None else _finite_places(companion[:, : draft.gamma, 0], beyond),
    ]
    counts = torch.stack([verdict.accepted, verdict.token, verified.drafted, verified.sent, *finite], dim=1)
    unchecked = torch.zeros_like(verdict.lossy) if verdict.unchecked is None else verdict.unchecked
    parts = [counts, verified.tokens, verdict.lossy.long(), unchecked.long()]
    if verdict.overshoot is not None:
        parts.append(verdict.overshoot.contiguous().view(torch.int32).long())
    return torch.cat(parts, dim=1)


def _floats(bits: Sequence[int]) -> tuple[float, ...]:
    """Return the float32 numbers of which these are the bits."""
    return struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))


def _finite_places(x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
    """Count each row's leading positions that are finite or unread, (B,) int64."""
    # x − x is NaN for NaN and ±inf: the test of `isfinite` in half as many operations.
    return (((x - x) == 0) | unread).long().cumprod(dim=1).sum(dim=1)


def apply_round(
    call: Call,
    table: Sequence[Sequence[int]],
    stats: SpeculationStats,
    scores: torch.Tensor | None = None,
    raw: torch.Tensor | None = None,
) -> list[int]:
    """Append a round to the text, given the rows of `pack_round` as lists; return n of each row.

    `scores` and `raw` (B, γ + 1, V): the target's processed and raw logits, if the call keeps them or a criterion reads them.
    Raises: `ValueError` if a committed token was taken from invalid logits.
    """
    rows, parts = call.rows, 3 if call.rule.rule.lossless else 4
    gamma = (len(table[0]) - COUNTS) // parts
    before = list(rows.lengths)
    active, committed = [b for b, finished in enumerate(rows.finished) if not finished], dict[int, list[int]]()
    for b in active:
        n, token, drafted, sent, *finite = table[b][:COUNTS]
        tokens, lossy, unchecked, *bits = (table[b][COUNTS + i * gamma :][:gamma] for i in range(parts))
        row, new = rows.row_id_list[b], [*tokens[:n], token]
        taken = rows.commit(b, new, None if scores is None else scores[b])
        for model, place in zip(MODELS, finite, strict=True):
            # Invalid logits beyond the committed tokens are no error: after a rejected token, a grammar may forbid every token.
            if place < min(taken, gamma + (model == "target")):
                culprit = None if model != "target" or raw is None else _blame(call, b, before[b], raw[b], place)
                culprit = culprit or f"the {model} model gave NaN or infinite logits"
                raise ValueError(
                    f"{culprit} in {call.name_row(row)}, after {before[b] - rows.prompt_lengths[b] + place} new tokens"
                )
        call.processing.commit(row, taken)
        committed[b] = new[:taken]
        record = Record(drafted, sent, n, lossy, taken, unchecked, _floats(bits[0]) if any(lossy) else ())
        stats.record(row, record, before[b] if rows.continues else None)
        if call.keep_scores and scores is not None:
            call.scores[row].append(scores[b, :taken].clone())
        if call.keep_logits and raw is not None:
            call.logits[row].append(raw[b, :taken].clone())
        if call.streamer is not None:
            for t in new[:taken]:
                call.streamer.put(torch.tensor([t]))

    if call.logprobs and raw is not None:
        wanted = {b: call.logprobs[row] for b, row in enumerate(rows.row_id_list) if row in call.logprobs}
        add_logprobs(wanted, committed, raw)
    accepted = [line[0] for line in table]
    call.stop.observe(
        [rows.row_id_list[b] for b in active], [table[b][3] for b in active], [accepted[b] for b in active]
    )
    return accepted


def _blame(call: Call, b: int, length: int, raw: torch.Tensor, place: int) -> str | None:
    """Name the processor that made the logits of `place` invalid; None if `raw` (γ + 1, V) was invalid already."""
    if not bool(raw[place].amax().isfinite()):
        return None
    culprit = call.processing.blame(call.rows.shown_ids[b], length + place, raw[place], call.rows.row_id_list[b])
    return None if culprit is None else f"logits_processor: {culprit}"


def new_tokens_first(
    rounds: Sequence[Sequence[torch.Tensor]], length: int, ends: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return scores in the format of `generate`: one (B, V) for each new token, zeros after a row's end, its number of new tokens."""
    rows = [torch.cat(list(parts))[:end] for parts, end in zip(rounds, ends, strict=True)]
    full = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, length - r.shape[0])) for r in rows])  # (B, length, V)
    return tuple(full.unbind(dim=1))
