"""Speculation that does not pay switches itself off."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..registry import register_stop
from ..validation import check_int, check_number, check_positive
from .composite_stops import CompositeStopRun, WrappingStop


MOST_WAIT = 1024  # rounds without drafts until one tries again, at most


@dataclass(frozen=True)
class Fallback(WrappingStop):
    """`stop` while drafting pays, the target alone while it does not; both are measured during the call.

    Let n̄ be the mean tokens that a round gives each row, T the median seconds of a round that drafts, and T₀ of one that does not. Drafting
    is worth v = n̄ ÷ (T/T₀) times the target alone: it is switched off where v < 1 − `margin` and on again where v > 1 + `margin`.
    All rows draft or none does.

    - T₀ comes from the second round of the call, without drafts, and is measured again whenever half of the rows have ended.
    - While drafting is off, one round drafts again after `wait` rounds, the next after 2·`wait` more, and so on up to 1024. When half of
      the rows have ended, two rounds draft, because T has changed with T₀.
    - Such a trial costs more than a round: the draft reads what was written without it. What trials lose is at most the share `trials`
      of the other rounds' seconds: until then, the next one waits.
    - Where drafting was off at a call's end, the next call of the same models, drafter, policy and decoding with about as many rows (from one
      power of two to the next) begins without it, and goes on waiting.

    Args:
        margin: 1 never switches off.
        stop (`DraftStop`): what drafts while that pays.
        first: rounds that draft before drafting may be switched off.
        window: rounds of each kind that are remembered.
        wait: rounds without drafts until the first trial.
        trials: what trials may cost, as a share of the seconds of all rounds.
    """

    margin: float = 0.05
    first: int = 3
    window: int = 8
    wait: int = 32
    trials: float = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("Fallback.margin", self.margin, 0.0, 1.0)
        check_positive("Fallback.trials", self.trials, 1.0)
        for name in ("first", "window", "wait"):
            check_int(f"Fallback.{name}", getattr(self, name), 1)

    @property
    def longest(self) -> int:
        return self.stop.longest

    def with_longest(self, gamma: int) -> "Fallback":
        return replace(self, stop=self.stop.with_longest(gamma))

    def start(self, rows: int) -> "FallbackRun":
        return FallbackRun(self, rows)


class FallbackRun(CompositeStopRun):
    """Measures each round, and switches drafting on and off between rounds. `now`: the clock, in seconds."""

    settings: Fallback

    def __init__(self, settings: Fallback, rows: int, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings, rows)
        self.now, self.measured = now, Measurements(settings.window)
        self.rows = rows  # unfinished ones when the seconds were measured
        self.wait = settings.wait  # rounds without drafts until the next that drafts
        self.on = True
        self.drafted_rounds = 0
        self.reads = True  # the next draft has all to read that was written so far
        self.first_round = True  # in which the target reads the prompts
        self.plain_rounds = 0  # since the last round that drafted
        self.debt = 0.0  # seconds that trials lost, beyond their share of the seconds since
        self.known: dict[int, Off] = {}
        self.began = 0.0
        self.drafts = True  # whether the round under way may draft
        self.planned = False  # and the stop inside allows a draft to some row

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        super().pair(target, draft, kind)
        try:
            kinds = OFF.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
            self.known = kinds.setdefault((kind, self.settings), {})
        except TypeError:  # a stop of somebody's own that cannot be hashed
            return
        self.begins_alone = self._recall()

    def _recall(self) -> bool:
        """Begin without drafts if the last call with so many rows ended so; return whether it did."""
        last = self.known.get(self.rows.bit_length())
        if last is not None:
            self.on, self.drafted_rounds = False, self.settings.first
            self.wait, self.plain_rounds, self.measured.cost, self.debt = last
        return last is not None

    def _remember(self) -> None:
        if self.on:
            self.known.pop(self.rows.bit_length(), None)
        else:
            self.known[self.rows.bit_length()] = Off(self.wait, self.plain_rounds, self.measured.cost, self.debt)

    def begin_round(self, rows: list[int]) -> list[int]:
        measured = self.measured
        if 2 * len(rows) <= self.rows:  # a round costs less by now
            self.rows = len(rows)
            measured.drafting_seconds.clear()
            measured.plain_seconds.clear()
            if not self._recall() and not self.on:  # fewer rows may well be worth drafting for
                measured.cost = None
                self.wait, self.plain_rounds = self.settings.wait, self.settings.wait - 1
        seconds_known = bool(measured.plain_seconds)
        if self.on:
            drafting_unknown = measured.cost is not None and not measured.drafting_seconds
            self.drafts = seconds_known or not self.drafted_rounds or drafting_unknown
        else:
            # The last round read what was written without the draft.
            again = self.plain_rounds == 0 and measured.cost is None
            self.drafts = seconds_known and (again or (self.debt <= 0.0 and self.plain_rounds >= self.wait))
        self.began = self.now()
        limits = super().begin_round(rows)  # always: inside another stop its answers are asked for all the same
        self.planned = self.drafts and any(limits)
        return limits if self.drafts else [0] * len(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        measured, seconds = self.measured, self.now() - self.began
        tried = self.planned and not self.on  # at the end of a text there may be no room for drafts
        if self.planned:
            super().observe(rows, drafted, accepted)
            if tried:
                measured.tokens.clear()
                self.debt += max(0.0, seconds - (sum(accepted) / len(rows) + 1) * median(measured.plain_seconds))
            measured.tokens.append(sum(accepted) / len(rows) + 1)
            # Not the seconds of a round in which the draft reads a prompt, or what was written without it.
            if not self.reads and self.plain_rounds <= 1:
                measured.drafting_seconds.append(seconds)
            self.drafted_rounds += 1
            self.reads = False
        elif not any(drafted):  # inside another stop, that one may have drafted
            if not self.first_round:
                measured.plain_seconds.append(seconds)
            self.debt = max(0.0, self.debt - self.settings.trials * seconds)
        self.first_round = False
        self.plain_rounds = 0 if self.planned else self.plain_rounds + 1
        self._switch(tried)
        self._remember()

    def _switch(self, tried: bool) -> None:
        """Switch drafting on or off for the next round. `tried`: the last round drafted though drafting is off."""
        worth = self.measured.update_worth()
        if worth is None or self.drafted_rounds < self.settings.first:
            return
        if worth > 1 + self.settings.margin:
            self.on, self.wait = True, self.settings.wait
        elif tried:
            self.wait = min(2 * self.wait, MOST_WAIT)
        elif worth < 1 - self.settings.margin:
            self.on = False


class Measurements:
    """Tokens and seconds of the last rounds, up to `window` of each kind."""

    def __init__(self, window: int):
        self.tokens: deque[float] = deque(maxlen=window)  # of a row, in each round that drafted
        self.drafting_seconds: deque[float] = deque(maxlen=window)  # of these rounds
        self.plain_seconds: deque[float] = deque(maxlen=window)  # of rounds that did not draft
        self.cost: float | None = None  # T/T₀; stays while one of the two is measured again

    def update_worth(self) -> float | None:
        """Return v = n̄ ÷ (T/T₀) by the measurements so far; None while one is missing."""
        if self.drafting_seconds and self.plain_seconds:
            self.cost = median(self.drafting_seconds) / median(self.plain_seconds)
        return None if self.cost is None or not self.tokens else fmean(self.tokens) / self.cost


class Off(NamedTuple):
    """The state of a call in which drafting is off, see `FallbackRun`."""

    wait: int
    plain_rounds: int
    cost: float | None
    debt: float


# By target, then by draft, then by kind of call: by ⌊log₂ rows⌋ + 1, where drafting did not pay.
OFF: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, dict[Hashable, dict[int, Off]]]] = (
    WeakKeyDictionary()
)

register_stop("fallback", Fallback, example={"stop": "svip"})
