"""Rules that take a drafted token by its rank, or by p(x): above a fixed threshold, or one that is lower where the target is uncertain."""

import math
from typing import ClassVar

import torch

from ..registry.frozen import Amount, Count, PositiveShare, Several, Share
from ..tensors import passing
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
    (Garipov et al., §4.1, huggingface.co/papers/2504.20039).
    """

    k: Count

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return ranks(dists) < self.k


class RelaxedTopK(TopK, name="relaxed_top_k", neutral={"k": 1}, paper="TensorRT-LLM", ladder=("k", (2, 4, 8))):
    """Accept a drafted token that is among the target's k most likely ones and not much less likely than the first.

    Accept x iff rank(x) < k and p(x) ≥ max p − δ, in probabilities, else the target's argmax: TensorRT-LLM's relaxed
    acceptance (`relaxed_topk`, `relaxed_delta`; k = 10 and δ = 0.6 are its usual settings), for greedy decoding. There it
    applies to reasoning only: `Limited(RelaxedTopK(), inside=(begin, end))`.
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


class Typical(
    Pointwise,
    name="typical",
    neutral={"epsilon": 1.0, "delta": math.inf},
    paper="2401.10774",
    ladder=("epsilon", (0.5, 0.3, 0.15, 0.09)),
):
    """Accept a drafted token whose probability exceeds a threshold that is lower where the target is uncertain.

    a(x) = 1 where p(x) > min(ε, δ·e^(−H(p))), else strict; greedy: the same set; r = norm((p − q)⁺) (Cai et al., Medusa, §2.3.1,
    huggingface.co/papers/2401.10774; ε = 0.09 and δ = 0.3 are the values in its code).
    """

    epsilon: Share = 0.09
    delta: Amount = 0.3

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return dists.px > ((-dists.entropy).exp() * self.delta).clamp(max=self.epsilon)


class EntropyVerify(
    Pointwise,
    name="entropy_verify",
    neutral={"alpha": 0.0, "threshold": 1.0},
    paper="vLLM-Ascend",
    ladder=("alpha", (0.2, 0.4, 1.0, 2.0)),
):
    """Apply strict acceptance with a higher acceptance probability where the target is uncertain.

    a(x) = min(1, p(x)/(t·q(x))), t = min(`threshold`, e^(−α·H(p))); r = norm((p − q)⁺): "entropy verify" of vLLM-Ascend
    (`posterior_threshold`, `posterior_alpha`), which uses the entropy of the unprocessed logits; here p is processed. For sampling.
    """

    alpha: Amount = 0.4
    threshold: PositiveShare = 0.95
    modes: ClassVar[tuple[str, ...]] = ("sampling",)

    def chance(self, dists: Distributions) -> torch.Tensor:
        t = (-self.alpha * dists.entropy).exp().clamp(max=self.threshold)
        return (dists.px / (t * dists.qx)).clamp(max=1.0)


class Thresholds(
    Pointwise,
    name="thresholds",
    neutral={"single": 1.0, "accumulated": 1.0},
    paper="SGLang",
    ladder=("single", (0.8, 0.6, 0.4, 0.2)),
):
    """Accept a token with high probability, and every other one with a higher chance than strict acceptance.

    a(x) = 1 where p(x) ≥ `single`, else max(min(1, p/q), min(1, p/`accumulated`)); r = norm((p − q)⁺): SGLang's
    `speculative_accept_threshold_single` and `…_acc` for chains. SGLang ignores q; without q (prompt lookup) this is its rule, with q
    strict acceptance is added. For sampling.
    """

    single: Share = 1.0
    accumulated: Share = 1.0
    modes: ClassVar[tuple[str, ...]] = ("sampling",)

    def chance(self, dists: Distributions) -> torch.Tensor:
        chance = (dists.px / max(self.accumulated, 1e-9)).clamp(max=1.0)  # SGLang's floor
        likely = (dists.px >= self.single) & (dists.px > 0)
        return torch.maximum(dists.strict, chance).masked_fill(likely, 1.0)


class Lenience(
    Pointwise,
    name="lenience",
    neutral={"lenience": 1.0},
    paper="2211.17192",
    ladder=("lenience", (0.8, 0.6, 0.4, 0.2)),
):
    """Apply strict acceptance with q scaled by l: no token becomes more than 1/l times as likely as under the target.

    a(x) = min(1, p(x)/(l·q(x))), r = norm((p − q)⁺); greedy: accept x iff p(x) > l·max p or x = argmax p (Leviathan et al.,
    A.5, huggingface.co/papers/2211.17192, where the inequality of the greedy form is misprinted).
    """

    lenience: PositiveShare

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return (-dists.gap).exp() > self.lenience

    def chance(self, dists: Distributions) -> torch.Tensor:
        return (dists.px / (self.lenience * dists.qx)).clamp(max=1.0)
