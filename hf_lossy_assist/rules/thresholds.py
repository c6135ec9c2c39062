"""Rules that compare p(x) with a threshold, fixed or lowered where the target is uncertain."""

import math
from typing import ClassVar

import torch

from ..registry.frozen import Amount, PositiveShare, Share
from .distributions import Distributions
from .pointwise import Pointwise


class Typical(
    Pointwise,
    name="typical",
    neutral={"epsilon": 1.0, "delta": math.inf},
    paper="2401.10774",
    ladder=("epsilon", (0.5, 0.3, 0.15, 0.09)),
):
    """Accept a drafted token whose probability exceeds a threshold that is lower where the target is uncertain.

    a(x) = 1 where p(x) > min(ε, δ·e^(−H(p))), else strict; greedy: the same set; r = norm((p − q)⁺) (Cai et al., Medusa, §2.3.1,
    huggingface.co/papers/2401.10774; ε = 0.09 and δ = 0.3 are the values in its code). Neutral: ε = 1, δ = ∞.
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
    Neutral: α = 0, threshold 1.
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
    strict acceptance is added. For sampling. Neutral: 1 and 1.
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
    A.5, huggingface.co/papers/2211.17192, where the inequality of the greedy form is misprinted). Neutral: l = 1.
    """

    lenience: PositiveShare

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return (-dists.gap).exp() > self.lenience

    def chance(self, dists: Distributions) -> torch.Tensor:
        return (dists.px / (self.lenience * dists.qx)).clamp(max=1.0)


def kl(dists: Distributions) -> torch.Tensor:
    """Return KL(p‖q) in nats, (..., 1), clamped at 0 against rounding."""
    below = dists.logits - dists.logits.amax(dim=-1, keepdim=True)  # log p + log Σ e^(z − max z), where Σ = 1 / max p
    # 0 · (−∞ − …) and 0 · log 0 count as 0; −p · log 0 = ∞ remains.
    terms = (below - dists.draft_probs.log()).mul_(dists.p).nan_to_num_(nan=0.0, posinf=math.inf)
    return (terms.sum(dim=-1, keepdim=True) + dists.top.log()).clamp(min=0.0)


class KLJudge(
    Pointwise,
    name="kl_judge",
    neutral={"threshold": 0.0},
    paper="2601.04766",
    ladder=("threshold", (0.05, 0.1, 0.2, 0.5)),
):
    """Accept any drafted token where the two distributions are close and the target is not confident: a judge without training.

    a(x) = 1 where KL(p‖q) < `threshold` and max p ≤ `confident`, else strict; greedy: the same positions; r = norm((p − q)⁺)
    (Sun et al., JuDi, huggingface.co/papers/2601.04766; 0.9 is the authors'). p and q are processed: where top-k or top-p remove a token
    from q that they keep in p, KL is infinite. Needs q. Neutral: threshold 0.
    """

    threshold: Amount
    confident: Share = 0.9
    needs_draft_probs: ClassVar[bool] = True

    def keeps(self, dists: Distributions) -> torch.Tensor:
        close = kl(dists) < self.threshold
        return dists.for_tokens(close & (dists.top <= self.confident))
