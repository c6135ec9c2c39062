"""Rules that judge each drafted token by the two distributions at its place and nothing else: one formula each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..round import Verified, once
from ..validation import shown
from .base import AcceptanceRule


@dataclass(frozen=True)
class Distributions:
    """The distributions at some places, and the tokens there that are asked about.

    `tokens` (..., n) int64; None: the whole vocabulary, n = V.
    """

    logits: torch.Tensor  # (..., V) float32   target logits after the logits processors
    p: torch.Tensor  # (..., V) float32
    q: torch.Tensor | None  # (..., V) float32   None: the drafted tokens were certain (q = 1), or nobody kept q
    tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, verified: Verified) -> "Distributions":
        """Those of every drafted token: (B, γ) places with n = 1."""
        gamma = verified.draft.gamma
        return cls(verified.logits[:, :gamma], verified.p[:, :gamma], verified.q, verified.tokens[..., None])

    def at(self, values: torch.Tensor) -> torch.Tensor:
        """What `values` (..., V) holds for the tokens, (..., n)."""
        return values if self.tokens is None else values.gather(-1, self.tokens)

    @once
    def px(self) -> torch.Tensor:
        """p(x), (..., n)."""
        return self.at(self.p)

    @once
    def qx(self) -> torch.Tensor:
        """q(x), (..., n)."""
        return torch.ones_like(self.px) if self.q is None else self.at(self.q)

    @property
    def draft_probs(self) -> torch.Tensor:
        """`q`, for rules that read it over the whole vocabulary. Raises: `ValueError` where nobody kept it."""
        if self.q is None:
            raise ValueError(
                "this rule reads the draft's distributions, and nobody kept them: give it needs_draft_probs = True"
            )
        return self.q

    @property
    def strict(self) -> torch.Tensor:
        """min(1, p/q), (..., n)."""
        return (self.px / self.qx).clamp(max=1.0)

    @property
    def top(self) -> torch.Tensor:
        """max p, (..., 1)."""
        return self.p.amax(dim=-1, keepdim=True)

    @property
    def entropy(self) -> torch.Tensor:
        """H(p) in nats, (..., 1)."""
        return torch.special.entr(self.p).sum(dim=-1, keepdim=True)


@dataclass(frozen=True)
class Pointwise(AcceptanceRule):
    """The base of rules of one formula. Greedy: accept where `keeps`. Sampling: a = `chance`, r = norm(`residual`).

    By default a is 1 where `keeps` and min(1, p/q) elsewhere, and r = norm((p − q)⁺).
    """

    lossless: ClassVar[bool] = False

    def keeps(self, dists: Distributions) -> torch.Tensor:
        """The tokens that need no coin, (..., n) bool."""
        if type(self).chance is not Pointwise.chance:
            raise NotImplementedError(
                f"{type(self).__name__} has chance(dists) alone, and greedy decoding tosses no coins: give it keeps(dists) as well, or "
                'modes = ("sampling",)'
            )
        raise NotImplementedError(f"{type(self).__name__} needs a method keeps(dists), or chance(dists)")

    def chance(self, dists: Distributions) -> torch.Tensor:
        """a(x), (..., n) in [0, 1]; NaN where q(x) = 0, which nobody drafts."""
        return dists.strict.masked_fill(self.keeps(dists), 1.0)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """r, not normalised, of distributions (..., V) each, (..., V)."""
        return (p - q).clamp(min=0.0)

    def matches(self, verified: Verified) -> torch.Tensor:
        if verified.draft.gamma == 0:  # no token, and no q either
            return super().matches(verified)
        return self.keeps(Distributions.of(verified)).squeeze(-1)

    def probability(self, verified: Verified) -> torch.Tensor:
        if verified.draft.gamma == 0:
            return super().probability(verified)
        return self.chance(Distributions.of(verified)).squeeze(-1)

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        if verified.q is None:
            return super().correction(verified, at)
        rows = torch.arange(at.shape[0], device=at.device)
        return self.residual(verified.p[rows, at], verified.q[rows, at])

    def output_distribution(self, logits: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """λ = q·a + (1 − Σ q·a)·r, the distribution of the token that one place emits under this rule, (..., V).

        As r is 0 wherever a < 1, strict acceptance of λ is this rule: min(1, λ/q) = a and (λ − q)⁺ ∝ r.
        """
        p = logits.softmax(dim=-1)
        accepted = (q * self.chance(Distributions(logits, p, q))).nan_to_num()
        r = self.residual(p, q)
        total = r.sum(dim=-1, keepdim=True)
        r = torch.where(total > 0, r / total, p)
        return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0.0) * r


@dataclass(frozen=True)
class OwnRule(Pointwise):
    """A function of one's own as a rule: it names the drafted tokens to accept, whether or not strict acceptance accepts them.

    `OwnRule(lambda dists: dists.px > 0.1 * dists.top)`: `function` gets the `Distributions` of all drafted tokens of a round and gives
    (..., n) bool, as `dists.px` has them. a = 1 where it is true and min(1, p/q) elsewhere; r = norm((p − q)⁺). Greedy and sampling.
    Neutral: false everywhere. It has no JSON form; `register_rule` gives a subclass of `Pointwise` a name.
    """

    function: Callable[[Distributions], torch.Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"OwnRule.function: expected a function of Distributions, got {shown(self.function)}")

    def keeps(self, dists: Distributions) -> torch.Tensor:
        kept, shape = self.function(dists), dists.px.shape
        if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool:
            found = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
            raise TypeError(f"OwnRule: the function must give a tensor of bool, it gave {found}")
        try:
            return kept.broadcast_to(shape)
        except RuntimeError:
            raise ValueError(
                f"OwnRule: the function must give a tensor of shape {list(shape)}, as dists.px, it gave {list(kept.shape)}"
            ) from None
