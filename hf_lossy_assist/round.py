"""The tensors of one round.

Letters as in Leviathan et al. (huggingface.co/papers/2211.17192): p = target, q = draft, γ = tokens drafted for the row
that drafted most, n = drafted tokens accepted. B rows, V tokens in the vocabulary that both models share.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass
class Block:
    """What one round drafted and what the target says of it. Rows that drafted less than γ are padded on the right."""

    tokens: torch.Tensor  # (B, γ) int64   drafted tokens, on the target's device
    drafted: torch.Tensor  # (B,) int64    how many of them each row drafted
    q: torch.Tensor | None  # (B, γ, V) float32  the laws the tokens were drawn from; None: each was certain (q = 1)
    sampling: bool  # False: greedy, the target's choice is its argmax
    kept: torch.Tensor | None = None  # (B,) int64   how many go to the target; set by the verify filter
    scores: torch.Tensor | None = None  # (B, γ + 1, V) float32  target logits after the logits processors
    states: torch.Tensor | None = None  # (B, γ, H)  the draft's hidden states of them, if the rule's head reads those
    judged: torch.Tensor | None = None  # (B, γ) bool  tokens that the rule's head would let pass; None: it has no head
    laws: torch.Tensor | None = None  # (B, γ, V) float32  the draft's laws, greedy too, where the filter reads them
    # (B, γ + 1, V) float32: the companion's laws at the same positions, and one further.
    companion: torch.Tensor | None = None
    coins: torch.Tensor | None = None  # (B, γ) in [0, 1)   what each drafted token's a(x) is compared with; sampling
    planned: int | None = None  # the most that a row might have drafted, from before the round; None: γ
    index: torch.Tensor | None = None  # (B,) int64   which row of the call each row is; None: all of them, in order
    considered: Callable[[torch.Tensor], torch.Tensor] | None = None  # at (B,) → (B, V) bool  what it would verify
    replaced: torch.Tensor | None = None  # (B,) int64   where the filter put another token, γ where it put none

    @cached_property
    def p(self) -> torch.Tensor:
        """The target's laws, (B, γ + 1, V) float32: softmax of `scores`; position γ is the one after the last draft."""
        assert self.scores is not None, "the target has not seen this block yet"
        return self.scores.softmax(dim=-1)

    @cached_property
    def best(self) -> torch.Tensor:
        """The target's argmax at each position, (B, γ + 1) int64."""
        assert self.scores is not None, "the target has not seen this block yet"
        return self.scores.argmax(dim=-1)

    @property
    def rows(self) -> torch.Tensor:
        """Which row of the call each row is, (B,) int64."""
        return torch.arange(self.tokens.shape[0], device=self.tokens.device) if self.index is None else self.index

    def of_tokens(self, laws: torch.Tensor) -> torch.Tensor:
        """The probability that `laws` (B, ≥ γ, V) gives to each drafted token, (B, γ)."""
        return laws[:, : self.tokens.shape[1]].gather(-1, self.tokens[..., None]).squeeze(-1)

    def known(self, held: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """How many of `held[b]` tokens, of which `accepted[b]` are the block's, a model knows that was fed the draft's own."""
        if self.replaced is None:
            return list(held)
        return [h - (n > place) for h, n, place in zip(held, accepted, self.replaced.tolist(), strict=True)]


@dataclass
class Verdict:
    """What a round ends with: each row commits its first `accepted` drafted tokens and then `token`."""

    accepted: torch.Tensor  # (B,) int64    n
    token: torch.Tensor  # (B,) int64       the correction after a rejection, else the bonus token
    lossy: torch.Tensor  # (B, γ) bool      accepted tokens that strict acceptance would have rejected
    unseen: torch.Tensor | None = None  # (B, γ) bool   accepted tokens that were not looked at; None: all were
