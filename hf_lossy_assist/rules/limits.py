"""Limits for any lossy rule: so many lossy acceptances, in these spans, not these tokens, not where the target is sure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ..registry import register_rule
from ..round import Block, Verdict
from ..validation import check_int, check_number, shown
from .base import AcceptanceRule, Strict, taken
from .nesting import Nesting, check_part
from .spans import at_end, within


WINDOW = 100  # tokens that `per_100` counts in


@dataclass(frozen=True)
class Limited(Nesting):
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
    joined: ClassVar[bool] = False  # what strict acceptance takes is in what it accepts, where the rule has it so

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

    def start(self, prompts: Sequence[torch.Tensor]) -> "_LimitedRun":
        inside = None if self.inside is None else at_end(prompts, self.inside)
        now = _Now.fresh(len(prompts), prompts[0].device, inside)
        settings = (self.per_request, self.per_100, self.inside, self.never, self.max_top1)
        return _LimitedRun(self.rule.start(prompts), *settings, now=now)

    def accepts(self, block: Block) -> torch.Tensor:
        own, strict, closed, banned = self._split(block)
        return torch.where(closed | banned, strict, own)

    def unseen(self, block: Block) -> torch.Tensor | None:
        own = self.rule.unseen(block)
        if own is None:
            return None
        _, _, closed, banned = self._split(block)
        return own & ~closed & ~banned

    def choice(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        return torch.where(self._closed_at(block, at), super().choice(block, at), self.rule.choice(block, at))

    def correction(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        closed = self._closed_at(block, at)[:, None]
        return torch.where(closed, super().correction(block, at), self.rule.correction(block, at))

    def _closed_at(self, block: Block, at: torch.Tensor) -> torch.Tensor:
        """Whether a limit says no at the place `at` (B,) of each row, whatever the token, (B,) bool."""
        return self._split(block)[2].gather(1, at[:, None]).squeeze(1)

    def _split(self, block: Block) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the rule accepts, what strict acceptance does, where a limit says no, and to which token; (B, γ) bool each."""
        gamma, now = block.tokens.shape[1], self._now(block)
        own, strict = taken(self.rule, block), Strict().accepts(block)
        closed = torch.zeros_like(own)
        if self.inside is not None:
            closed = ~within(block.tokens, self.inside, now.inside)[:, :gamma]
        if self.max_top1 is not None:
            closed = closed | (block.p[:, :gamma].amax(dim=-1) > self.max_top1)
        banned = torch.isin(block.tokens, torch.tensor(self.never, dtype=torch.int64, device=own.device))
        # Up to the place where a budget ends, all of these are accepted; behind it the first of them ends the draft.
        lossy = (own & ~strict & ~closed & ~banned).long()
        before = lossy.cumsum(dim=1) - lossy
        if self.per_request is not None:
            closed = closed | (now.used[:, None] + before >= self.per_request)
        if self.per_100 is not None:
            recent = before - torch.nn.functional.pad(before, (WINDOW - 1, 0))[:, :gamma] + now.recent_at(gamma)
            closed = closed | (recent >= self.per_100)
        return own, strict, closed, banned

    def _now(self, block: Block) -> "_Now":
        """Where the block's rows stand; a block that belongs to no call is the first of an empty prompt."""
        return _Now.fresh(block.tokens.shape[0], block.tokens.device)


@dataclass
class _Now:
    """What rows have done so far in a call."""

    used: torch.Tensor  # (B,) int64   lossy acceptances
    last: torch.Tensor  # (B, 99) bool   which of the last 99 new tokens were
    inside: torch.Tensor  # (B,) bool   whether the next token is inside a span

    @classmethod
    def fresh(cls, rows: int, device: torch.device, inside: torch.Tensor | None = None) -> "_Now":
        last = torch.zeros(rows, WINDOW - 1, dtype=torch.bool, device=device)
        return cls(last.sum(dim=1), last, last.any(dim=1) if inside is None else inside)

    def of(self, rows: torch.Tensor) -> "_Now":
        return _Now(self.used[rows], self.last[rows], self.inside[rows])

    def recent_at(self, gamma: int) -> torch.Tensor:
        """Lossy ones among the 99 tokens before each of the next places that were there before the draft, (B, γ)."""
        newest_first = torch.nn.functional.pad(self.last.flip(1).long().cumsum(dim=1), (1, 0))  # of the last 0 … 99
        return newest_first[:, (WINDOW - 1 - torch.arange(gamma, device=self.last.device)).clamp(min=0)]


@dataclass(frozen=True)
class _LimitedRun(Limited):
    now: _Now = field(default_factory=lambda: _Now.fresh(0, torch.device("cpu")))  # all rows of the call

    def _now(self, block: Block) -> _Now:
        return self.now.of(block.rows)

    def observe(self, block: Block, verdict: Verdict) -> None:
        rows, n = block.rows, verdict.accepted[:, None]
        now, own = self.now.of(rows), verdict.lossy & self.accepts(block)  # in a union, others may have accepted some
        super().observe(block, verdict)  # only now: the rule inside may keep count too
        self.now.used[rows] = now.used + own.sum(dim=1)
        # The text goes on with n drafted tokens and one of the target's, which is never a lossy one.
        history = torch.nn.functional.pad(torch.cat([now.last, own], dim=1), (0, 1))
        self.now.last[rows] = history.gather(1, torch.arange(WINDOW - 1, device=n.device) + n + 1)
        if self.inside is not None:
            text = torch.nn.functional.pad(block.tokens, (0, 1)).scatter(1, n, verdict.token[:, None])
            self.now.inside[rows] = within(text, self.inside, now.inside).gather(1, n + 1).squeeze(1)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f"Limited.{name}: expected token ids such as (5, 6), got {shown(value)}")
    for token in value:
        check_int(f"Limited.{name}", token, 0)
    return tuple(value)


register_rule(
    "limited", Limited, guarantee="depends", condition="as the rule inside", neutral={"per_request": 0},
    summary="A rule where its limits leave it room, and strict acceptance everywhere else.",
    neutral_text="per_request = 0; without any limit it is the rule itself", example={"rule": {"name": "top_k", "k": 4}},
)  # fmt: skip
