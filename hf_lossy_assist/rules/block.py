"""Rules that decide on a draft's tokens jointly, and one that ignores them."""

import math
from typing import ClassVar

import torch

from ..registry.frozen import Amount, Count, Several, Share
from ..round import Verified
from ..tensors import in_parts, largest
from .base import AcceptanceRule, Strict, above_draft, ratios
from .distributions import Distributions, answers


class BlockVerification(AcceptanceRule, name="block_verification", paper="2403.10444"):
    """Accept whole blocks losslessly: at least as many tokens in expectation as token-by-token acceptance.

    With w₀ = 1, wᵢ = min(1, wᵢ₋₁·p(xᵢ)/q(xᵢ)): accept the longest i whose coin is below hᵢ = Sᵢ/(Sᵢ + 1 − wᵢ), Sᵢ = Σ (wᵢ·p − q)⁺
    after xᵢ, and h = w for the last drafted token; r = norm((wᵢ·p − q)⁺) (Sun et al., Algorithm 2,
    huggingface.co/papers/2403.10444). P(at least i accepted | x₁ … xᵢ) = wᵢ is at least strict acceptance's; a single outcome may still
    be shorter, since a later token's coin decides for earlier ones. Greedy: strict.
    """

    lossless: ClassVar[bool] = True
    nestable: ClassVar[bool] = False  # its correction depends on its decisions
    accepts_all_strict: ClassVar[bool] = False

    def weights(self, verified: Verified) -> torch.Tensor:
        """Return w before the first and after each drafted token, (B, γ + 1)."""
        ratio = ratios(verified)
        out = [ratio.new_ones(ratio.shape[0])]
        for column in ratio.unbind(dim=1):
            out.append((out[-1] * column).clamp(max=1.0))
        return torch.stack(out, dim=1)

    def probability(self, verified: Verified) -> torch.Tensor:
        """Return h of each drafted token, whose coin accepts the prefix that ends with it, (B, γ)."""
        w, gamma = self.weights(verified)[:, 1:], verified.draft.gamma
        if gamma == 0:
            return w
        if verified.q is None:
            rest = w[:, :-1] * (1 - verified.p_at_tokens[:, 1:])  # q = 1 on the next token, where w·p − 1 ≤ 0
        else:
            rest = in_parts(_above, verified.logits[:, 1:gamma], verified.q[:, 1:], w[:, :-1])
        # 0/0: the distributions agree and w = 1, so nothing after it can be rejected. After an impossible token p may be undefined.
        inner = (rest / (rest + 1 - w[:, :-1])).nan_to_num(1.0).masked_fill(~(w[:, :-1] > 0), 0.0)
        h = torch.cat([inner, w[:, -1:]], dim=1)
        last = torch.arange(gamma, device=w.device) == verified.sent[:, None] - 1
        return torch.where(last, w, h)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        if not verified.sampling:
            return self.matches(verified)
        passed = super().accepts(verified, coins) & verified.is_sent
        return passed.flip(1).cummax(dim=1).values.flip(1)  # the prefix up to the last one that passed

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        return above_draft(self.weights(verified).gather(1, at[:, None]) * verified.p_at(at), verified, at)


def _above(logits: torch.Tensor, q: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return Σ (w·p − q)⁺, (B, n, V) each and (B, n) → (B, n)."""
    return logits.softmax(dim=-1).mul_(w[..., None]).sub_(q).clamp_(min=0.0).sum(dim=-1)


class FLy(
    AcceptanceRule, name="fly", neutral={"entropy": math.inf}, paper="2511.22972", ladder=("entropy", (0.9, 0.6, 0.3))
):
    """Keep a rejected token where the target is uncertain and strict acceptance takes the next W drafted tokens.

    Accept xᵢ where strict acceptance does, or where p(xᵢ) > 0, the entropy −Σ p·ln p over the `top_k` most likely tokens (not
    renormalised) is at least `entropy`, and xᵢ₊₁ … xᵢ₊W are in the draft and accepted strictly; r = norm((p − q)⁺) (Li et al.,
    huggingface.co/papers/2511.22972; vLLM's `rejection_sample_method="fly"` with 0.3, 3 and W = 6). Greedy and sampling.
    Neutral: entropy = ∞.
    """

    window: Count = 6
    entropy: Amount = 0.3
    top_k: Several = 3

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        gamma = verified.draft.gamma
        window = min(self.window, gamma)  # a longer window never fits into the draft
        strict = Strict().accepts(verified, coins)
        sent = (strict & verified.is_sent).long()
        taken = torch.nn.functional.pad(sent.cumsum(dim=1), (1, window))  # accepted strictly among the first i
        taken[:, gamma + 1 :] = -1  # the last W tokens have no full window
        next_taken = taken[:, 1 + window : 1 + window + gamma] - taken[:, 1 : 1 + gamma]  # among the next W
        return strict | answers(self.uncertain, verified, ~strict & verified.is_sent & (next_taken == window))

    def uncertain(self, dists: Distributions) -> torch.Tensor:
        """Return where the target is uncertain and the token possible, (..., n) bool."""
        entropy = torch.special.entr(largest(dists.p, self.top_k)).sum(dim=-1, keepdim=True)
        return (entropy >= self.entropy) & (dists.px > 0)


class SyntheticForBenchmarks(
    AcceptanceRule, name="synthetic_for_benchmarks", neutral={"rate": None}, paper="vLLM, SGLang"
):
    """Accept each drafted token with a fixed probability, for benchmarks only: to time a given acceptance rate.

    a(x) = `rate`, r = p, so the distribution is rate·q + (1 − rate)·p; greedy: the same coins and the target's argmax (vLLM's and
    SGLang's synthetic acceptance). The text is meaningless, and less may be accepted than by strict acceptance. Neutral: rate = None.
    """

    rate: Share | None = None
    scope: ClassVar[str] = "position"
    accepts_all_strict: ClassVar[bool] = False
    nestable: ClassVar[bool] = False

    @property
    def needs_coins(self) -> bool:  # type: ignore[override]
        return self.rate is not None

    def probability(self, verified: Verified) -> torch.Tensor:
        strict = super().probability(verified)
        return strict if self.rate is None else torch.full_like(strict, self.rate)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        if self.rate is None or verified.sampling:
            return super().accepts(verified, coins)
        assert coins is not None, "needs_coins"
        return coins < self.rate

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        if self.rate is None:
            return super().correction(verified, at)
        return verified.p_at(at)
