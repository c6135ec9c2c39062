"""Stops made of stops: at least n tokens, any of several, all of several."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..artifacts.features import FeatureSpec
from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int, check_nesting, shown
from .base import DraftStop, numbers


@dataclass(frozen=True)
class Around(DraftStop):
    """The base of stops around another one: what they need of models and of the engine is what that one needs."""

    stop: DraftStop

    def __post_init__(self) -> None:
        _check_stop(f"{type(self).__name__}.stop", self.stop)

    @cached_property
    def depth(self) -> int:
        """How many stops stand inside one another."""
        return 1 + _depth_of(self.stop)

    @cached_property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.stop.adaptive

    @cached_property
    def features(self) -> FeatureSpec | None:  # type: ignore[override]
        return self.stop.features

    @cached_property
    def patience(self) -> float:  # type: ignore[override]
        return self.stop.patience

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        self.stop.check(target, draft, tokenizer)


@dataclass(frozen=True)
class AtLeast(Around):
    """`stop`, but never before `n` tokens: what it says of earlier ones is not heeded, and its limit is at least `n`."""

    n: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("AtLeast.n", self.n, 1, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return max(self.stop.longest, self.n)

    def with_longest(self, gamma: int) -> "AtLeast":
        return AtLeast(self.stop.with_longest(gamma), min(self.n, gamma))

    def start(self, rows: int) -> "_AtLeastRun":
        return _AtLeastRun(self.stop.start(rows), self.n)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise TypeError("AtLeast counts the tokens of a round: call start(rows), and limits(rows) before each round")


@dataclass(frozen=True, eq=False)
class _AtLeastRun(AtLeast):
    drafted: list[int] = field(default_factory=lambda: [0])  # in this round, so far

    def limits(self, rows: list[int]) -> list[int]:
        self.drafted[0] = 0
        return [max(limit, self.n) for limit in self.stop.limits(rows)]

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        self.stop.observe(rows, drafted, accepted)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.drafted[0] += 1
        says = self.stop(input_ids, scores, **kwargs)  # asked in any case: it may count too
        return says if self.drafted[0] >= self.n else torch.zeros_like(says)


@dataclass(frozen=True)
class _Several(DraftStop):
    stops: tuple[DraftStop, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.stops, Sequence) or isinstance(self.stops, str) or not self.stops:
            raise TypeError(f"{name}.stops: expected a list of stops, got {shown(self.stops)}")
        for stop in self.stops:
            _check_stop(f"{name}.stops", stop)
        object.__setattr__(self, "stops", tuple(self.stops))
        specs = [stop.features for stop in self.stops if stop.features is not None]
        # The state that predicts a token is the one that encodes the token before it: the position may differ.
        if len({(spec.model, spec.layer, spec.norm) for spec in specs}) > 1:
            raise ValueError(f"{name}.stops: their heads must read one hidden state, got {'; '.join(map(str, specs))}")

    @cached_property
    def depth(self) -> int:
        """How many stops stand inside one another."""
        return 1 + max(map(_depth_of, self.stops))

    @cached_property
    def adaptive(self) -> bool:  # type: ignore[override]
        return any(stop.adaptive for stop in self.stops)

    @cached_property
    def features(self) -> FeatureSpec | None:  # type: ignore[override]
        return next((stop.features for stop in self.stops if stop.features is not None), None)

    @cached_property
    def patience(self) -> float:  # type: ignore[override]
        return min(stop.patience for stop in self.stops)

    def with_longest(self, gamma: int) -> Any:
        return replace(self, stops=tuple(stop.with_longest(gamma) for stop in self.stops))

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        for stop in self.stops:
            stop.check(target, draft, tokenizer)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for stop in self.stops:
            stop.observe(rows, drafted, accepted)


@dataclass(frozen=True)
class AnyOf(_Several):
    """Stop where any of `stops` would; the shortest of their limits counts."""

    @property
    def longest(self) -> int:
        return min(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "AnyOf":
        return AnyOf(tuple(stop.start(rows) for stop in self.stops))

    def limits(self, rows: list[int]) -> list[int]:
        return [min(own) for own in zip(*(stop.limits(rows) for stop in self.stops), strict=True)]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        says = [stop(input_ids, scores, **kwargs).to(input_ids.device) for stop in self.stops]
        return torch.stack(says).any(dim=0)


@dataclass(frozen=True)
class AllOf(_Several):
    """Stop after a token after which each of `stops` would; one that has reached its limit would from then on."""

    @property
    def longest(self) -> int:
        return max(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "_AllOfRun":
        return _AllOfRun(tuple(stop.start(rows) for stop in self.stops))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        raise TypeError("AllOf counts the tokens of a round: call start(rows), and limits(rows) before each round")


@dataclass(frozen=True, eq=False)
class _AllOfRun(AllOf):
    drafted: list[int] = field(default_factory=lambda: [0])  # in this round, so far
    planned: dict[int, tuple[int, ...]] = field(default_factory=dict)  # row → the limit of each stop in this round

    def limits(self, rows: list[int]) -> list[int]:
        self.drafted[0] = 0
        self.planned.clear()
        self.planned.update(zip(rows, zip(*(stop.limits(rows) for stop in self.stops), strict=True), strict=True))
        return [max(self.planned[row]) for row in rows]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.drafted[0] += 1
        none = (0,) * len(self.stops)  # finished rows have no plan, and what is said of them does not matter
        limits = [self.planned.get(row, none) for row in numbers(input_ids, kwargs)]
        over = torch.tensor(limits, device=input_ids.device).T <= self.drafted[0]  # (stops, B)
        says = [stop(input_ids, scores, **kwargs).to(input_ids.device) for stop in self.stops]
        return (torch.stack(says) | over).all(dim=0)


def _check_stop(name: str, value: Any) -> None:
    if not isinstance(value, DraftStop):
        raise TypeError(f"{name}: expected a stop such as SVIP(), got {shown(value)}")
    check_nesting(name, _depth_of(value) + 1)


def _depth_of(stop: DraftStop) -> int:
    return stop.depth if isinstance(stop, Around | _Several) else 0


register_stop(
    "at_least", AtLeast, example={"stop": "svip"},
    summary="`stop`, but never before `n` tokens: what it says of earlier ones is not heeded, and its limit is at least `n`.",
)  # fmt: skip
register_stop(
    "any_of", AnyOf, example={"stops": ["svip", "constant"]},
    summary="Stop where any of `stops` would.",
)  # fmt: skip
register_stop(
    "all_of", AllOf, example={"stops": ["svip", "constant"]},
    summary="Stop after a token after which each of `stops` would.",
)  # fmt: skip
