"""Lossy rules that lose beside others (docs/policies.md), added as a user adds a rule, one formula of p and q each.

`stateful_rules.py` has those with state. Importing a module registers its names. On the command line:

    python examples/reproduce/lossy_rules.py compare --policies strict,fly,cascade:alpha=0.5 …   # hf-lossy with these names
"""

import math
from typing import ClassVar, Literal

import torch

import hf_lossy_assist as hla


class Ensemble(
    hla.Pointwise, name="ensemble", neutral={"weight": 1.0}, paper="2604.07622", ladder=("weight", (0.9, 0.75, 0.5))
):
    """Decode from the weighted average of both models, w·p + (1 − w)·q, at every drafted position.

    a(x) = min(1, 1 − w + w·p/q), r = norm((p − q)⁺); greedy: the argmax of the average (DIVERSED's static form,
    huggingface.co/papers/2604.07622; Transformers' `assistant_ensemble_weight`). The token after a fully accepted draft
    is drawn from p. Needs q. Neutral: w = 1.
    """

    weight: float
    needs_draft_probs: ClassVar[bool] = True

    def chance(self, dists: hla.Distributions) -> torch.Tensor:
        return (1 - self.weight + self.weight * (dists.px / dists.qx)).clamp(max=1.0)

    def keeps(self, dists):
        if self.weight == 1:  # the target's argmax, which strict acceptance covers, ties included
            return torch.zeros_like(dists.tokens, dtype=torch.bool)
        return dists.tokens == self._best(dists.p, dists.draft_probs)[..., None]

    def choice(self, verified, at):
        if self.weight == 1:
            return super().choice(verified, at)
        return self._best(verified.p_at(at), verified.q[torch.arange(len(at), device=at.device), at])

    def _best(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the argmax of the mixture, (..., V) each → (...)."""
        return torch.lerp(q.to(p.dtype), p, self.weight).argmax(dim=-1)


class Cascade(
    hla.Pointwise,
    name="cascade",
    neutral={"alpha": -math.inf},
    paper="2405.19261",
    ladder=("alpha", (-0.2, 0.0, 0.2, 0.5)),
):
    """Follow the draft where it is about as confident as the target, and defer to the target elsewhere: speculative cascades.

    Samples exactly from π: a(x) = min(1, π/q), r = norm((π − q)⁺), with π = q where the draft is followed and π = p
    elsewhere. It is followed (Narasimhan et al., huggingface.co/papers/2405.19261, Table 1 and §4.3)

    - `form="opt"`: where max q ≥ max p − α·d_TV(p, q);
    - `form="chow"`: where max q ≥ 1 − α; `form="diff"`: where max q ≥ max p − α;
    - `form="token"` (TokenV3): for the tokens T = {v: p(v) ≥ (1 − α)·max p} only, π = q·1_T + q(not in T)·p.

    Greedy: x is accepted where the draft is followed. The paper compares unprocessed distributions; here p and q are
    processed. The token form is not combined with strict acceptance, since its distribution would then differ from π.
    Needs q. Neutral: α = −∞.
    """

    alpha: float
    form: Literal["opt", "chow", "diff", "token"] = "opt"
    needs_draft_probs: ClassVar[bool] = True
    scope: ClassVar[str] = "position"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "accepts_all_strict", self.form != "token")

    def keeps(self, dists: hla.Distributions) -> torch.Tensor:
        if self.form == "token":
            return (-dists.gap).exp() >= 1 - self.alpha
        return self._follows(dists.p, dists.draft_probs)

    def accepts(self, verified: hla.Verified, coins: torch.Tensor | None) -> torch.Tensor:
        accepted = super().accepts(verified, coins)
        if self.form == "token" and not verified.sampling:  # deferring to the target gives the same token
            return accepted | hla.Strict().accepts(verified, coins)
        return accepted

    def chance(self, dists: hla.Distributions) -> torch.Tensor:
        if self.form != "token":
            return super().chance(dists)
        p, q = dists.p, dists.draft_probs
        inside = self._inside(p)
        followed = dists.at(inside) * dists.qx + (1 - (inside * q).sum(dim=-1, keepdim=True)) * dists.px
        return (followed / dists.qx).clamp(max=1.0)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.form != "token":  # π is q or p
            return (p - q).clamp(min=0.0) * ~self._follows(p, q)
        followed = self._inside(p) * q
        return (followed + (1 - followed.sum(dim=-1, keepdim=True)) * p - q).clamp(min=0.0)

    def _follows(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return where the draft is followed, (..., 1) bool; False where p = q and −∞·0 is NaN, which does not matter there."""
        sure = q.amax(dim=-1, keepdim=True)
        if self.form == "chow":
            return sure >= 1 - self.alpha
        slack = torch.ones_like(sure) if self.form == "diff" else (p - q).abs().sum(dim=-1, keepdim=True) / 2
        return sure >= p.amax(dim=-1, keepdim=True) - self.alpha * slack

    def _inside(self, p: torch.Tensor) -> torch.Tensor:
        """Return 1_T, (..., V)."""
        return (p >= (1 - self.alpha) * p.amax(dim=-1, keepdim=True)).to(p.dtype)


class KLJudge(
    hla.Pointwise,
    name="kl_judge",
    neutral={"threshold": 0.0},
    paper="2601.04766",
    ladder=("threshold", (0.05, 0.1, 0.2, 0.5)),
):
    """Accept any drafted token where the two distributions are close and the target is not confident: a judge without training.

    a(x) = 1 where KL(p‖q) < `threshold` and max p ≤ `confident`, else strict; greedy: the same positions;
    r = norm((p − q)⁺) (Sun et al., JuDi, huggingface.co/papers/2601.04766; 0.9 is the authors'). p and q are processed:
    where top-k or top-p remove a token from q that they keep in p, KL is infinite. Needs q. Neutral: threshold 0.
    """

    threshold: float
    confident: float = 0.9
    needs_draft_probs: ClassVar[bool] = True

    def keeps(self, dists: hla.Distributions) -> torch.Tensor:
        return (find_kl(dists) < self.threshold) & (dists.top <= self.confident)


def find_kl(dists: hla.Distributions) -> torch.Tensor:
    """Return KL(p‖q) in nats, (..., 1), clamped at 0 against rounding."""
    below = dists.logits - dists.logits.amax(dim=-1, keepdim=True)  # log p + log Σ e^(z − max z), where Σ = 1 / max p
    # 0 · (−∞ − …) and 0 · log 0 count as 0; −p · log 0 = ∞ remains.
    terms = ((below - dists.draft_probs.log()) * dists.p).nan_to_num(nan=0.0, posinf=math.inf)
    return (terms.sum(dim=-1, keepdim=True) + dists.top.log()).clamp(min=0.0)


class MARS(
    hla.Pointwise,
    name="mars",
    neutral={"threshold": 1.0},
    paper="2601.15498",
    ladder=("threshold", (0.95, 0.9, 0.8, 0.7)),
):
    """Accept the target's second choice where its logit is close to that of the first.

    a(x) = 1 where x is the second choice and z₂/z₁ > `threshold`, z₁ ≥ z₂ the target's two largest processed logits,
    else strict; greedy: the same; r = norm((p − q)⁺) (MARS, huggingface.co/papers/2601.15498; 0.9 is the authors').
    The ratio is not invariant to a constant added to all logits: where z₁ ≤ 0, as after logit normalisation, the rule
    accepts nothing. Neutral: threshold 1.
    """

    threshold: float = 0.9

    def keeps(self, dists: hla.Distributions) -> torch.Tensor:
        first, second = dists.logits.topk(2, dim=-1).values.split(1, dim=-1)  # (..., 1) each
        close = (first > 0) & (second > self.threshold * first)
        return close & (dists.at(dists.logits) >= second)


class FLy(
    hla.AcceptanceRule,
    name="fly",
    neutral={"entropy": math.inf},
    paper="2511.22972",
    ladder=("entropy", (0.9, 0.6, 0.3)),
):
    """Keep a rejected token where the target is uncertain and strict acceptance takes the next W drafted tokens.

    Accept xᵢ where strict acceptance does, or where p(xᵢ) > 0, the entropy −Σ p·ln p over the `top_k` most likely tokens
    (not renormalised) is at least `entropy`, and xᵢ₊₁ … xᵢ₊W are in the draft and accepted strictly; r = norm((p − q)⁺)
    (Li et al., huggingface.co/papers/2511.22972; vLLM's `rejection_sample_method="fly"` with 0.3, 3 and W = 6). Greedy
    and sampling. Neutral: entropy = ∞.
    """

    window: int = 6
    entropy: float = 0.3
    top_k: int = 3

    def accepts(self, verified: hla.Verified, coins: torch.Tensor | None) -> torch.Tensor:
        gamma = verified.draft.gamma
        window = min(self.window, gamma)  # a longer window never fits into the draft
        strict = hla.Strict().accepts(verified, coins)
        sent = (strict & verified.is_sent).long()
        taken = torch.nn.functional.pad(sent.cumsum(dim=1), (1, window))  # accepted strictly among the first i
        taken[:, gamma + 1 :] = -1  # the last W tokens have no full window
        next_taken = taken[:, 1 + window : 1 + window + gamma] - taken[:, 1 : 1 + gamma]  # among the next W
        return strict | (verified.is_sent & (next_taken == window) & self.is_uncertain(verified))

    def is_uncertain(self, verified: hla.Verified) -> torch.Tensor:
        """Return where the target is uncertain and the token possible, (B, γ) bool."""
        p = verified.p[:, : verified.draft.gamma]
        entropy = torch.special.entr(p.topk(min(self.top_k, p.shape[-1]), dim=-1).values).sum(dim=-1)
        return (entropy >= self.entropy) & (verified.p_at_tokens > 0)


class SyntheticForBenchmarks(
    hla.AcceptanceRule, name="synthetic_for_benchmarks", neutral={"rate": None}, paper="vLLM, SGLang"
):
    """Accept each drafted token with a fixed probability, for benchmarks only: to time a given acceptance rate.

    a(x) = `rate`, r = p, so the distribution is rate·q + (1 − rate)·p; greedy: the same coins and the target's argmax
    (vLLM's and SGLang's synthetic acceptance). The text is meaningless, and less may be accepted than by strict
    acceptance. Neutral: rate = None.
    """

    rate: float | None = None
    scope: ClassVar[str] = "position"
    accepts_all_strict: ClassVar[bool] = False
    nestable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "needs_coins", self.rate is not None)

    def probability(self, verified: hla.Verified) -> torch.Tensor:
        strict = super().probability(verified)
        return strict if self.rate is None else torch.full_like(strict, self.rate)

    def accepts(self, verified, coins):
        if self.rate is None or verified.sampling:
            return super().accepts(verified, coins)
        return coins < self.rate

    def correction(self, verified: hla.Verified, at: torch.Tensor) -> torch.Tensor:
        return super().correction(verified, at) if self.rate is None else verified.p_at(at)


if __name__ == "__main__":
    from hf_lossy_assist.cli import main

    main()
