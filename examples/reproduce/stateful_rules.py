"""Lossy rules with state across the rounds of a request, added as a user adds a rule: repeated mismatches, and a budget of regret.

Importing this module registers their names. On the command line:

    python examples/reproduce/stateful_rules.py compare --policies strict,csd:ratio=0.2,regret_budget:budget=2.06 …
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

import torch

import hf_lossy_assist as hla


Pair = tuple[int, int]


class CSD(
    hla.AcceptanceRule, name="csd", neutral={"ratio": 1.0}, paper="2604.13634", ladder=("ratio", (0.8, 0.6, 0.4, 0.2))
):
    """Accept a mismatch that occurred before, if the target finds the drafted token almost as likely as its first choice.

    A mismatch is a pair of the target's choice y = argmax p and the drafted x. a(x) = 1 where x was rejected for y at
    least `seen` times and p(x) > `ratio`·p(y), else strict; greedy: the same; r = norm((p − q)⁺) (calibrated speculative
    decoding, huggingface.co/papers/2604.13634). A row counts only the rejections of this call, besides the pairs of
    `known`. Neutral: ratio 1.

    Args:
        ratio: of probabilities, 0 to 1.
        seen: rejections after which a pair is accepted. The default is this package's.
        known: pairs (y, x) of token ids that are accepted from the start, such as those of earlier calls.
    """

    ratio: float
    seen: int = 2
    known: tuple[Pair, ...] = ()
    scope: ClassVar[str] = "position"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "known", tuple((y, x) for y, x in self.known))  # from JSON they are lists

    def start(self, prompts: Sequence[torch.Tensor]) -> "CSDRun":
        return CSDRun(self)

    def find_near(self, verified: hla.Verified) -> torch.Tensor:
        """Return where p(x) > `ratio`·p(y), (B, γ) bool."""
        choice = verified.argmax[:, : verified.draft.gamma, None]
        best = verified.logits.gather(-1, choice).squeeze(-1)
        return (verified.at_tokens(verified.logits) - best).exp() > self.ratio


class CSDRun(hla.RuleRun):
    """The rejected pairs of a call, by row."""

    rule: CSD

    def __init__(self, rule: CSD):
        super().__init__(rule)
        self.rejected: dict[int, Counter[Pair]] = {}  # by row of the call

    def accepts(self, verified: hla.Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return self.rule.accepts(verified, coins) | (self._find_known(verified) & self.rule.find_near(verified))

    def observe(self, verified: hla.Verified, verdict: hla.Verdict) -> None:
        ended = zip(verified.row_ids.tolist(), verdict.accepted.tolist(), verified.sent.tolist(), strict=True)
        pairs = self._list_pairs(verified)
        for b, (row, accepted, sent) in enumerate(ended):
            if accepted < sent and pairs[b][accepted][0] != pairs[b][accepted][1]:
                self.rejected.setdefault(row, Counter())[pairs[b][accepted]] += 1

    def take(self, row, other):
        self.rejected[row] = other.rejected.get(0, Counter())

    def _find_known(self, verified: hla.Verified) -> torch.Tensor:
        """Return which drafted tokens form a known pair, (B, γ) bool."""
        known_pairs, out = set(self.rule.known), torch.zeros_like(verified.tokens, dtype=torch.bool)
        for b, (row, pairs) in enumerate(zip(verified.row_ids.tolist(), self._list_pairs(verified), strict=True)):
            seen = self.rejected.get(row, Counter())
            for i, pair in enumerate(pairs):
                out[b, i] = pair in known_pairs or seen[pair] >= self.rule.seen
        return out

    @staticmethod
    def _list_pairs(verified: hla.Verified) -> list[list[Pair]]:
        """Return (y, x) at each position of each row."""
        choices = verified.argmax[:, : verified.draft.gamma].tolist()
        return [list(zip(ys, xs, strict=True)) for ys, xs in zip(choices, verified.tokens.tolist(), strict=True)]


class RegretBudget(
    hla.AcceptanceRule,
    name="regret_budget",
    neutral={"budget": 0.0},
    neutral_text="budget = 0, or per_block = 0",
    paper="2608.03447",
    ladder=("budget", (0.5, 1.0, 2.0, 4.0)),
):
    """Accept mismatches while a request's total regret stays within a budget.

    The regret of x is max z − z(x), z the target's processed logits. Accept x where it is the argmax, or where the
    request's regrets, this one included, sum to at most `budget`, this one is at most `local` for each drafted token left
    (this one included), and x is at most the `per_block`-th mismatch of its draft (Feng et al., ASD,
    huggingface.co/papers/2608.03447, with a budget of 2.06 on GSM8K). For greedy decoding. A token that a processor
    forbids is never accepted. Neutral: budget = 0, or per_block = 0.
    """

    budget: float
    local: float = math.inf
    per_block: int | None = None
    modes: ClassVar[tuple[str, ...]] = ("greedy",)
    scope: ClassVar[str] = "prefix"

    def start(self, prompts: Sequence[torch.Tensor]) -> "RegretRun":
        return RegretRun(self, torch.zeros(len(prompts), device=prompts[0].device))

    def find_regrets(self, verified: hla.Verified) -> torch.Tensor:
        """Return max z − z(x) of each drafted token, and 0 for the argmax itself, (B, γ)."""
        choice = verified.argmax[:, : verified.draft.gamma, None]
        regret = verified.logits.gather(-1, choice).squeeze(-1) - verified.at_tokens(verified.logits)
        return regret.masked_fill(self.matches(verified), 0.0)


class RegretRun(hla.RuleRun):
    """The regret that each row has spent, (rows,) float32."""

    rule: RegretBudget

    def __init__(self, rule: RegretBudget, spent: torch.Tensor):
        super().__init__(rule)
        self.spent = spent

    def accepts(self, verified: hla.Verified, coins: torch.Tensor | None) -> torch.Tensor:
        rule, matches, regret = self.rule, self.rule.matches(verified), self.rule.find_regrets(verified)
        if rule.budget == 0:
            return matches  # an exact tie has no regret, but is a mismatch
        left = verified.sent[:, None] - torch.arange(regret.shape[1], device=regret.device)
        fits = self.spent[verified.row_ids][:, None] + regret.cumsum(dim=1) <= rule.budget
        fits &= (regret <= rule.local * left.clamp(min=1)) & regret.isfinite()
        if rule.per_block is not None:
            fits &= (~matches).long().cumsum(dim=1) <= rule.per_block
        return matches | fits

    def observe(self, verified: hla.Verified, verdict: hla.Verdict) -> None:
        lossy = verdict.lossy & self.accepts(verified, verdict.coins)  # in a union, others may have accepted some
        self.spent[verified.row_ids] += self.rule.find_regrets(verified).masked_fill(~lossy, 0.0).sum(dim=1)

    def take(self, row, other):
        self.spent[row] = other.spent[0]


if __name__ == "__main__":
    from hf_lossy_assist.cli import main

    main()
