"""Rules composed of other rules."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..artifacts.features import FeatureSpec
from ..round import Verdict, Verified, lazy_property
from ..validation import check_nesting, shown
from .base import SCOPES, AcceptanceRule, RuleRun, accepted_by


def widest_scope(at_least: str) -> lazy_property[str]:
    """Return a cached property: the widest `scope` of nested rules and `at_least`."""
    return lazy_property(lambda rule: max((at_least, *(inner.scope for inner in rule.parts)), key=SCOPES.index))


def any_part(name: str) -> lazy_property[bool]:
    """Return a cached property: whether any nested rule has the attribute `name`."""
    return lazy_property(lambda rule: any(getattr(inner, name) for inner in rule.parts))


@dataclass(frozen=True)
class CompositeRule(AcceptanceRule):
    """The base of rules composed of others, `parts`, whose requirements and modes they combine; computed once for each object."""

    needs_draft_probs = any_part("needs_draft_probs")
    trusts_stop = any_part("trusts_stop")
    needs_coins = any_part("needs_coins")

    def __post_init__(self) -> None:
        super().__post_init__()
        for rule in self.parts:
            if not isinstance(rule, AcceptanceRule):
                raise TypeError(f"{type(self).__name__}: expected a rule such as TopK(4), got {shown(rule)}")
            if not rule.nestable:
                raise ValueError(
                    f"{type(rule).__name__} decides alone and cannot be combined: use it as the rule itself"
                )
        check_nesting(type(self).__name__, self.depth)

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        """The nested rules."""
        raise NotImplementedError

    @lazy_property
    def depth(self) -> int:
        """The levels of nested composite rules."""
        return 1 + max((inner.depth if isinstance(inner, CompositeRule) else 0 for inner in self.parts), default=-1)

    @lazy_property
    def lossless(self) -> bool:
        return all(rule.lossless for rule in self.parts)

    @lazy_property
    def modes(self) -> tuple[str, ...]:
        return tuple(mode for mode in AcceptanceRule.modes if all(mode in rule.modes for rule in self.parts))

    @lazy_property
    def features(self) -> FeatureSpec | None:
        return next((rule.features for rule in self.parts if rule.features is not None), None)

    def judge(self, features: torch.Tensor) -> torch.Tensor:
        return next(rule for rule in self.parts if rule.features is not None).judge(features)

    def check_mode(self, sampling: bool) -> None:
        for rule in self.parts:
            rule.check_mode(sampling)


class Union(
    CompositeRule,
    name="union",
    condition="as the rules inside",
    neutral={"rules": [{"name": "top_k", "k": 0}, {"name": "lenience", "lenience": 1.0}]},
    neutral_text="each of them neutral",
    example={"rules": ["typical", {"name": "top_k", "k": 4}]},
):
    """Accept what any of several rules accepts with the same coins; after a rejection use the first rule's correction.

    a = max of the rules' a; r and the greedy correction are the first rule's.
    Lossless iff all are.

    Args:
        rules (`AcceptanceRule`s): at least one, at most one with a trained head, with a common decoding mode.
    """

    rules: tuple[AcceptanceRule, ...]
    accepts_all_strict = any_part("accepts_all_strict")
    scope = widest_scope("position")

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        super().__post_init__()
        if sum(rule.features is not None for rule in self.rules) > 1:
            raise ValueError("Union.rules: two of them have a trained head, and a round asks one head: leave one out")

    @property
    def parts(self) -> tuple[AcceptanceRule, ...]:
        return self.rules

    def start(self, prompts: Sequence[torch.Tensor]) -> "UnionRun":
        return UnionRun(self, [rule.start(prompts) for rule in self.rules])


class UnionRun(RuleRun):
    """The runs of a union's rules."""

    def __init__(self, rule: Union, runs: Sequence[RuleRun]):
        super().__init__(rule)
        self.runs = runs

    def accepts(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([accepted_by(run, verified, coins) for run in self.runs]).any(dim=0)

    def unchecked(self, verified: Verified, coins: torch.Tensor | None) -> torch.Tensor | None:
        # torch.compile cannot trace := in a comprehension.
        masks = [run.unchecked(verified, coins) for run in self.runs]
        unchecked = [tokens for tokens in masks if tokens is not None]
        return torch.stack(unchecked).any(dim=0) if unchecked else None

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
        for run, other_run in zip(self.runs, other.runs, strict=True):
            run.take(row, other_run)
