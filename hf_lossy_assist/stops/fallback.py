"""Speculation that does not pay switches itself off."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch

from ..registry import register_stop
from ..validation import check_int, check_number
from .combined import Around


@dataclass(frozen=True)
class Fallback(Around):
    """`stop` while drafting pays, the target alone while it does not; both are measured during the call.

    With n̄ the mean tokens that a round gives each row (the target's own included), T the median seconds of a round that drafts and
    T₀ of one that does not, drafting is worth v = n̄ ÷ (T/T₀) times the target alone. Off where v < 1 − `margin`, on again where
    v > 1 + `margin`; `margin=1` never switches off. T₀ comes from one round without drafts, the call's second one, and again whenever
    half of the rows have ended; while it is off, every round tells. After `wait` such rounds one round drafts again and its n̄ counts,
    after 2·`wait` more the next one, and so on; and two as soon as half of the rows have ended, for T has changed with T₀. All rows
    draft or none does: n̄ is the mean over them. A round whose drafts a filter dropped one and all has drafted. Lossless, as every stop.

    Args:
        stop (`DraftStop`): what drafts while that pays.
        first: rounds that draft before the first verdict.
        window: rounds of each kind that are remembered.
    """

    margin: float = 0.05
    first: int = 3
    window: int = 8
    wait: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Fallback.margin", self.margin, 0.0, 1.0)
        for name in ("first", "window", "wait"):
            check_int(f"Fallback.{name}", getattr(self, name), 1)

    @property
    def longest(self) -> int:
        return self.stop.longest

    def with_longest(self, gamma: int) -> "Fallback":
        return Fallback(self.stop.with_longest(gamma), self.margin, self.first, self.window, self.wait)

    def start(self, rows: int) -> "_FallbackRun":
        own = (self.margin, self.first, self.window, self.wait)
        return _FallbackRun(self.stop.start(rows), *own, measured=_Measured.over(self.window, rows, self.wait))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self.stop(input_ids, scores, **kwargs)


@dataclass
class _Measured:
    """What a call has seen so far."""

    tokens: deque[float]  # a row's, in each of the last rounds that drafted
    drafting: deque[float]  # seconds of those rounds
    alone: deque[float]  # seconds of rounds that did not draft
    rows: int  # when these seconds were taken
    wait: int  # rounds without drafts until the next that drafts
    on: bool = True
    rounds: int = 0  # that drafted
    idle: int = 0  # that did not, since one did
    cost: float | None = None  # T/T₀
    began: float = 0.0
    drafts: bool = True  # whether the round under way does
    planned: bool = False  # and the stop gave some row leave to

    @classmethod
    def over(cls, window: int, rows: int, wait: int) -> "_Measured":
        return cls(deque(maxlen=window), deque(maxlen=window), deque(maxlen=window), rows, wait)

    @property
    def worth(self) -> float | None:
        """v; None while something is not known yet."""
        if self.drafting and self.alone:
            self.cost = median(self.drafting) / median(self.alone)
        return None if self.cost is None or not self.tokens else fmean(self.tokens) / self.cost


@dataclass(frozen=True, eq=False)
class _FallbackRun(Fallback):
    measured: _Measured = field(default_factory=lambda: _Measured.over(1, 1, 1))
    now: Callable[[], float] = time.perf_counter

    def limits(self, rows: list[int]) -> list[int]:
        m = self.measured
        if 2 * len(rows) <= m.rows:  # a round costs less by now
            m.rows = len(rows)
            m.drafting.clear()
            m.alone.clear()
            if not m.on:  # fewer rows may well be worth drafting for
                m.cost, m.wait, m.idle = None, self.wait, self.wait - 1
        if m.on:
            m.drafts = bool(m.alone) or not m.rounds or (m.cost is not None and not m.drafting)
        else:
            again = m.idle == 0 and m.cost is None  # the round before read what was written without the draft
            m.drafts = bool(m.alone) and (m.idle >= m.wait or again)
        m.began = self.now()
        limits = self.stop.limits(
            rows
        )  # asked for in any case: inside another stop this one may be called all the same
        m.planned = m.drafts and any(limits)
        return limits if m.drafts else [0] * len(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        m, seconds = self.measured, self.now() - self.measured.began
        did = (
            m.planned
        )  # at the end of a text there may be no room for drafts, and the round costs as much as it is then worth
        tried = did and not m.on
        if did:
            self.stop.observe(rows, drafted, accepted)
            if tried:
                m.tokens.clear()
            m.tokens.append(sum(accepted) / len(rows) + 1)
            # Not the seconds of a round in which the draft reads a prompt, or what was written without it.
            if m.rounds and m.idle <= 1:
                m.drafting.append(seconds)
            m.rounds += 1
        elif not any(drafted):  # inside another stop, that one may have drafted
            m.alone.append(seconds)
        m.idle = 0 if did else m.idle + 1
        worth = m.worth
        if worth is None or m.rounds < self.first:
            return
        if worth > 1 + self.margin:
            m.on, m.wait = True, self.wait
        elif tried:
            m.wait *= 2
        elif worth < 1 - self.margin:
            m.on = False


register_stop(
    "fallback", Fallback, example={"stop": "svip"},
    summary="`stop` while drafting pays, the target alone while it does not.",
)  # fmt: skip
