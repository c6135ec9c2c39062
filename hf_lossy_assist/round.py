"""The four stages of one round: `Draft` → `Selection` → `Verified` → `Verdict`. Each is frozen, and complete when it exists.

Letters as in Leviathan et al. (huggingface.co/papers/2211.17192): p = target, q = draft, γ = tokens drafted by the row that drafted
most, n = drafted tokens accepted. B rows, V tokens in the vocabulary that both models share. Rows that drafted less than γ tokens are
padded on the right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from .validation import renamed
from .vocabulary import argmax, at_places, in_parts


T = TypeVar("T")


class lazy_property(Generic[T]):
    """`functools.cached_property` without its lock (Python 3.11 still has it), into which torch.compile cannot look."""

    def __init__(self, method: Callable[[Any], T]):
        self.method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # for whoever reads the documentation
        value = instance.__dict__[self.name] = self.method(instance)
        return value


# The place in a round of the token behind the draft: no drafted one comes so far.
BONUS_PLACE = (1 << 32) - 1


@dataclass(frozen=True)
class Draft:
    """The proposal of a drafter.

    Args:
        tokens (B, γ) int64: on the target's device; rows that drafted less are padded on the right with anything.
        lengths (B,) int64: how many of them each row drafted.
        row_ids (B,) int64: each row's number in the call, `Rows.row_ids`.
        planned: the most tokens that a row might have drafted, known before the round.
        sampling: False: greedy, each token is an argmax.
        probs (B, γ, V) float32: the distributions that the tokens were drawn from; greedy: whose argmax they are, if a rule or a filter
            reads them. None: each token counts as certain, q = 1, which is lossless however it was found.
        hidden (B, γ, H): the draft's hidden states, if the rule's head reads them.
        counts: `lengths` on the host, where they are known there.
        validity (B, γ): one number of each token's distribution (greedy: its largest logit), not finite where the logits make no distribution.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    row_ids: torch.Tensor
    planned: int
    sampling: bool
    probs: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    validity: torch.Tensor | None = None
    counts: Sequence[int] | None = None

    call_rows = renamed("row_ids")

    @property
    def gamma(self) -> int:
        """γ."""
        return self.tokens.shape[1]

    def at_tokens(self, probs: torch.Tensor) -> torch.Tensor:
        """Read what `probs` (B, ≥ γ, V) gives to each drafted token, (B, γ)."""
        return probs[:, : self.gamma].gather(-1, self.tokens[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Selection:
    """The drafted tokens that a verify filter sends to the target."""

    draft: Draft
    sent: torch.Tensor  # (B,) int64   how many drafted tokens of each row, at most `draft.lengths`
    sends_all: bool = False  # known without a look at the device: `sent` equals `draft.lengths`
    companion: torch.Tensor | None = None  # (B, γ + 1, V) float32   its distributions, if the filter read them
    # At (B,) → (B, V) bool: which tokens the filter would have sent at one place of each row; None: it did not look at the token itself.
    would_verify: Callable[[torch.Tensor], torch.Tensor] | None = None
    replaced: torch.Tensor | None = None  # (B,) int64   where the filter put another token, γ where it put none

    def valid_prefix_lengths(self, lengths: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """Count a row's `lengths[b]` cached tokens, `accepted[b]` of them from this round, in a model that ran on the drafter's tokens.

        One that the filter put in a token's place is not among them.
        """
        if self.replaced is None:
            return list(lengths)
        return [held - (n > place) for held, n, place in zip(lengths, accepted, self.replaced.tolist(), strict=True)]


@dataclass(frozen=True)
class Verified:
    """The target's answer to a selection, which acceptance rules read."""

    selection: Selection
    logits: torch.Tensor  # (B, γ + 1, V) float32   the target's, after the logits processors
    head_accepts: torch.Tensor | None = None  # (B, γ) bool   by the rule's head; None: it has no head

    @property
    def draft(self) -> Draft:
        return self.selection.draft

    @property
    def sampling(self) -> bool:
        """False: greedy, the target's choice is its argmax."""
        return self.draft.sampling

    @property
    def tokens(self) -> torch.Tensor:
        """Return the drafted tokens, (B, γ) int64."""
        return self.draft.tokens

    @property
    def drafted(self) -> torch.Tensor:
        """Return the number of tokens that each row drafted, (B,) int64."""
        return self.draft.lengths

    @property
    def sent(self) -> torch.Tensor:
        """Return the number of drafted tokens of each row that the target read, (B,) int64."""
        return self.selection.sent

    @property
    def row_ids(self) -> torch.Tensor:
        """Return each row's number in the call, (B,) int64."""
        return self.draft.row_ids

    call_rows = renamed("row_ids")

    @property
    def q(self) -> torch.Tensor | None:
        """Return the draft's distributions, (B, γ, V) float32; None: each drafted token was certain."""
        return self.draft.probs

    @lazy_property
    def p(self) -> torch.Tensor:
        """Return the target's distributions, (B, γ + 1, V) float32; position γ is the one after the last drafted token."""
        return self.logits.softmax(dim=-1)

    @lazy_property
    def argmax(self) -> torch.Tensor:
        """Return the target's choice at each position, (B, γ + 1) int64."""
        return argmax(self.logits)

    @lazy_property
    def is_sent(self) -> torch.Tensor:
        """Mark the places of drafted tokens that the target read, (B, γ) bool."""
        return torch.arange(self.draft.gamma, device=self.sent.device) < self.sent[:, None]

    def at_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Read what `values` (B, ≥ γ, V) holds for each drafted token, (B, γ)."""
        return self.draft.at_tokens(values)

    @lazy_property
    def rule_cache(self) -> list[tuple[object, torch.Tensor]]:
        """Hold what rules found out about drafted tokens and read once more after a rejection: the rule, and (B, γ) numbers."""
        return []

    @lazy_property
    def p_at_tokens(self) -> torch.Tensor:
        """p of each drafted token, (B, γ) float32: `at_tokens(p)`, for those who read no other token's. `p` itself is not kept."""
        logits = self.logits[:, : self.draft.gamma]
        return in_parts(
            lambda x, tokens: x.softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1), logits, self.tokens
        )

    def p_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the target's distribution at place `places` (B,), 0 to γ, of each row, (B, V) float32: `p` there."""
        return at_places(self.logits, places).softmax(dim=-1)


@dataclass(frozen=True)
class Verdict:
    """The end of a round: each row commits its first `accepted` drafted tokens and then `token`.

    A row whose text ends within them commits less.

    Args:
        accepted (B,) int64: n.
        token (B,) int64: the correction after a rejection, else the bonus token.
        lossy (B, γ) bool: accepted tokens that strict acceptance would have rejected.
        unchecked (B, γ) bool: accepted tokens that were not compared with the target; None: all were.
        coins (B, γ) float32 in [0, 1): what acceptance probabilities were compared with; None: greedy.
    """

    accepted: torch.Tensor
    token: torch.Tensor
    lossy: torch.Tensor
    unchecked: torch.Tensor | None = None
    coins: torch.Tensor | None = None
