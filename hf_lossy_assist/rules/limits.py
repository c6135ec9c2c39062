"""Limits for any lossy rule: so many lossy acceptances, in these spans, not these tokens, not where the target is sure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from ..registry import register_rule
from ..round import Verdict, Verified
from ..validation import check_int, check_number, shown
from ..vocabulary import in_parts
from .base import AcceptanceRule, RuleRun, Strict, accepted_by
from .composite_rules import CompositeRule, check_part


WINDOW = 100  # tokens that `per_100` counts in


@dataclass(frozen=True)
class Limited(CompositeRule):
    """A rule where its limits leave it room, and strict acceptance everywhere else.

    At a place where a limit says no, a and r are strict acceptance's; elsewhere the rule's own. A lossy acceptance is one that
    strict acceptance would have rejected under the same coins. Neutral: per_request = 0; without any limit it is the rule itself.

    Args:
        rule (`AcceptanceRule`): any but block verification and the synthetic one.
        per_request: the most lossy acceptances of a row in one call.
        per_100: the most in any 100 new tokens one after the other.
        inside: two token ids; only behind the first and before, or at, the second, in the prompt as well: (`<think>`, `</think>`).
        never: token ids that only strict acceptance lets pass, such as digits or operators.
        max_top1: not where max p is above it.
    """

    rule: AcceptanceRule
    per_request: int | None = None
    per_100: int | None = None
    inside: tuple[int, int] | None = None
    never: tuple[int, ...] = ()
    max_top1: float | None = None
    accepts_all_strict: ClassVar[bool] = (
        False  # what strict acceptance takes is in what it accepts, where the rule has it so
    )

    def __post_init__(self) -> None:
        check_part("Limited.rule", self.rule)
        for name in ("per_request", "per_100"):
            if getattr(self, name) is not None:
                check_int(f"Limited.{name}", getattr(self, name), 0)
        if self.inside is not None:
            object.__setattr__(self, "inside", _ids("inside", self.inside))
            if len(self.inside) != 2 or self.inside[0] == self.inside[1]:
                raise ValueError(f"Limited.inside: expected two different token ids, got {shown(list(self.inside))}")
        object.__setattr__(self, "never", _ids("never", self.never))
        if self.max_top1 is not None:
            check_number("Limited.max_top1", self.max_top1, 0.0, 1.0)

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        return (self.rule,)

    def start(self, prompts: Sequence[torch.Tensor]) -> "LimitedRun":
        inside = None if self.inside is None else at_end(prompts, self.inside)
        return LimitedRun(self, self.rule.start(prompts), BudgetState.fresh(len(prompts), prompts[0].device, inside))


@dataclass
class BudgetState:
    """What rows have done so far in a call."""

    used: torch.Tensor  # (B,) int64   lossy acceptances
    last: torch.Tensor  # (B, 99) bool   which of the last 99 new tokens were
    inside: torch.Tensor  # (B,) bool   whether the next token is inside a span

    @classmethod
    def fresh(cls, rows: int, device: torch.device, inside: torch.Tensor | None = None) -> "BudgetState":
        last = torch.zeros(rows, WINDOW - 1, dtype=torch.bool, device=device)
        return cls(last.sum(dim=1), last, last.any(dim=1) if inside is None else inside)

    def of(self, rows: torch.Tensor) -> "BudgetState":
        return BudgetState(self.used[rows], self.last[rows], self.inside[rows])

    def take(self, row: int, other: "BudgetState") -> None:
        """Row `row` is from now on the only one of `other`."""
        self.used[row], self.last[row], self.inside[row] = other.used[0], other.last[0], other.inside[0]

    def recent_at(self, gamma: int) -> torch.Tensor:
        """Lossy ones among the 99 tokens before each of the next places that were there before the draft, (B, γ)."""
        newest_first = torch.nn.functional.pad(self.last.flip(1).long().cumsum(dim=1), (1, 0))  # of the last 0 … 99
        return newest_first[:, (WINDOW - 1 - torch.arange(gamma, device=self.last.device)).clamp(min=0)]


class LimitedDecision(NamedTuple):
    """What a round's tokens are to a limited rule, (B, γ) bool each."""

    own: torch.Tensor  # the rule accepts them
    strict: torch.Tensor  # strict acceptance does
    closed: torch.Tensor  # a limit forbids a lossy one at this place
    banned: torch.Tensor  # it may not be this token


