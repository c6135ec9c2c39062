"""Limits for lossy rules: number of lossy acceptances, spans, excluded tokens, and the overshoot."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar, NamedTuple

import torch

from ..registry.frozen import Count
from ..round import Verdict, Verified
from ..tensors import on_device
from ..validation import check_number, shown
from .base import AcceptanceRule, RuleRun, Strict, accepted_by, overshoots
from .composite_rules import CompositeRule, widest_scope


class Limited(
    CompositeRule,
    name="limited",
    condition="as the rule inside",
    neutral={"per_request": 0},
    neutral_text="per_request = 0; without any limit it is the rule itself",
    example={"rule": {"name": "top_k", "k": 4}},
):
    """Apply a rule where limits permit it, and strict acceptance elsewhere.

    At a position closed by a limit, a and r are strict acceptance's, elsewhere the rule's. An acceptance is lossy if strict acceptance
    would have rejected the token with the same coins.

    Args:
        rule (`AcceptanceRule`): any but block verification and the synthetic one.
        per_request: maximum lossy acceptances of a row in one call.
        inside: two token ids: only after the first and up to the second, counting the prompt: (`<think>`, `</think>`).
        never: token ids that are never accepted lossily, such as digits or operators.
        max_overshoot: not tokens whose q/p is above it, at least 1, which bounds by how much the rule may favour a token (Revisiting Lossy
            Verification, huggingface.co/papers/2607.26627). Greedy drafts are certain, q = 1: not tokens with p below 1/`max_overshoot`.
    """

    rule: AcceptanceRule
    per_request: Count | None = None
    inside: tuple[int, int] | None = None
    never: tuple[int, ...] = ()
    max_overshoot: Annotated[float, partial(check_number, low=1.0, high=math.inf)] | None = None
    accepts_all_strict: ClassVar[bool] = False  # part of `accepted_by` for the nested rule
    scope = widest_scope("prefix")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "never", tuple(self.never))
        if self.inside is not None:
            object.__setattr__(self, "inside", tuple(self.inside))
            if len(set(self.inside)) != 2 or len(self.inside) != 2:
                raise ValueError(f"Limited.inside: expected two different token ids, got {shown(list(self.inside))}")

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        return (self.rule,)

    def start(self, prompts: Sequence[torch.Tensor]) -> "LimitedRun":
        return LimitedRun(self, prompts)


class LimitedDecision(NamedTuple):
    """The decision of a limited rule about a round's tokens, (B, γ) bool each."""

    accepts: torch.Tensor
    closed: torch.Tensor  # a limit forbids lossy acceptances at this position
    limited: torch.Tensor  # at this position, or of this token


class LimitedRun(RuleRun):
    """The state of a limited rule: the run of the nested rule, and the rows' budgets.

    `used` (rows,) int64: lossy acceptances. `inside` (rows,) bool: whether the next token is inside a span.
    """

    rule: Limited

    def __init__(self, rule: Limited, prompts: Sequence[torch.Tensor]):
        super().__init__(rule)
        self.inner = rule.rule.start(prompts)
        self.used = torch.zeros(len(prompts), dtype=torch.int64, device=prompts[0].device)
        self.inside = self.used > 0 if rule.inside is None else at_end(prompts, rule.inside)
        self._decided: tuple[Verified, torch.Tensor | None, LimitedDecision] | None = None

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return self._decide(verified, coins).accepts

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        unchecked = self.inner.unchecked(verified, coins)
        return None if unchecked is None else unchecked & ~self._decide(verified, coins).limited

    def choice(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        closed = self._decide(verified, coins).closed.gather(1, at[:, None]).squeeze(1)
        return torch.where(closed, Strict().choice(verified, at), self.inner.choice(verified, coins, at))

    def correction(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        closed = self._decide(verified, coins).closed.gather(1, at[:, None])
        return torch.where(closed, Strict().correction(verified, at), self.inner.correction(verified, coins, at))

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        rows = verified.row_ids
        # In a union, other rules may have accepted some of the lossy tokens.
        lossy = verdict.lossy & self.accepts(verified, verdict.coins)
        self._decided = None  # the state changes below
        self.inner.observe(verified, verdict)
        self.used[rows] += lossy.sum(dim=1)
        if self.rule.inside is not None:
            n = verdict.accepted[:, None]
            text = torch.nn.functional.pad(verified.tokens, (0, 1)).scatter(1, n, verdict.token[:, None])
            self.inside[rows] = within(text, self.rule.inside, self.inside[rows]).gather(1, n + 1).squeeze(1)

    def take(self, row: int, other: RuleRun) -> None:
        assert isinstance(other, LimitedRun)
        self.inner.take(row, other.inner)
        self.used[row], self.inside[row] = other.used[0], other.inside[0]

    def _decide(self, verified: Verified, coins: torch.Tensor | None) -> LimitedDecision:
        """Return the decision about this round, computed once."""
        if self._decided is None or self._decided[0] is not verified or self._decided[1] is not coins:
            self._decided = verified, coins, self._split(verified, coins)
        return self._decided[2]

    def _split(self, verified: Verified, coins: torch.Tensor | None) -> LimitedDecision:
        rule, rows = self.rule, verified.row_ids
        accepted, strict = accepted_by(self.inner, verified, coins), Strict().accepts(verified, coins)
        closed = torch.zeros_like(accepted)
        if rule.inside is not None:
            closed = ~within(verified.tokens, rule.inside, self.inside[rows])[:, :-1]
        banned = torch.isin(verified.tokens, on_device(rule.never, accepted.device))
        if rule.max_overshoot is not None:
            banned = banned | (overshoots(verified) > rule.max_overshoot)
        if rule.per_request is not None:
            # These are accepted up to the position where the budget is exhausted; the next of them ends the draft.
            lossy = (accepted & ~strict & ~closed & ~banned).long()
            closed = closed | (self.used[rows][:, None] + lossy.cumsum(dim=1) - lossy >= rule.per_request)
        limited = closed | banned
        return LimitedDecision(torch.where(limited, strict, accepted), closed, limited)


def within(tokens: torch.Tensor, marks: tuple[int, int], before: torch.Tensor) -> torch.Tensor:
    """Return whether each position, and the one after the last token, is inside a span, (B, n) → (B, n + 1) bool.

    A position is inside if the last mark before it is the first one. `before` (B,): whether the first position is inside.
    """
    count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    opened, closed = (torch.where(tokens == mark, count, 0).cummax(dim=1).values for mark in marks)
    after = torch.where(opened == closed, before[:, None], opened > closed)  # equal: no mark yet
    return torch.cat([before[:, None], after], dim=1)


def at_end(prompts: Sequence[torch.Tensor], marks: tuple[int, int]) -> torch.Tensor:
    """Return whether each row's text ends inside a span, (rows,) bool."""
    no = torch.zeros(1, dtype=torch.bool, device=prompts[0].device)
    return torch.cat([within(prompt[None], marks, no)[:, -1] for prompt in prompts])
