"""Stops composed of others: any, all, at least n tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..registry.frozen import DraftLength
from ..tensors import on_device
from ..validation import check_nesting, shown
from .base import DraftStop, Scores, StopRun
from .constant import Constant


def over_parts(combine: Callable[[Iterable[Any]], Any], name: str) -> Any:
    """Return a cached property that combines attribute `name` of the nested stops."""
    return cached_property(lambda stop: combine(getattr(inner, name) for inner in stop.parts))


def to_parts(name: str) -> Callable[..., None]:
    """Return a method that calls the method `name` of every nested run."""

    def forward(run: "CompositeStopRun", *args: object) -> None:
        for inner in run.parts:
            getattr(inner, name)(*args)

    return forward


@dataclass(frozen=True)
class CompositeStop(DraftStop):
    """The base of stops composed of others, `parts`, whose requirements they combine."""

    depth = over_parts(lambda depths: 1 + max(depths, default=-1), "depth")
    adaptive = over_parts(any, "adaptive")
    features = over_parts(lambda specs: next((spec for spec in specs if spec is not None), None), "features")
    patience = over_parts(min, "patience")
    joint = over_parts(any, "joint")
    every: ClassVar[bool] = False  # all parts, rather than any, must stop

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        for inner in self.parts:
            if not isinstance(inner, DraftStop):
                raise TypeError(f"{name}: expected a stop such as SVIP(), got {shown(inner)}")
        check_nesting(name, self.depth)
        specs = [stop.features for stop in self.parts if stop.features is not None]
        # A round provides one state. Positions may differ: the state that predicts a token encodes the token before it.
        if len({(spec.model, spec.layer, spec.norm) for spec in specs}) > 1:
            raise ValueError(f"{name}: their heads must read one hidden state, got {'; '.join(map(str, specs))}")

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        """The nested stops."""
        raise NotImplementedError

    @property
    def longest(self) -> int:
        return (max if self.every else min)(stop.longest for stop in self.parts)

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        for inner in self.parts:
            inner.check(target, draft, tokenizer)


class CompositeStopRun(StopRun):
    """The run of a composite: forwards calls to `parts`, the nested runs, and returns the first one's results; subclasses combine them."""

    settings: CompositeStop

    def __init__(self, settings: CompositeStop, rows: int):
        super().__init__(settings)
        self.parts = [inner.start(rows) for inner in settings.parts]

    pair, drafting, stopped = to_parts("pair"), to_parts("drafting"), to_parts("stopped")
    observe, interrupted = to_parts("observe"), to_parts("interrupted")

    def begin_round(self, rows: list[int]) -> list[int]:
        return self.parts[0].begin_round(rows)

    @property
    def may_run_ahead(self) -> bool:
        return self.is_of_package and all(inner.may_run_ahead for inner in self.parts)

    def read(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Let a joint part read what it needs in the same device sync."""
        readers = [inner for inner in self.parts if inner.settings.joint]
        return [inner.read(answers) for inner in readers][0] if readers else super().read(answers)

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        return self.parts[0].after_token(input_ids, scores, rows=rows, **more)

    def take(self, row: int, other: StopRun) -> None:
        assert isinstance(other, CompositeStopRun)
        for inner, other_part in zip(self.parts, other.parts, strict=True):
            inner.take(row, other_part)


class AnyOf(CompositeStop, name="any_of", example={"stops": ["svip", "constant"]}):
    """Stop when any of `stops` would; the lowest of their limits applies."""

    stops: tuple[DraftStop, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stops", tuple(self.stops))
        super().__post_init__()

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        return self.stops

    def with_longest(self, gamma: int) -> DraftStop:
        return replace(self, stops=tuple(stop.with_longest(gamma) for stop in self.stops))

    def start(self, rows: int) -> "AnyOfRun":
        return AnyOfRun(self, rows)


class AllOf(AnyOf, name="all_of", example={"stops": ["svip", "constant"]}):
    """Stop when all of `stops` would; a stop that has reached its limit counts as stopped."""

    every: ClassVar[bool] = True


class AtLeast(CompositeStop, name="at_least", example={"stop": "svip"}):
    """Stop when `stop` would, but never before `n` tokens: `AllOf([stop, Constant(n)])`."""

    stop: DraftStop
    n: DraftLength = 2
    every: ClassVar[bool] = True

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        return self.stop, Constant(self.n)

    def with_longest(self, gamma: int) -> "AtLeast":
        return AtLeast(self.stop.with_longest(gamma), min(self.n, gamma))

    def start(self, rows: int) -> "AnyOfRun":
        return AnyOfRun(self, rows)


class AnyOfRun(CompositeStopRun):
    """The run of `AnyOf`, `AllOf` and `AtLeast`. `drafted`: tokens drafted in this round; `planned`: the limit of each part in this round, by row."""

    settings: AnyOf | AtLeast

    def begin_round(self, rows: list[int]) -> list[int]:
        self.drafted = 0
        limits = zip(*(inner.begin_round(rows) for inner in self.parts), strict=True)
        self.planned = dict(zip(rows, limits, strict=True))
        return [(max if self.settings.every else min)(self.planned[row]) for row in rows]

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        self.drafted += 1
        answers = [inner.after_token(input_ids, scores, rows=rows, **more) for inner in self.parts]
        stops = torch.stack([answer.to(input_ids.device) for answer in answers])  # (parts, B)
        if not self.settings.every:
            return stops.any(dim=0)
        finished = (0,) * len(self.parts)  # finished rows have no plan; their answers are ignored
        limits = zip(*(self.planned.get(row, finished) for row in rows), strict=True)
        at_limit = torch.stack([on_device(one, input_ids.device) for one in limits]) <= self.drafted
        return (stops | at_limit).all(dim=0)
