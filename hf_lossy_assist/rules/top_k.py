"""Rules by rank: accept a drafted token that is among the target's first choices."""

from typing import ClassVar

import torch

from ..registry.frozen import Amount, Count, Several, Share
from ..tensors import largest, passing
from .distributions import Distributions
from .pointwise import Pointwise


def ranks(dists: Distributions) -> torch.Tensor:
    """Return the number of tokens that the target prefers to each token, (..., n) int64; the lower id wins a tie."""
    scores = dists.logits
    if dists.tokens is None:
        return scores.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    assert dists.tokens.shape[-1] == 1, "several tokens of one place would need the whole vocabulary"
    score, ids = dists.at(scores), torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device)
    ahead = passing(torch.eq, scores, score).mul_(passing(torch.lt, ids, dists.tokens.to(torch.float32)))
    return ahead.add_(passing(torch.gt, scores, score)).sum(dim=-1, keepdim=True).to(torch.int64)


class TopK(
    Pointwise,
    name="top_k",
    neutral={"k": 0},
    neutral_text="k = 0, and in greedy decoding k = 1",
    paper="2504.20039",
    ladder=("k", (2, 3, 4, 8)),
):
    """Accept a drafted token that is among the target's k most likely ones: AutoJudge's baseline.

    a(x) = 1 where fewer than k tokens have a higher p than x (the lower id wins a tie), else strict; r = norm((p − q)⁺)
    (Garipov et al., §4.1, huggingface.co/papers/2504.20039). Neutral: k = 0, and in greedy decoding k = 1.
    """

    k: Count

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return ranks(dists) < self.k


class RelaxedTopK(TopK, name="relaxed_top_k", neutral={"k": 1}, paper="TensorRT-LLM", ladder=("k", (2, 4, 8))):
    """Accept a drafted token that is among the target's k most likely ones and not much less likely than the first.

    Accept x iff rank(x) < k and p(x) ≥ max p − δ, in probabilities, else the target's argmax: TensorRT-LLM's relaxed
    acceptance (`relaxed_topk`, `relaxed_delta`; k = 10 and δ = 0.6 are its usual settings), for greedy decoding. There it
    applies to reasoning only: `Limited(RelaxedTopK(), inside=(begin, end))`. Neutral: k = 1.
    """

    k: Several = 10
    delta: Share = 0.6
    modes: ClassVar[tuple[str, ...]] = ("greedy",)

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return super().keeps(dists) & (dists.px >= dists.top - self.delta)


class TopKTolerance(
    TopK,
    name="top_k_tolerance",
    neutral={"k": 1},
    neutral_text="k = 1, the default; tolerance = 0 accepts no more than exact ties",
    paper="vLLM's speculators",
    ladder=("k", (2, 3, 5)),
):
    """Accept a drafted token that is among the target's k most likely ones and within a log-probability of the first.

    Accept x iff rank(x) < k and log max p − log p(x) ≤ `tolerance`, else the target's argmax: `verifier_accept_k` and `accept_tolerance`
    of vLLM's speculators, where values up to 5 cost little. For greedy decoding. Neutral: k = 1; `tolerance` 0 accepts only exact ties.
    """

    k: Several = 1
    tolerance: Amount = 0.0
    modes: ClassVar[tuple[str, ...]] = ("greedy",)

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return super().keeps(dists) & (dists.gap <= self.tolerance)


class MARS(
    Pointwise, name="mars", neutral={"threshold": 1.0}, paper="2601.15498", ladder=("threshold", (0.95, 0.9, 0.8, 0.7))
):
    """Accept the target's second choice where its logit is close to that of the first.

    a(x) = 1 where x is the second choice and z₂/z₁ > `threshold`, z₁ ≥ z₂ the target's two largest processed logits, else strict; greedy:
    the same; r = norm((p − q)⁺) (MARS, huggingface.co/papers/2601.15498; 0.9 is the authors'). The ratio is not invariant to a constant
    added to all logits: where z₁ ≤ 0, as after logit normalisation, the rule accepts nothing. Neutral: threshold 1.
    """

    threshold: Share = 0.9

    def keeps(self, dists: Distributions) -> torch.Tensor:
        first, second = largest(dists.logits, 2).split(1, dim=-1)  # (..., 1) each
        close = (first > 0) & (second > self.threshold * first)
        return close & (dists.at(dists.logits) >= second)
