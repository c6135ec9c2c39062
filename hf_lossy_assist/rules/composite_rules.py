"""Rules made of other rules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..artifacts.features import FeatureSpec
from ..registry import register_rule
from ..round import Verdict, Verified, lazy_property
from ..validation import check_nesting, shown
from .base import AcceptanceRule, RuleRun, accepted_by


def check_part(name: str, rule: Any) -> None:
    """Refuse what cannot stand inside another rule."""
    if not isinstance(rule, AcceptanceRule):
        raise TypeError(f"{name}: expected a rule such as TopK(4), got {shown(rule)}")
    if not rule.nestable:
        raise ValueError(
            f"{name}: {type(rule).__name__} decides alone and cannot be combined: use it as the rule itself"
        )
    check_nesting(name, depth_of(rule) + 1)


def depth_of(rule: AcceptanceRule) -> int:
    """How many rules stand inside one another in it."""
    return rule.depth if isinstance(rule, CompositeRule) else 0


@dataclass(frozen=True)
class CompositeRule(AcceptanceRule):
    """The base of rules with rules inside: what it needs, and what it can do, is what they need and can do.

    All of that is worked out once: each rule asks those inside it several times, and they those inside them.
    """

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        """The rules inside."""
        raise NotImplementedError(f"{type(self).__name__} needs a property parts")

    @lazy_property
    def depth(self) -> int:
        """How many rules stand inside one another."""
        return 1 + max(map(depth_of, self.parts))

    @lazy_property
    def lossless(self) -> bool:
        return all(rule.lossless for rule in self.parts)

    @lazy_property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in AcceptanceRule.modes if all(mode in rule.modes for rule in self.parts))

    @lazy_property
    def needs_draft_probs(self) -> bool:
        return any(rule.needs_draft_probs for rule in self.parts)

    @lazy_property
    def trusts_stop(self) -> bool:
        return any(rule.trusts_stop for rule in self.parts)

    @lazy_property
    def needs_coins(self) -> bool:
        return any(rule.needs_coins for rule in self.parts)

    @lazy_property
    def features(self) -> FeatureSpec | None:
        return next((rule.features for rule in self.parts if rule.features is not None), None)

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        return next(rule for rule in self.parts if rule.features is not None).judge(features)

    def check_mode(self, sampling: bool) -> None:
        for rule in self.parts:
            rule.check_mode(sampling)


@dataclass(frozen=True)
class Union(CompositeRule):
    """Accept what any of several rules accepts under the same coins; after a rejection the first rule says what follows.

    a = max of theirs, r = that of the first one (equal for all but `Ensemble`, `Cascade` and `Mentored`). Lossless iff all are.
    Neutral: each of them neutral.

    Args:
        rules (`AcceptanceRule`s): at least one, at most one with a trained head, all for one kind of decoding.
    """

    rules: tuple[AcceptanceRule, ...]

    def __post_init__(self) -> None:
        if isinstance(self.rules, str) or not isinstance(self.rules, Sequence) or not self.rules:
            raise TypeError(
                f"Union.rules: expected several rules such as (TopK(4), Typical()), got {shown(self.rules)}"
            )
        object.__setattr__(self, "rules", tuple(self.rules))
        for rule in self.rules:
            check_part("Union.rules", rule)
        if not self.modes:
            names = ", ".join(f"{type(rule).__name__} ({' and '.join(rule.modes)})" for rule in self.rules)
            raise ValueError(f"Union.rules: no kind of decoding has all of them: {names}")
        if sum(rule.features is not None for rule in self.rules) > 1:
            raise ValueError("Union.rules: two of them have a trained head, and a round asks one head: leave one out")

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        return self.rules

    @lazy_property
    def accepts_all_strict(self) -> bool:
        return any(rule.accepts_all_strict for rule in self.rules)

    def start(self, prompts: Sequence[torch.Tensor]) -> "UnionRun":
        return UnionRun(self, [rule.start(prompts) for rule in self.rules])


class UnionRun(RuleRun):
    """The rules of a union at work, each with what it counts."""

    def __init__(self, rule: Union, runs: Sequence[RuleRun]):
        super().__init__(rule)
        self.runs = runs

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([accepted_by(run, verified, coins) for run in self.runs]).any(dim=0)

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        said = [run.unchecked(verified, coins) for run in self.runs]
        own = [unchecked for unchecked in said if unchecked is not None]
        return torch.stack(own).any(dim=0) if own else None

    def choice(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        return self.runs[0].choice(verified, coins, at)

    def correction(self, verified: Verified, coins: torch.Tensor | None, at: torch.Tensor) -> torch.Tensor:
        return self.runs[0].correction(verified, coins, at)

    @property
    def keeps_state(self) -> bool:
        return any(run.keeps_state for run in self.runs)

    def observe(self, verified: Verified, verdict: Verdict) -> None:
        for run in self.runs:
            run.observe(verified, verdict)

    def take(self, row: int, other: RuleRun) -> None:
        assert isinstance(other, UnionRun)
        for mine, theirs in zip(self.runs, other.runs, strict=True):
            mine.take(row, theirs)


register_rule(
    "union", Union, guarantee="depends", condition="as the rules inside",
    summary="Accept what any of several rules accepts under the same coins.",
    neutral={"rules": [{"name": "top_k", "k": 0}, {"name": "lenience", "lenience": 1.0}]}, neutral_text="each of them neutral", example={"rules": ["typical", {"name": "top_k", "k": 4}]},
)  # fmt: skip
