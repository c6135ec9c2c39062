"""Rules that judge each drafted token by the two laws at its place and nothing else: one formula each."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from ..round import Block
from ..validation import shown
from .base import AcceptanceRule


@dataclass(frozen=True)
class Laws:
    """The laws at some places, and the tokens there that are asked about.

    `tokens` (..., n) int64; None: the whole vocabulary, n = V.
    """

    scores: torch.Tensor  # (..., V) float32   target logits after the logits processors
    p: torch.Tensor  # (..., V) float32
    q: torch.Tensor | None  # (..., V) float32   None: the drafted tokens were certain (q = 1), or nobody kept q
    tokens: torch.Tensor | None = None

    @classmethod
    def of(cls, block: Block) -> "Laws":
        """Those of every drafted token: (B, γ) places with n = 1."""
        assert block.scores is not None, "the target has not seen this block yet"
        gamma, q = block.tokens.shape[1], block.q if block.q is not None else block.laws
        return cls(block.scores[:, :gamma], block.p[:, :gamma], q, block.tokens[..., None])

    def at(self, law: torch.Tensor) -> torch.Tensor:
        """What `law` (..., V) gives to the tokens, (..., n)."""
        return law if self.tokens is None else law.gather(-1, self.tokens)

    @cached_property
    def px(self) -> torch.Tensor:
        """p(x), (..., n)."""
        return self.at(self.p)

    @cached_property
    def qx(self) -> torch.Tensor:
        """q(x), (..., n)."""
        return torch.ones_like(self.px) if self.q is None else self.at(self.q)

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

    def keeps(self, laws: Laws) -> torch.Tensor:
        """The tokens that need no coin, (..., n) bool."""
        raise NotImplementedError(f"{type(self).__name__} needs a method keeps(laws), or chance(laws)")

    def chance(self, laws: Laws) -> torch.Tensor:
        """a(x), (..., n) in [0, 1]; NaN where q(x) = 0, which nobody drafts."""
        return laws.strict.masked_fill(self.keeps(laws), 1.0)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """r, not normalised, of laws (..., V) each, (..., V)."""
        return (p - q).clamp(min=0.0)

    def matches(self, block: Block) -> torch.Tensor:
        if block.tokens.shape[1] == 0:  # no token, and no q either
            return super().matches(block)
        return self.keeps(Laws.of(block)).squeeze(-1)

    def probability(self, block: Block) -> torch.Tensor:
        if block.tokens.shape[1] == 0:
            return super().probability(block)
        return self.chance(Laws.of(block)).squeeze(-1)

    def correction(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        if block.q is None:
            return super().correction(block, at)
        rows = torch.arange(at.shape[0], device=at.device)
        return self.residual(block.p[rows, at], block.q[rows, at])

    def output_law(self, scores: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """λ = q·a + (1 − Σ q·a)·r, the law of the token that one place emits under this rule, (..., V).

        As r is 0 wherever a < 1, strict acceptance of λ is this rule: min(1, λ/q) = a and (λ − q)⁺ ∝ r.
        """
        p = scores.softmax(dim=-1)
        accepted = (q * self.chance(Laws(scores, p, q))).nan_to_num()
        r = self.residual(p, q)
        total = r.sum(dim=-1, keepdim=True)
        r = torch.where(total > 0, r / total, p)
        return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0.0) * r


@dataclass(frozen=True)
class OwnRule(Pointwise):
    """A function of one's own as a rule: it says which drafted tokens pass, whatever strict acceptance says of them.

    `OwnRule(lambda laws: laws.px > 0.1 * laws.top)`: `function` gets the `Laws` of all drafted tokens of a round and gives
    (..., n) bool, as `laws.px` has them. a = 1 where it is true and min(1, p/q) elsewhere; r = norm((p − q)⁺). Greedy and sampling.
    Neutral: false everywhere. It has no JSON form; a rule with a name is `Pointwise` and a line in `RULES` (CONTRIBUTING.md).
    """

    function: Callable[[Laws], torch.Tensor]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"OwnRule.function: expected a function of Laws, got {shown(self.function)}")

    def keeps(self, laws: Laws) -> torch.Tensor:
        kept, shape = self.function(laws), laws.px.shape
        if not isinstance(kept, torch.Tensor) or kept.dtype != torch.bool:
            found = kept.dtype if isinstance(kept, torch.Tensor) else type(kept).__name__
            raise TypeError(f"OwnRule: the function must give a tensor of bool, it gave {found}")
        try:
            return kept.broadcast_to(shape)
        except RuntimeError:
            raise ValueError(
                f"OwnRule: the function must give a tensor of shape {list(shape)}, as laws.px, it gave {list(kept.shape)}"
            ) from None
