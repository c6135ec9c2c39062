"""The results of the four stages of a round, all immutable: `Draft` → `Selection` → `Verified` → `Verdict`.

Letters as in Leviathan et al. (huggingface.co/papers/2211.17192): p = target, q = draft, γ = length of the longest
draft in the batch, n = accepted drafted tokens. B = rows, V = size of the vocabulary that both models share. Shorter
drafts are padded on the right.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from .tensors import argmax, at_places, in_parts


T = TypeVar("T")


class lazy_property(Generic[T]):
    """`functools.cached_property` without the lock of Python 3.11, which torch.compile cannot trace."""

    def __init__(self, method: Callable[[Any], T]):
        self.method, self.__doc__ = method, method.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> T:
        if instance is None:
            return self  # type: ignore[return-value]  # for whoever reads the documentation
        value = instance.__dict__[self.name] = self.method(instance)
        return value


# Position, in a round, of the token after the draft: beyond any drafted one.
BONUS_PLACE = (1 << 32) - 1


@dataclass(frozen=True)
class Draft:
    """The proposal of a drafter.

    Args:
        tokens (B, γ) int64: on the target's device; shorter drafts are padded on the right with arbitrary ids.
        lengths (B,) int64: the number of drafted tokens of each row.
        row_ids (B,) int64: index of each row in the call, `Rows.row_ids`.
        planned: the maximum draft length of a row, known before the round.
        sampling: False: greedy, each token is an argmax.
        probs (B, γ, V) float32: the distributions that the tokens were drawn from, or in greedy decoding are the argmax
            of, if a rule or filter reads them. None: each token counts as certain, q = 1, which is lossless for any way
            of drafting.
        hidden (B, γ, H): the draft's hidden states, if the rule's head reads them.
        counts: `lengths` on the host, if known there.
        validity (B, γ): one number of each token's distribution (greedy: its largest logit), not finite if the logits
            are invalid.
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

    @property
    def gamma(self) -> int:
        """γ."""
        return self.tokens.shape[1]

    def at_tokens(self, probs: torch.Tensor) -> torch.Tensor:
        """Gather `probs` (B, ≥ γ, V) at the drafted tokens, (B, γ)."""
        return probs[:, : self.gamma].gather(-1, self.tokens[..., None]).squeeze(-1)


@dataclass(frozen=True)
class Selection:
    """The drafted tokens that a verify filter sends to the target."""

    draft: Draft
    sent: torch.Tensor  # (B,) int64   number of drafted tokens of each row, at most `draft.lengths`
    sends_all: bool = False  # known without a device sync: `sent` equals `draft.lengths`
    companion: torch.Tensor | None = None  # (B, γ + 1, V) float32   its distributions, if the filter read them
    # At (B,) → (B, V) bool: which tokens the filter would have sent at one position of each row; None: it does not
    # depend on the token.
    would_verify: Callable[[torch.Tensor], torch.Tensor] | None = None
    replaced: torch.Tensor | None = None  # (B,) int64   position of the token that the filter replaced, γ if none

    def valid_prefix_lengths(self, lengths: Sequence[int], accepted: Sequence[int]) -> list[int]:
        """Return, for a model that ran on the drafter's tokens, how many of a row's `lengths[b]` cached tokens are in
        its text.

        `accepted[b]` of them are from this round; a token that the filter replaced does not count.
        """
        if self.replaced is None:
            return list(lengths)
        return [length - (n > slot) for length, n, slot in zip(lengths, accepted, self.replaced.tolist(), strict=True)]


class Decisions(NamedTuple):
    """Decisions about the drafted tokens, made one after another while the logits were processed."""

    coins: torch.Tensor | None  # (B, γ) float32, as in `Verdict`
    accepted: torch.Tensor  # (B, γ) bool
    lossy: torch.Tensor  # (B, γ) bool


