"""A companion model reads along: its distributions over a drafted block."""

import torch

from ..drafters.base import fit_vocabulary
from ..round import Draft
from .call import Call


MAX_CATCH_UP = 8  # a companion that lags further behind than this is prefilled first, without computing logits


def companion_probs(call: Call, draft: Draft) -> torch.Tensor:
    """One companion forward over the draft: its distributions at each drafted position and the one after, (B, γ + 1, V) float32."""
    rows, gamma, companion = call.rows, draft.gamma, call.companion
    assert companion is not None, "asked only where the filter has one"
    with call.clock.time("companion"):
        tokens, counts = rows.uncached_tokens(companion.lengths, gamma)
        if len(set(counts)) > 1 and max(counts) > gamma + MAX_CATCH_UP:  # it was not asked for a while
            companion.feed(tokens[:, : -gamma - 1], [count - gamma - 1 for count in counts], keep=0)
            tokens, counts = rows.uncached_tokens(companion.lengths, gamma)
        even = len(set(counts)) == 1
        raw = companion.feed(tokens, counts, keep=gamma + 1 if even else None)
        if not even:
            ends = torch.tensor(counts, device=raw.device)[:, None]
            places = ends - gamma - 1 + torch.arange(gamma + 1, device=raw.device)
            raw = raw.gather(1, places[..., None].expand(-1, -1, raw.shape[-1]))
    vocabulary = raw.shape[-1] if draft.probs is None else draft.probs.shape[-1]
    raw = fit_vocabulary(raw.to(device=rows.ids.device, dtype=torch.float32), vocabulary)
    active_positions = (
        rows.active_positions(draft.tokens, draft.lengths.tolist()) if call.processing.runs_callers_code else None
    )
    return call.processing(rows.ids, rows.lengths, raw, rows.row_id_list, active_positions).softmax(dim=-1)
