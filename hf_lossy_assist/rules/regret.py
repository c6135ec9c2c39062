"""A rule that may lose so much of the target's logits in one request, and no more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from ..registry import register_rule
from ..round import Block, Verdict
from ..validation import check_int, check_number
from .base import AcceptanceRule, kept_of


@dataclass(frozen=True)
class RegretBudget(AcceptanceRule):
    """Accept mismatches while the regret that a request has spent on them stays within its budget.

    The regret of x is max z − z(x), z the target's processed logits. Accept x where it is the argmax, or where the request's
    regrets, this one included, sum to at most `budget`, this one is at most `local` for each drafted token left (its own
    included), and it is at most the `per_block`-th mismatch of its draft (Feng et al., ASD, huggingface.co/papers/2608.03447,
    with a budget of 2.06 on GSM8K). For greedy decoding. A token that a processor forbids is never accepted.
    Neutral: budget = 0, or per_block = 0.
    """

    budget: float
    local: float = math.inf
    per_block: int | None = None
    lossless: ClassVar[bool] = False
    modes: ClassVar[tuple[str, ...]] = ("greedy",)

    def __post_init__(self) -> None:
        check_number("RegretBudget.budget", self.budget, 0.0, math.inf)
        check_number("RegretBudget.local", self.local, 0.0, math.inf)
        if self.per_block is not None:
            check_int("RegretBudget.per_block", self.per_block, 0)

    def start(self, prompts: Sequence[torch.Tensor]) -> "_RegretRun":
        spent = torch.zeros(len(prompts), dtype=torch.float32, device=prompts[0].device)
        return _RegretRun(self.budget, self.local, self.per_block, spent)

    def spent_before(self, block: Block) -> torch.Tensor:
        """What each row's request has spent so far, (B,); a block that belongs to no call is a request's first."""
        return torch.zeros(block.tokens.shape[0], dtype=torch.float32, device=block.tokens.device)

    def regrets(self, block: Block) -> torch.Tensor:
        """max z − z(x) of each drafted token, and 0 for the argmax itself, (B, γ)."""
        assert block.scores is not None, "the target has not seen this block yet"
        regret = block.scores[:, : block.tokens.shape[1]].amax(dim=-1) - block.of_tokens(block.scores)
        return regret.masked_fill(super().matches(block), 0.0)

    def matches(self, block: Block) -> torch.Tensor:
        own, regret = super().matches(block), self.regrets(block)
        if self.budget == 0:
            return own  # an exact tie costs nothing, and is a mismatch all the same
        left = kept_of(block)[:, None] - torch.arange(regret.shape[1], device=regret.device)
        fits = self.spent_before(block)[:, None] + regret.cumsum(dim=1) <= self.budget
        fits &= (regret <= self.local * left.clamp(min=1)) & regret.isfinite()
        if self.per_block is not None:
            fits &= (~own).long().cumsum(dim=1) <= self.per_block
        return own | fits


@dataclass(frozen=True)
class _RegretRun(RegretBudget):
    spent: torch.Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.float32)
    )  # of every row of the call; `observe` adds to it

    def spent_before(self, block: Block) -> torch.Tensor:
        return self.spent[block.rows]

    def observe(self, block: Block, verdict: Verdict) -> None:
        own = verdict.lossy & self.matches(block)
        self.spent[block.rows] += self.regrets(block).masked_fill(~own, 0.0).sum(dim=1)


register_rule(
    "regret_budget", RegretBudget, guarantee="lossy", neutral={"budget": 0.0}, neutral_text="budget = 0, or per_block = 0", paper="2608.03447",
    summary="Accept mismatches while the regret that a request has spent on them stays within its budget.",
    example={"budget": 0.5},
)  # fmt: skip
