"""Rules that decide on each drafted token by a formula of the two distributions at its position."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ..round import Verified
from ..tensors import at_places, refuse_unfit
from .base import AcceptanceRule, Strict
from .distributions import Distributions, DraftedDistributions, answers


@dataclass(frozen=True)
class Pointwise(AcceptanceRule):
    """The base of rules with a formula. Greedy: accept where `keeps`. Sampling: a = `chance`, r = norm(`residual`).

    By default a is 1 where `keeps` and min(1, p/q) elsewhere, and r = norm((p − q)⁺).
    """

    scope: ClassVar[str] = "position"

    def keeps(self, dists: Distributions) -> torch.Tensor:
        """Return the tokens that are accepted without a coin, (..., n) bool."""
        raise NotImplementedError(f"{type(self).__name__} needs keeps(dists), or chance(dists) and modes for sampling")

    def chance(self, dists: Distributions) -> torch.Tensor:
        """Return a(x), (..., n) in [0, 1]; NaN where q(x) = 0, which is never drafted."""
        return dists.strict.masked_fill(self._fit(dists, self.keeps(dists), torch.bool, "keeps"), 1.0)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return r of distributions (..., V), not normalised, (..., V)."""
        return (p - q).clamp_(min=0.0)

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        # On the CPU, skip tokens that are not sent or that strict acceptance takes.
        formula = "probability" if verified.sampling else "matches"
        if getattr(type(self), formula) is not getattr(Pointwise, formula):
            return super().accepts(verified, coins)
        answer = partial(self._accepts_at, coins)
        if not self.accepts_all_strict:
            return answers(answer, verified, verified.is_sent)
        strict = Strict().accepts(verified, coins)
        return strict | answers(answer, verified, ~strict & verified.is_sent)

    def _accepts_at(self, coins: torch.Tensor | None, dists: DraftedDistributions) -> torch.Tensor:
        """Return which tokens of `dists` the formula accepts, (..., 1) bool."""
        if not dists.verified.sampling:
            return self._fit(dists, self.keeps(dists), torch.bool, "keeps")
        assert coins is not None
        return dists.pick(coins) < self._fit(dists, self.chance(dists), dists.logits.dtype, "chance")

    def _fit(self, dists: Distributions, answer: object, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a formula's `answer` about the tokens, (..., n). One value for each position, (..., 1), counts for all its tokens."""
        shape = (dists.logits if dists.tokens is None else dists.tokens).shape
        if isinstance(answer, torch.Tensor) and answer.shape == (*shape[:-1], 1):
            answer = answer.expand(shape)
        return refuse_unfit(answer, shape, dtype, self, name)

    def matches(self, verified: Verified) -> torch.Tensor:
        if verified.draft.gamma == 0:  # there are no tokens and no q
            return super().matches(verified)
        return self.keeps(Distributions.of(verified)).squeeze(-1)

    def probability(self, verified: Verified) -> torch.Tensor:
        if verified.draft.gamma == 0:
            return super().probability(verified)
        return self.chance(Distributions.of(verified)).squeeze(-1)

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        if verified.q is None:
            return super().correction(verified, at)
        return self.residual(verified.p_at(at), at_places(verified.q, at))

    def output_distribution(self, logits: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Return λ = q·a + (1 − Σ q·a)·r, the distribution of the token that one position emits under this rule, (..., V).

        Since r is 0 wherever a < 1, strict acceptance of λ is this rule: min(1, λ/q) = a and (λ − q)⁺ ∝ r.
        """
        dists = Distributions(logits, q)
        accepted = (q * self._fit(dists, self.chance(dists), dists.p.dtype, "chance")).nan_to_num()
        r = refuse_unfit(self.residual(dists.p, q), q.shape, q.dtype, self, "residual")
        total = r.sum(dim=-1, keepdim=True)
        r = torch.where(total > 0, r / total, dists.p)
        return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0.0) * r


@dataclass(frozen=True)
class OwnRule(Pointwise):
    """Accept the drafted tokens that a function selects, in addition to strict acceptance.

    `OwnRule(lambda dists: dists.px > 0.1 * dists.top)`: `function` gets the `Distributions` of all drafted tokens of a round and returns
    bool of the shape of `dists.px`. a = 1 where it is True, min(1, p/q) elsewhere; r = norm((p − q)⁺). Neutral: False everywhere. It has
    no JSON form; for a name, write a subclass of `Pointwise` with the class keyword `name`.
    """

    function: Callable[[Distributions], torch.Tensor]
    scope: ClassVar[str] = "prefix"

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return AcceptanceRule.accepts(self, verified, coins)  # calls the function with all drafted tokens at once

    def keeps(self, dists: Distributions) -> torch.Tensor:
        return self._fit(dists, self.function(dists), torch.bool, "function")
