"""Rules that sample exactly from a mixture of p and q."""

import math
from functools import partial
from typing import ClassVar, Literal

import torch

from ..registry.frozen import Number, Share
from ..round import Verified
from ..tensors import argmax, at_places, in_parts, looks_are_free, passing
from .base import Strict
from .distributions import Distributions, answers
from .pointwise import Pointwise


class Ensemble(
    Pointwise, name="ensemble", neutral={"weight": 1.0}, paper="2604.07622", ladder=("weight", (0.9, 0.75, 0.5))
):
    """Decode from the weighted average of both models, w·p + (1 − w)·q, at every drafted position.

    a(x) = min(1, 1 − w + w·p/q), r = norm((p − q)⁺); greedy: the argmax of the average (DIVERSED's static form,
    huggingface.co/papers/2604.07622; Transformers' `assistant_ensemble_weight`). The token after a fully accepted draft is drawn from p.
    Needs q. Neutral: w = 1.
    """

    weight: Share
    needs_draft_probs: ClassVar[bool] = True

    def chance(self, dists: Distributions) -> torch.Tensor:
        return (1 - self.weight + self.weight * (dists.px / dists.qx)).clamp(max=1.0)

    def keeps(self, dists: Distributions) -> torch.Tensor:
        if self.weight == 1:  # the target's argmax, which strict acceptance covers, ties included
            return torch.zeros_like(dists.ids, dtype=torch.bool)
        return dists.ids == self._best(dists.p, dists.draft_probs)

    def choice(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        if self.weight == 1:
            return super().choice(verified, at)
        q = Distributions.of(verified).draft_probs
        return in_parts(self._best_at, verified.logits, q, at)

    def _best_at(self, logits: torch.Tensor, q: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the argmax of the mixture at position `at` (B,) of each row, (B,)."""
        return self._best(at_places(logits, at).softmax(dim=-1), at_places(q, at)).squeeze(-1)

    def _best(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return the argmax of the mixture, (..., V) each → (..., 1)."""
        return argmax(torch.lerp(q.to(p.dtype), p, self.weight))[..., None]


ROUNDING = 1e-3  # generous bound for log max p − log p(x): tokens this close to the bar are compared as probabilities


class Cascade(
    Pointwise,
    name="cascade",
    neutral={"alpha": -math.inf},
    paper="2405.19261",
    ladder=("alpha", (-0.2, 0.0, 0.2, 0.5)),
):
    """Follow the draft where it is about as confident as the target, and defer to the target elsewhere: speculative cascades.

    Samples exactly from π: a(x) = min(1, π/q), r = norm((π − q)⁺), with π = q where the draft is followed and π = p elsewhere. It is followed
    (Narasimhan et al., huggingface.co/papers/2405.19261, Table 1 and §4.3)

    - `form="opt"`: where max q ≥ max p − α·d_TV(p, q);
    - `form="chow"`: where max q ≥ 1 − α; `form="diff"`: where max q ≥ max p − α;
    - `form="token"` (TokenV3): for the tokens T = {v: p(v) ≥ (1 − α)·max p} only, π = q·1_T + q(not in T)·p.

    Greedy: x is accepted where the draft is followed. The paper compares unprocessed distributions; here p and q are processed. The token
    form is not combined with strict acceptance, since its distribution would then differ from π. Needs q. Neutral: α = −∞.
    """

    alpha: Number
    form: Literal["opt", "chow", "diff", "token"] = "opt"
    needs_draft_probs: ClassVar[bool] = True
    scope: ClassVar[str] = "position"

    @property
    def accepts_all_strict(self) -> bool:  # type: ignore[override]
        return self.form != "token"

    def keeps(self, dists: Distributions) -> torch.Tensor:
        if self.form == "token":
            return (-dists.gap).exp() >= 1 - self.alpha
        return dists.for_tokens(self._follows(dists.p, dists.draft_probs))

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        if self.form != "token":
            return super().accepts(verified, coins)
        if not verified.sampling:  # deferring to the target gives the same token
            return super().accepts(verified, coins) | Strict().accepts(verified, coins)
        if verified.draft.gamma == 0 or not looks_are_free(verified.tokens):
            return super().accepts(verified, coins)
        # In T, π ≥ q and a = 1; outside, a ≤ p/q. Few tokens remain that need sums over the vocabulary.
        gap = Distributions.of(verified).gap.squeeze(-1)
        bar = -math.log1p(-self.alpha) if self.alpha < 1 else math.inf
        sure = verified.is_sent & (gap < bar - ROUNDING)
        open_ = verified.is_sent & ~sure & (Strict().accepts(verified, coins) | (gap <= bar + ROUNDING))
        return sure | answers(partial(self._accepts_at, coins), verified, open_)

    def chance(self, dists: Distributions) -> torch.Tensor:
        if self.form != "token":
            return super().chance(dists)
        p, q = dists.p, dists.draft_probs
        inside = self._inside(p)
        followed = dists.at(inside) * dists.qx + (1 - (inside * q).sum(dim=-1, keepdim=True)) * dists.px
        return (followed / dists.qx).clamp(max=1.0)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.form != "token":  # π is q or p
            return (p - q).clamp_(min=0.0).mul_(~self._follows(p, q))
        followed = self._inside(p) * q
        return (followed + (1 - followed.sum(dim=-1, keepdim=True)) * p).sub_(q).clamp_(min=0.0)

    def _follows(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return where the draft is followed, (..., 1) bool; False where p = q and −∞·0 is NaN, which does not matter there."""
        sure = q.amax(dim=-1, keepdim=True)
        if self.form == "chow":
            return sure >= 1 - self.alpha
        slack = torch.ones_like(sure) if self.form == "diff" else (p - q).abs_().sum(dim=-1, keepdim=True) / 2
        return sure >= p.amax(dim=-1, keepdim=True) - self.alpha * slack

    def _inside(self, p: torch.Tensor) -> torch.Tensor:
        """Return 1_T, (..., V)."""
        return passing(torch.ge, p, (1 - self.alpha) * p.amax(dim=-1, keepdim=True))