@dataclass(frozen=True)
class Verified:
    """The target's logits for a selection, as the input of acceptance rules."""

    selection: Selection
    logits: torch.Tensor  # (B, γ + 1, V) float32   the target's, after the logits processors
    head_accepts: torch.Tensor | None = None  # (B, γ) bool   by the rule's head; None: it has no head
    decisions: Decisions | None = None  # made one after another; logits after a row's last decision are not processed

    @property
    def draft(self) -> Draft:
        return self.selection.draft

    @property
    def sampling(self) -> bool:
        """False: greedy, the target's choice is its argmax."""
        return self.draft.sampling

    @property
    def tokens(self) -> torch.Tensor:
        """The drafted tokens, (B, γ) int64."""
        return self.draft.tokens

    @property
    def drafted(self) -> torch.Tensor:
        """The number of drafted tokens of each row, (B,) int64."""
        return self.draft.lengths

    @property
    def sent(self) -> torch.Tensor:
        """The number of drafted tokens of each row that the target read, (B,) int64."""
        return self.selection.sent

    @property
    def row_ids(self) -> torch.Tensor:
        """The index of each row in the call, (B,) int64."""
        return self.draft.row_ids

    @property
    def q(self) -> torch.Tensor | None:
        """The draft's distributions, (B, γ, V) float32; None: each drafted token was certain."""
        return self.draft.probs

    @lazy_property
    def p(self) -> torch.Tensor:
        """The target's distributions, (B, γ + 1, V) float32; position γ is the one after the last drafted token."""
        return self.logits.softmax(dim=-1)

    @lazy_property
    def argmax(self) -> torch.Tensor:
        """The target's choice at each position, (B, γ + 1) int64."""
        return argmax(self.logits)

    @lazy_property
    def is_sent(self) -> torch.Tensor:
        """Mask of the drafted tokens that the target read, (B, γ) bool."""
        return torch.arange(self.draft.gamma, device=self.sent.device) < self.sent[:, None]

    def part(self, row: int, first: int, end: int) -> "Verified":
        """Return drafted positions `first` to `end` of one row by themselves, for the decisions of a rule."""
        rows, slots, draft = slice(row, row + 1), slice(first, end), self.draft
        one = Draft(
            draft.tokens[rows, slots],
            draft.lengths[rows] - first,
            draft.row_ids[rows],
            draft.planned,
            draft.sampling,
            probs=None if draft.probs is None else draft.probs[rows, slots],
        )
        by_head = None if self.head_accepts is None else self.head_accepts[rows, slots]
        return Verified(Selection(one, self.sent[rows] - first), self.logits[rows, first : end + 1], by_head)

    def at_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Gather `values` (B, ≥ γ, V) at the drafted tokens, (B, γ)."""
        return self.draft.at_tokens(values)

    @lazy_property
    def p_at_tokens(self) -> torch.Tensor:
        """p of each drafted token, (B, γ) float32: `at_tokens(p)` without storing `p`."""
        logits = self.logits[:, : self.draft.gamma]
        return in_parts(
            lambda x, tokens: x.softmax(dim=-1).gather(-1, tokens[..., None]).squeeze(-1), logits, self.tokens
        )

    def p_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the target's distribution at position `slots` (B,), 0 to γ, of each row, (B, V) float32."""
        return at_places(self.logits, slots).softmax(dim=-1)


@dataclass(frozen=True)
class Verdict:
    """The end of a round: each row commits its first `accepted` drafted tokens, then `token`, up to the end of its
    text.

    Args:
        accepted (B,) int64: n.
        token (B,) int64: the correction after a rejection, else the bonus token.
        lossy (B, γ) bool: accepted tokens that strict acceptance would have rejected.
        unchecked (B, γ) bool: accepted tokens that were not compared with the target; None: all were.
        coins (B, γ) float32 in [0, 1): the numbers that acceptance probabilities were compared with; None: greedy.
        overshoot (B, γ) float32: q/p of lossy tokens, 0 elsewhere; None: the rule is lossless.
    """

    accepted: torch.Tensor
    token: torch.Tensor
    lossy: torch.Tensor
    unchecked: torch.Tensor | None = None
    coins: torch.Tensor | None = None
    overshoot: torch.Tensor | None = None


class Reading(NamedTuple):
    """The target's hidden states of a round's tokens, from which a network learns."""

    tokens: torch.Tensor  # (B, Q − 1) int64: those after the first token that was read
    cached: torch.Tensor  # (B,) int64: the position of that first one
    accepted: torch.Tensor  # (B,) int64: how many of `tokens` belong to the text
    last: torch.Tensor  # (B, 1) int64: the text's token after these
    states: torch.Tensor  # (B, Q, layers · target width)
