"""Stops composed of others: any, all, at least n tokens."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..registry import register_stop
from ..tensors import on_device
from ..validation import LONGEST_DRAFT, check_int, shown
from .base import DraftStop, Scores, StopRun, check_stop


def over_parts(combine: Callable[[Iterable[Any]], Any], name: str) -> Any:
    """Return a cached property that combines attribute `name` of the nested stops."""
    return cached_property(lambda stop: combine(getattr(part, name) for part in stop.parts))


@dataclass(frozen=True)
class CompositeStop(DraftStop):
    """The base of stops composed of others, `parts`, whose requirements they combine."""

    depth = over_parts(lambda depths: 1 + max(depths), "depth")
    adaptive = over_parts(any, "adaptive")
    features = over_parts(lambda specs: next((spec for spec in specs if spec is not None), None), "features")
    reads_confidence = over_parts(any, "reads_confidence")
    patience = over_parts(min, "patience")
    joint = over_parts(any, "joint")

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        """The nested stops."""
        raise NotImplementedError(f"{type(self).__name__} needs a property parts")

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        for part in self.parts:
            part.check(target, draft, tokenizer)


class CompositeStopRun(StopRun):
    """The run of a composite: forwards calls to `parts`, the nested runs, and returns the first one's results; subclasses combine them."""

    settings: CompositeStop

    def __init__(self, settings: CompositeStop, rows: int):
        super().__init__(settings)
        self.parts = [part.start(rows) for part in settings.parts]

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        for part in self.parts:
            part.pair(target, draft, kind)

    def begin_round(self, rows: list[int]) -> list[int]:
        return self.parts[0].begin_round(rows)

    @property
    def may_run_ahead(self) -> bool:
        return self.is_of_package and all(part.may_run_ahead for part in self.parts)

    def drafting(self, rows: Sequence[int]) -> None:
        for part in self.parts:
            part.drafting(rows)

    def stopped(self, stops: torch.Tensor) -> None:
        for part in self.parts:
            part.stopped(stops)

    def read(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Let a joint part read what it needs in the same device sync."""
        readers = [part for part in self.parts if part.settings.joint]
        return [part.read(answers) for part in readers][0] if readers else super().read(answers)

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        return self.parts[0].after_token(input_ids, scores, rows=rows, **more)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for part in self.parts:
            part.observe(rows, drafted, accepted)

    def take(self, row: int, other: StopRun) -> None:
        assert isinstance(other, CompositeStopRun)
        for part, other_part in zip(self.parts, other.parts, strict=True):
            part.take(row, other_part)

    def interrupted(self) -> None:
        for part in self.parts:
            part.interrupted()

    def part_limits(self, rows: list[int]) -> list[tuple[int, ...]]:
        """Begin the round of every part; return the parts' limits for each of `rows`."""
        return list(zip(*(part.begin_round(rows) for part in self.parts), strict=True))

    def part_stops(
        self, input_ids: torch.Tensor, scores: Scores, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        """Return each part's answer for each row, (parts, B) bool."""
        answers = [part.after_token(input_ids, scores, rows=rows, **more) for part in self.parts]
        return torch.stack([answer.to(input_ids.device) for answer in answers])


@dataclass(frozen=True)
class CombinedStop(CompositeStop):
    """The base of stops composed of several, `stops`. Their heads must read the same hidden state, since a round provides one."""

    stops: tuple[DraftStop, ...]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.stops, Sequence) or isinstance(self.stops, str) or not self.stops:
            raise TypeError(f"{name}.stops: expected a list of stops, got {shown(self.stops)}")
        for stop in self.stops:
            check_stop(f"{name}.stops", stop)
        object.__setattr__(self, "stops", tuple(self.stops))
        specs = [stop.features for stop in self.stops if stop.features is not None]
        # Positions may differ: the state that predicts a token encodes the token before it.
        if len({(spec.model, spec.layer, spec.norm) for spec in specs}) > 1:
            raise ValueError(f"{name}.stops: their heads must read one hidden state, got {'; '.join(map(str, specs))}")
        if specs and any(stop.reads_confidence for stop in self.stops):
            raise ValueError(
                f"{name}.stops: a head and the drafter's own confidence cannot be read together: take one of them"
            )

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        return self.stops

    def with_longest(self, gamma: int) -> DraftStop:
        return replace(self, stops=tuple(stop.with_longest(gamma) for stop in self.stops))


@dataclass(frozen=True)
class AnyOf(CombinedStop):
    """Stop when any of `stops` would; the lowest of their limits applies."""

    @property
    def longest(self) -> int:
        return min(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "AnyOfRun":
        return AnyOfRun(self, rows)


class AnyOfRun(CompositeStopRun):
    """The run of `AnyOf`: the lowest limit, and a stop as soon as one part stops."""

    def begin_round(self, rows: list[int]) -> list[int]:
        return [min(limits) for limits in self.part_limits(rows)]

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        return self.part_stops(input_ids, scores, rows, **more).any(dim=0)


@dataclass(frozen=True)
class AllOf(CombinedStop):
    """Stop when all of `stops` would; a stop that has reached its limit counts as stopped."""

    @property
    def longest(self) -> int:
        return max(stop.longest for stop in self.stops)

    def start(self, rows: int) -> "AllOfRun":
        return AllOfRun(self, rows)


class AllOfRun(CompositeStopRun):
    """The run of `AllOf`. `drafted`: tokens drafted in this round; `planned`: the limit of each part in this round, by row."""

    def __init__(self, settings: AllOf, rows: int):
        super().__init__(settings, rows)
        self.drafted = 0
        self.planned: dict[int, tuple[int, ...]] = {}

    def begin_round(self, rows: list[int]) -> list[int]:
        self.drafted = 0
        self.planned = dict(zip(rows, self.part_limits(rows), strict=True))
        return [max(self.planned[row]) for row in rows]

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        self.drafted += 1
        finished = (0,) * len(self.parts)  # finished rows have no plan; their answers are ignored
        limits = [self.planned.get(row, finished) for row in rows]
        at_limit = torch.stack([on_device(one, input_ids.device) for one in zip(*limits, strict=True)]) <= self.drafted
        return (self.part_stops(input_ids, scores, rows, **more) | at_limit).all(dim=0)


@dataclass(frozen=True)
class WrappingStop(CompositeStop):
    """The base of stops that wrap another one, `stop`."""

    stop: DraftStop

    def __post_init__(self) -> None:
        check_stop(f"{type(self).__name__}.stop", self.stop)

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        return (self.stop,)

    def start(self, rows: int) -> CompositeStopRun:
        return CompositeStopRun(self, rows)


@dataclass(frozen=True)
class AtLeast(WrappingStop):
    """Stop when `stop` would, but never before `n` tokens: earlier answers are ignored, and the limit is at least `n`."""

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


class AtLeastRun(CompositeStopRun):
    """The run of `AtLeast`. `drafted`: tokens drafted in this round, the same for all rows."""

    settings: AtLeast

    def __init__(self, settings: AtLeast, rows: int):
        super().__init__(settings, rows)
        self.drafted = 0

    def begin_round(self, rows: list[int]) -> list[int]:
        self.drafted = 0
        return [max(limit, self.settings.n) for limit in super().begin_round(rows)]

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        self.drafted += 1
        stops = super().after_token(input_ids, scores, rows=rows, **more)  # always called: it may have state
        return stops if self.drafted >= self.settings.n else torch.zeros_like(stops)


register_stop("any_of", AnyOf, example={"stops": ["svip", "constant"]})
register_stop("all_of", AllOf, example={"stops": ["svip", "constant"]})
register_stop("at_least", AtLeast, example={"stop": "svip"})
