"""The distributions p and q at positions of a round, computed lazily, for rules that are formulas of them."""

from collections.abc import Callable

import torch

from ..round import Verified, lazy_property
from ..tensors import looks_are_free, rows_at_once


class Distributions:
    """The distributions at some positions, and tokens there. Each value is computed when first read.

    Args:
        logits (..., V) float32: the target's, after the logits processors.
        q (..., V) float32: the draft's. None: the drafted tokens were certain (q = 1), or q was not recorded.
        tokens (..., n) int64; None: the whole vocabulary, n = V.
    """

    logits: torch.Tensor
    q: torch.Tensor | None

    def __init__(self, logits: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor | None = None):
        self.logits, self.q, self.tokens = logits, q, tokens

    @staticmethod
    def of(verified: Verified, slots: torch.Tensor | None = None) -> "DraftedDistributions":
        """Return those of the drafted tokens, n = 1: of all, (B, γ), or at `slots` (m,) int64, indices from 0 to B·γ − 1."""
        return DraftedDistributions(verified, slots)

    def at(self, values: torch.Tensor) -> torch.Tensor:
        """Gather `values` (..., V) at the tokens, (..., n)."""
        return values if self.tokens is None else values.gather(-1, self.tokens)

    @lazy_property
    def p(self) -> torch.Tensor:
        """The target's distributions, (..., V) float32."""
        return self.logits.softmax(dim=-1)

    @lazy_property
    def px(self) -> torch.Tensor:
        """p(x), (..., n)."""
        return self.at(self.p)

    @lazy_property
    def qx(self) -> torch.Tensor:
        """q(x), (..., n)."""
        return torch.ones_like(self.px) if self.q is None else self.at(self.q)

    @property
    def draft_probs(self) -> torch.Tensor:
        """`q`, for rules that read the whole vocabulary."""
        assert self.q is not None, "a rule that reads the draft's distributions has needs_draft_probs = True"
        return self.q

    @property
    def strict(self) -> torch.Tensor:
        """min(1, p/q), (..., n)."""
        return (self.px / self.qx).clamp(max=1.0)

    @lazy_property
    def top(self) -> torch.Tensor:
        """max p, (..., 1)."""
        return self.p.amax(dim=-1, keepdim=True)

    @lazy_property
    def gap(self) -> torch.Tensor:
        """log max p − log p(x) ≥ 0, (..., n): a difference of logits, without a softmax."""
        return self.logits.amax(dim=-1, keepdim=True) - self.at(self.logits)

    @lazy_property
    def entropy(self) -> torch.Tensor:
        """H(p) in nats, (..., 1)."""
        # Σ p·(log Σ e^(z − max z) − (z − max z)): no logarithm for each p. Clamped, since 0 · −∞ must count as 0.
        below = (self.logits - self.logits.amax(dim=-1, keepdim=True)).clamp_(min=torch.finfo(self.logits.dtype).min)
        return -self.top.log() - below.mul_(self.p).sum(dim=-1, keepdim=True)


class DraftedDistributions(Distributions):
    """The distributions at a round's drafted tokens, copied and computed lazily."""

    tokens: torch.Tensor  # (..., 1)

    def __init__(self, verified: Verified, slots: torch.Tensor | None):
        self.verified, self.places = verified, slots
        self.tokens = self.pick(verified.tokens)

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """Select `values` (B, γ) at the places, (..., 1)."""
        return values[..., None] if self.places is None else values.flatten().index_select(0, self.places)[:, None]

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Select `values` (B, ≥ γ, V) at the places, (..., V)."""
        gamma = self.verified.draft.gamma
        if self.places is None:
            return values[:, :gamma]
        row = self.places // gamma * values.shape[1] + self.places % gamma
        return values.flatten(0, 1).index_select(0, row)

    @lazy_property
    def logits(self) -> torch.Tensor:
        return self.rows(self.verified.logits)

    @lazy_property
    def q(self) -> torch.Tensor | None:
        return None if self.verified.q is None else self.rows(self.verified.q)

    @lazy_property
    def p(self) -> torch.Tensor:
        return self.verified.p[:, : self.verified.draft.gamma] if self.places is None else self.logits.softmax(dim=-1)

    @lazy_property
    def px(self) -> torch.Tensor:
        # In sampling, strict acceptance has computed p(x); in greedy decoding, rules that read it need other values of p, too.
        return self.pick(self.verified.p_at_tokens) if self.verified.sampling else self.at(self.p)

    @lazy_property
    def qx(self) -> torch.Tensor:
        """q(x), (..., n)."""
        if self.verified.q is None:
            return torch.ones_like(self.px)
        return self.pick(self.verified.at_tokens(self.verified.q))


def answers(
    answer: Callable[[DraftedDistributions], torch.Tensor], verified: Verified, open_: torch.Tensor
) -> torch.Tensor:
    """Return `answer(dists)` (..., 1) bool for the drafted tokens where `open_` (B, γ) bool, False elsewhere, (B, γ) bool.

    On the CPU only those tokens are computed, in chunks.
    """
    if verified.draft.gamma == 0:
        return open_
    if not looks_are_free(open_):
        return answer(Distributions.of(verified)).squeeze(-1) & open_
    slots = open_.flatten().nonzero().squeeze(-1)
    at_once = rows_at_once(2 * verified.logits.shape[-1])  # for both distributions
    values = [answer(Distributions.of(verified, some)).squeeze(-1) for some in slots.split(at_once) if len(some)]
    return open_.flatten().index_copy(0, slots, torch.cat(values)).view_as(open_) if values else open_
