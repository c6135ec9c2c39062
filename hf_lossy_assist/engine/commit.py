"""What a round decided becomes text: written, streamed, counted."""

from collections.abc import Sequence

import torch

from ..batch.soundness import refuse_unsound, sound
from ..round import Verdict, Verified
from ..stats.report import Record, SpeculationStats
from .call import Call


def commit(call: Call, verified: Verified, verdict: Verdict, raw: torch.Tensor, stats: SpeculationStats) -> list[int]:
    """Append what was accepted, stop each row at the first token that ends it, stream, count; returns n of each row."""
    rows, gamma = call.rows, verified.draft.gamma
    rows.write(verdict.token[:, None], verdict.accepted)
    good = sound(verified)
    head = [verdict.accepted, verdict.token, verified.drafted, verified.sent, *good.values()]
    unchecked = [] if verdict.unchecked is None else [verdict.unchecked.long()]
    parts = [torch.stack(head, dim=1), verified.tokens, verdict.lossy.long(), *unchecked]
    table = torch.cat(parts, dim=1).tolist()  # the one device sync of a round whose filter and stop need none

    before, accepted = list(rows.lengths), []
    active = [b for b, finished in enumerate(rows.finished) if not finished]
    for b, (n, token, drafted, sent, *rest) in enumerate(table):
        accepted.append(n)
        if rows.finished[b]:
            continue
        row, sound_places, rest = rows.index[b], rest[: len(good)], rest[len(good) :]
        new, scores = rest[:n] + [token], verified.logits[b]
        taken = rows.commit(b, new, scores)
        refuse_unsound(dict(zip(good, sound_places, strict=True)), taken, gamma, row, before[b] - rows.width)
        record = Record(drafted, sent, n, rest[gamma : 2 * gamma], taken, rest[2 * gamma :])
        stats.record(row, record, before[b] if rows.writes_on else None)
        if call.keep_scores:
            call.scores[row].append(scores[:taken].clone())
        if call.keep_logits:
            call.logits[row].append(raw[b, :taken].clone())
        if call.streamer is not None:
            for t in new[:taken]:
                call.streamer.put(torch.tensor([t]))

    call.stop.observe([rows.index[b] for b in active], [table[b][3] for b in active], [accepted[b] for b in active])
    return accepted


def new_tokens_first(kept: Sequence[Sequence[torch.Tensor]], length: int) -> tuple[torch.Tensor, ...]:
    """Each row's scores as `generate` returns them: one (B, V) for each new token, zeros where a row had ended."""
    rows = [torch.cat(list(parts)) for parts in kept]
    full = torch.stack([torch.nn.functional.pad(r, (0, 0, 0, length - r.shape[0])) for r in rows])  # (B, length, V)
    return tuple(full.unbind(dim=1))
