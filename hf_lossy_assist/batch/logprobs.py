"""Log-probabilities of the tokens of texts, for rows that want them: the target's own, before any logits processor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """One token of a text: log p of the target's raw logits at its place, without temperature, top-k, top-p or a grammar.

    Args:
        logprob: of the token. alternatives: the likeliest tokens there, each with its log p, the likeliest first.
    """

    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(frozen=True)
class RowLogprobs:
    """Those of one row. alternatives: how many are wanted at each place; tokens: one entry for each new token so far."""

    alternatives: int
    tokens: list[TokenLogprobs] = field(default_factory=list)


def add_logprobs(wanted: Mapping[int, RowLogprobs], committed: Mapping[int, Sequence[int]], raw: torch.Tensor) -> None:
    """Add those of a round's tokens, `committed` by their rows in `raw` (B, γ + 1, V), the target's logits, to rows of `wanted`."""
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
