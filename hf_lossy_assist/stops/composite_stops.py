"""Stops made of several: any of them, all of them."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ..artifacts.features import FeatureSpec
from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int, shown
from .base import DraftStop, StopRun, check_stop


@dataclass(frozen=True)
class CompositeStop(DraftStop):
    """The base of stops made of several, `stops`. Their heads must read one hidden state, for a round has one."""

    stops: tuple[DraftStop, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.stops, Sequence) or isinstance(self.stops, str) or not self.stops:
            raise TypeError(f"{name}.stops: expected a list of stops, got {shown(self.stops)}")
        for stop in self.stops:
            check_stop(f"{name}.stops", stop)
        object.__setattr__(self, "stops", tuple(self.stops))
        specs = [stop.features for stop in self.stops if stop.features is not None]
        # The state that predicts a token is the one that encodes the token before it: the position may differ.
        if len({(spec.model, spec.layer, spec.norm) for spec in specs}) > 1:
            raise ValueError(f"{name}.stops: their heads must read one hidden state, got {'; '.join(map(str, specs))}")

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return 1 + max(stop.depth for stop in self.stops)

    @cached_property
    def adaptive(self) -> bool:  # type: ignore[override]
        return any(stop.adaptive for stop in self.stops)

    @cached_property
    def features(self) -> FeatureSpec | None:  # type: ignore[override]
        return next((stop.features for stop in self.stops if stop.features is not None), None)

    @cached_property
    def patience(self) -> float:  # type: ignore[override]
        return min(stop.patience for stop in self.stops)

    @cached_property
    def joint(self) -> bool:  # type: ignore[override]
        return any(stop.joint for stop in self.stops)

    def with_longest(self, gamma: int) -> Any:
        return replace(self, stops=tuple(stop.with_longest(gamma) for stop in self.stops))

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        for stop in self.stops:
            stop.check(target, draft, tokenizer)


class CompositeStopRun(StopRun):
    """`parts`: the runs of the stops. What they answer together, a subclass decides."""

    settings: CompositeStop

    def __init__(self, settings: CompositeStop, rows: int):
        super().__init__(settings)
        self.parts = [stop.start(rows) for stop in settings.stops]

    def pair(self, target: Any, draft: Any, kind: Hashable) -> None:
        for part in self.parts:
            part.pair(target, draft, kind)

    def drafting(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.drafting(rows)

    def part_limits(self, rows: list[int]) -> list[tuple[int, ...]]:
        """Begin the round of every part; for each of `rows`, the limit of each part."""
        return list(zip(*(part.begin_round(rows) for part in self.parts), strict=True))

    def part_stops(
        self, input_ids: torch.Tensor, scores: Any, rows: Sequence[int], features: torch.Tensor | None
    ) -> torch.Tensor:
        """Each part's answer for each row, `(parts, B)` bool."""
        answers = [part.after_token(input_ids, scores, rows=rows, features=features) for part in self.parts]
        return torch.stack([answer.to(input_ids.device) for answer in answers])

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for part in self.parts:
            part.observe(rows, drafted, accepted)

    def take(self, row: int, other: StopRun) -> None:
        assert isinstance(other, CompositeStopRun)
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.take(row, theirs)

    def interrupted(self) -> None:
        for part in self.parts:
            part.interrupted()