class LimitedRun(RuleRun):
    """A limited rule at work: the rule inside, and what rows have used up."""

    rule: Limited

    def __init__(self, rule: Limited, inner: RuleRun, state: BudgetState):
        """`state`: of all rows of the call."""
        super().__init__(rule)
        self.inner, self.state = inner, state
        self._known: tuple[Verified, torch.Tensor | None, LimitedDecision] | None = (
            None  # of the round that is being decided
        )

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        own, strict, closed, banned = self._answer(verified, coins)
        return torch.where(closed | banned, strict, own)

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        own = self.inner.unchecked(verified, coins)
        if own is None:
            return None
        _, _, closed, banned = self._answer(verified, coins)
        return own & ~closed & ~banned

    def choice(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        closed = self._closed_at(verified, coins, at)
        return torch.where(closed, Strict().choice(verified, at), self.inner.choice(verified, coins, at))

    def correction(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        closed = self._closed_at(verified, coins, at)[:, None]
        return torch.where(closed, Strict().correction(verified, at), self.inner.correction(verified, coins, at))

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        rows, n = verified.row_ids, verdict.accepted[:, None]
        # In a union, other rules may have accepted some of the lossy tokens.
        state, own = self.state.of(rows), verdict.lossy & self.accepts(verified, verdict.coins)
        self._known = None  # the next round finds another state
        self.inner.observe(verified, verdict)
        self.state.used[rows] = state.used + own.sum(dim=1)
        # The text goes on with n drafted tokens and one of the target's, which is never a lossy one.
        history = torch.nn.functional.pad(torch.cat([state.last, own], dim=1), (0, 1))
        self.state.last[rows] = history.gather(1, torch.arange(WINDOW - 1, device=n.device) + n + 1)
        if self.rule.inside is not None:
            text = torch.nn.functional.pad(verified.tokens, (0, 1)).scatter(1, n, verdict.token[:, None])
            self.state.inside[rows] = within(text, self.rule.inside, state.inside).gather(1, n + 1).squeeze(1)

    def take(self, row: int, other: RuleRun) -> None:
        assert isinstance(other, LimitedRun)
        self.inner.take(row, other.inner)
        self.state.take(row, other.state)

    def _closed_at(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        """Whether a limit forbids a lossy token at the place `at` (B,) of each row, whatever the token, (B,) bool."""
        return self._answer(verified, coins).closed.gather(1, at[:, None]).squeeze(1)

    def _answer(self, verified: Verified, coins: torch.Tensor | None) -> "LimitedDecision":
        """Return `_split` of this round, computed by the first of the stages that need it."""
        known = self._known
        if known is not None and known[0] is verified and known[1] is coins:
            return known[2]
        answer = self._split(verified, coins)
        self._known = verified, coins, answer
        return answer

    def _split(self, verified: Verified, coins: torch.Tensor | None) -> "LimitedDecision":
        rule, gamma, state = self.rule, verified.draft.gamma, self.state.of(verified.row_ids)
        own, strict = accepted_by(self.inner, verified, coins), Strict().accepts(verified, coins)
        closed = torch.zeros_like(own)
        if rule.inside is not None:
            closed = ~within(verified.tokens, rule.inside, state.inside)[:, :gamma]
        if rule.max_top1 is not None:
            closed = closed | (self._top1(verified) > rule.max_top1)
        banned = torch.isin(verified.tokens, torch.tensor(rule.never, dtype=torch.int64, device=own.device))
        # Up to the place where a budget ends, all of these are accepted; behind it the first of them ends the draft.
        lossy = (own & ~strict & ~closed & ~banned).long()
        before = lossy.cumsum(dim=1) - lossy
        if rule.per_request is not None:
            closed = closed | (state.used[:, None] + before >= rule.per_request)
        if rule.per_100 is not None:
            recent = before - torch.nn.functional.pad(before, (WINDOW - 1, 0))[:, :gamma] + state.recent_at(gamma)
            closed = closed | (recent >= rule.per_100)
        return LimitedDecision(own, strict, closed, banned)

    @staticmethod
    def _top1(verified: Verified) -> torch.Tensor:
        """max p at each drafted place, (B, γ)."""
        gamma = verified.draft.gamma
        return in_parts(lambda logits: logits[:, :gamma].softmax(dim=-1).amax(dim=-1), verified.logits)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"Limited.{name}: expected token ids such as (5, 6), got {shown(value)}")
    for token in value:
        check_int(f"Limited.{name}", token, 0)
    return tuple(value)


def within(tokens: torch.Tensor, marks: tuple[int, int], before: torch.Tensor) -> torch.Tensor:
    """Whether each place lies inside a span, and the one behind the last token, (B, n) → (B, n + 1) bool.

    A span goes from behind its first mark up to and with its second: a place is inside if the last mark before it is the first one.
    `before` (B,): whether the first place is inside.
    """
    count = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    opened, closed = (torch.where(tokens == mark, count, 0).cummax(dim=1).values for mark in marks)
    behind = torch.where(opened == closed, before[:, None], opened > closed)  # equal: no mark yet
    return torch.cat([before[:, None], behind], dim=1)


def at_end(prompts: Sequence[torch.Tensor], marks: tuple[int, int]) -> torch.Tensor:
    """Whether each row's text ends inside a span, (rows,) bool."""
    out = torch.zeros(len(prompts), dtype=torch.bool, device=prompts[0].device)
    for row, prompt in enumerate(prompts):
        out[row] = within(prompt[None], marks, out[row : row + 1])[0, -1]
    return out


register_rule(
    "limited", Limited, guarantee="depends", condition="as the rule inside", neutral={"per_request": 0},
    summary="A rule where its limits leave it room, and strict acceptance everywhere else.",
    neutral_text="per_request = 0; without any limit it is the rule itself", example={"rule": {"name": "top_k", "k": 4}},
)  # fmt: skip
