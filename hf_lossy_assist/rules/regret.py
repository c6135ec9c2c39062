"""A rule that may lose so much of the target's logits in one request, and no more."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import register_rule
from ..round import Verdict, Verified
from ..validation import check_int, check_number
from .base import AcceptanceRule, RuleRun


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

    def start(self, prompts: Sequence[torch.Tensor]) -> "RegretRun":
        return RegretRun(self, torch.zeros(len(prompts), device=prompts[0].device))

    def regrets(self, verified: Verified) -> torch.Tensor:
        """max z − z(x) of each drafted token, and 0 for the argmax itself, (B, γ)."""
        choice = verified.argmax[:, : verified.draft.gamma, None]
        regret = verified.logits.gather(-1, choice).squeeze(-1) - verified.at_tokens(verified.logits)
        return regret.masked_fill(self.matches(verified), 0.0)


class RegretRun(RuleRun):
    """What the requests of a call have spent."""

    rule: RegretBudget

    def __init__(self, rule: RegretBudget, spent: torch.Tensor):
        """`spent`: of every row of the call, (rows,) float32."""
        super().__init__(rule)
        self.spent = spent

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        rule, own, regret = self.rule, self.rule.matches(verified), self.rule.regrets(verified)
        if rule.budget == 0:
            return own  # an exact tie costs nothing, and is a mismatch all the same
        left = verified.sent[:, None] - torch.arange(regret.shape[1], device=regret.device)
        fits = self.spent[verified.row_ids][:, None] + regret.cumsum(dim=1) <= rule.budget
        fits &= (regret <= rule.local * left.clamp(min=1)) & regret.isfinite()
        if rule.per_block is not None:
            fits &= (~own).long().cumsum(dim=1) <= rule.per_block
        return own | fits

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        own = verdict.lossy & self.accepts(verified, verdict.coins)  # in a union, others may have accepted some
        self.spent[verified.row_ids] += self.rule.regrets(verified).masked_fill(~own, 0.0).sum(dim=1)

    def take(self, row: int, other: RuleRun) -> None:
        assert isinstance(other, RegretRun)
        self.spent[row] = other.spent[0]


register_rule(
    "regret_budget", RegretBudget, guarantee="lossy", neutral={"budget": 0.0}, neutral_text="budget = 0, or per_block = 0", paper="2608.03447",
    summary="Accept mismatches while the regret that a request has spent on them stays within its budget.",
    example={"budget": 0.5},
    ladder=("budget", (0.5, 1.0, 2.0, 4.0)),
)  # fmt: skip
