"""Token log-probabilities for rows that request them, from the target's raw logits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """Log p of one token under the target's raw logits, without temperature, top-k, top-p or grammar.

    Args:
        logprob: of the token.
        alternatives: the most likely tokens at its position with their log p, in descending order.
    """

    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(frozen=True)
class RowLogprobs:
    """The log-probabilities of one row. `alternatives`: how many to record at each position; `tokens`: one entry per new token."""

    alternatives: int
    tokens: list[TokenLogprobs] = field(default_factory=list)


def add_logprobs(wanted: Mapping[int, RowLogprobs], committed: Mapping[int, Sequence[int]], raw: torch.Tensor) -> None:
    """Append the log-probabilities of a round's tokens to `wanted`. `committed`: tokens by row of `raw` (B, γ + 1, V), the target's logits."""
    rows = [b for b in committed if b in wanted]
    if not rows:
        return
    places = [(b, place, token) for b in rows for place, token in enumerate(committed[b])]
    index = torch.tensor(places, device=raw.device)
    logp = raw[index[:, 0], index[:, 1]].float().log_softmax(dim=-1)  # (tokens, V)
    most = min(max(wanted[b].alternatives for b in rows), logp.shape[-1])
    values, tokens = logp.topk(most, dim=-1)
    chosen = logp.gather(1, index[:, 2:])[:, 0].tolist()
    for (b, _, _), p, ids, ps in zip(places, chosen, tokens.tolist(), values.tolist(), strict=True):
        few = wanted[b].alternatives
        wanted[b].tokens.append(TokenLogprobs(p, list(zip(ids[:few], ps[:few], strict=True))))
