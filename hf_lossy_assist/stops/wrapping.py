"""Stops that wrap another one: at least n tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..artifacts.features import FeatureSpec
from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int
from .base import DraftStop, StopRun, check_stop


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
    "at_least", AtLeast, example={"stop": "svip"},
    summary="`stop`, but never before `n` tokens: its answers for earlier tokens are ignored, and its limit is at least `n`.",
)  # fmt: skip