@dataclass(frozen=True)
class AnyOf(CompositeStop):
    """Stop where any of `stops` would; the shortest of their limits counts."""

    @property
    def longest(self) -> int:
        return min(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "AnyOfRun":
        return AnyOfRun(self, rows)


class AnyOfRun(CompositeStopRun):
    """The shortest limit, and a stop as soon as one part stops."""

    def begin_round(self, rows: list[int]) -> list[int]:
        return [min(limits) for limits in self.part_limits(rows)]

    def after_token(
        self, input_ids: torch.Tensor, scores: Any, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.part_stops(input_ids, scores, rows, features).any(dim=0)


@dataclass(frozen=True)
class AllOf(CompositeStop):
    """Stop after a token after which each of `stops` would; one that has reached its limit would from then on."""

    @property
    def longest(self) -> int:
        return max(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "AllOfRun":
        return AllOfRun(self, rows)


class AllOfRun(CompositeStopRun):
    """`drafted`: tokens of this round so far; `planned`: the limit of each part in this round, by row."""

    def __init__(self, settings: AllOf, rows: int):
        super().__init__(settings, rows)
        self.drafted = 0
        self.planned: dict[int, tuple[int, ...]] = {}

    def begin_round(self, rows: list[int]) -> list[int]:
        self.drafted = 0
        self.planned = dict(zip(rows, self.part_limits(rows), strict=True))
        return [max(self.planned[row]) for row in rows]

    def after_token(
        self, input_ids: torch.Tensor, scores: Any, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.drafted += 1
        finished = (0,) * len(self.parts)  # finished rows have no plan, and their answers do not matter
        limits = [self.planned.get(row, finished) for row in rows]
        at_limit = torch.tensor(limits, device=input_ids.device).T <= self.drafted  # (parts, B)
        return (self.part_stops(input_ids, scores, rows, features) | at_limit).all(dim=0)


@dataclass(frozen=True)
class WrappingStop(DraftStop):
    """The base of stops that wrap another one, `stop`, and need of models and of the engine what that one needs."""

    stop: DraftStop

    def __post_init__(self) -> None:
        check_stop(f"{type(self).__name__}.stop", self.stop)

    @cached_property
    def depth(self) -> int:  # type: ignore[override]
        return 1 + self.stop.depth

    @cached_property
    def adaptive(self) -> bool:  # type: ignore[override]
        return self.stop.adaptive

    @cached_property
    def features(self) -> FeatureSpec | None:  # type: ignore[override]
        return self.stop.features

    @cached_property
    def patience(self) -> float:  # type: ignore[override]
        return self.stop.patience

    @cached_property
    def joint(self) -> bool:  # type: ignore[override]
        return self.stop.joint

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        self.stop.check(target, draft, tokenizer)

    def start(self, rows: int) -> "WrappingRun":
        return WrappingRun(self, rows)


class WrappingRun(StopRun):
    """Passes every call on to `inner`, the run of the wrapped stop."""

    settings: WrappingStop

    def __init__(self, settings: WrappingStop, rows: int):
        super().__init__(settings)
        self.inner = settings.stop.start(rows)

    def pair(self, target: Any, draft: Any, kind: Hashable) -> None:
        self.inner.pair(target, draft, kind)

    def begin_round(self, rows: list[int]) -> list[int]:
        return self.inner.begin_round(rows)

    def drafting(self, rows: Sequence[int]) -> None:
        self.inner.drafting(rows)

    def after_token(
        self, input_ids: torch.Tensor, scores: Any, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self.inner.after_token(input_ids, scores, rows=rows, features=features)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        self.inner.observe(rows, drafted, accepted)

    def take(self, row: int, other: StopRun) -> None:
        assert isinstance(other, WrappingRun)
        self.inner.take(row, other.inner)

    def interrupted(self) -> None:
        self.inner.interrupted()


@dataclass(frozen=True)
class AtLeast(WrappingStop):
    """`stop`, but never before `n` tokens: its answers for earlier tokens are ignored, and its limit is at least `n`."""

    n: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("AtLeast.n", self.n, 1, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return max(self.stop.longest, self.n)

    def with_longest(self, gamma: int) -> "AtLeast":
        return AtLeast(self.stop.with_longest(gamma), min(self.n, gamma))

    def start(self, rows: int) -> "AtLeastRun":
        return AtLeastRun(self, rows)


class AtLeastRun(WrappingRun):
    """`drafted`: tokens of this round so far, the same for all rows."""

    settings: AtLeast

    def __init__(self, settings: AtLeast, rows: int):
        super().__init__(settings, rows)
        self.drafted = 0

    def begin_round(self, rows: list[int]) -> list[int]:
        self.drafted = 0
        return [max(limit, self.settings.n) for limit in super().begin_round(rows)]

    def after_token(
        self, input_ids: torch.Tensor, scores: Any, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.drafted += 1
        stops = super().after_token(input_ids, scores, rows=rows, features=features)  # always asked: it may count too
        return stops if self.drafted >= self.settings.n else torch.zeros_like(stops)


register_stop(
    "any_of", AnyOf, example={"stops": ["svip", "constant"]},
    summary="Stop where any of `stops` would.",
)  # fmt: skip
register_stop(
    "all_of", AllOf, example={"stops": ["svip", "constant"]},
    summary="Stop after a token after which each of `stops` would.",
)  # fmt: skip
register_stop(
    "at_least", AtLeast, example={"stop": "svip"},
    summary="`stop`, but never before `n` tokens: its answers for earlier tokens are ignored, and its limit is at least `n`.",
)  # fmt: skip
