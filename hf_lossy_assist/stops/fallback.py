"""A stop that disables drafting while it does not pay."""

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


MOST_WAIT = 1024  # longest wait for the next trial, in rounds without drafts


@dataclass(frozen=True)
class Fallback(WrappingStop):
    """Use `stop` while drafting pays, and the target alone while it does not, from measurements during the call.

    Let n̄ be the mean number of tokens per row of a round, T the median seconds of a drafting round, and T₀ of a plain one. Drafting speeds
    the target up by v = n̄ ÷ (T/T₀): it is disabled at v < 1 − `margin` and enabled again at v > 1 + `margin`, for all rows together.

    - T₀ is measured in the call's second round, which does not draft, and again whenever half of the rows have ended.
    - While drafting is disabled, a trial round drafts after `wait` rounds, the next after 2·`wait` more, and so on up to 1024. When half of
      the rows have ended, two rounds draft, because T has changed with T₀.
    - A trial also has to feed the draft the tokens written without it. The next trial is delayed until the loss is at most the share
      `trials` of the other rounds' seconds.
    - If drafting was disabled at the end of a call, the next call with the same models, drafter, policy, decoding and about as many rows
      (between the same powers of two) starts with it disabled, and continues the wait.

    Args:
        margin: 1 never disables drafting.
        stop (`DraftStop`): the stop to use while drafting pays.
        first: drafting rounds before drafting may be disabled.
        window: number of recent rounds of each kind to measure by.
        wait: rounds without drafts before the first trial.
        trials: the maximum cost of trials, as a share of all rounds' seconds.
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
    """The run of `Fallback`: measures rounds, and enables or disables drafting between them. `now`: clock in seconds."""

    settings: Fallback

    def __init__(self, settings: Fallback, rows: int, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings, rows)
        self.now, self.measured = now, Measurements(settings.window)
        self.rows = rows  # unfinished rows when the seconds were measured
        self.wait = settings.wait  # rounds without drafts before the next trial
        self.on = True
        self.drafted_rounds = 0
        self.reads = True  # the draft has to prefill before it drafts
        self.first_round = True  # the target prefills in this round
        self.plain_rounds = 0  # since the last drafting round
        self.debt = 0.0  # seconds lost by trials beyond their share
        self.known: dict[int, Off] = {}
        self.began = 0.0
        self.drafts = True  # whether this round may draft
        self.planned = False  # whether the wrapped stop also gives a row a limit above 0

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        super().pair(target, draft, kind)
        try:
            kinds = OFF.setdefault(target, WeakKeyDictionary()).setdefault(draft, {})
            self.known = kinds.setdefault((kind, self.settings), {})
        except TypeError:  # a user-defined stop that is not hashable
            return
        self.begins_alone = self._recall()

    def _recall(self) -> bool:
        """Start with drafting disabled if the last call with about as many rows ended so; return whether it did."""
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
        if 2 * len(rows) <= self.rows:  # rounds are cheaper now
            self.rows = len(rows)
            measured.drafting_seconds.clear()
            measured.plain_seconds.clear()
            if not self._recall() and not self.on:  # drafting may pay for fewer rows
                measured.cost = None
                self.wait, self.plain_rounds = self.settings.wait, self.settings.wait - 1
        seconds_known = bool(measured.plain_seconds)
        if self.on:
            drafting_unknown = measured.cost is not None and not measured.drafting_seconds
            self.drafts = seconds_known or not self.drafted_rounds or drafting_unknown
        else:
            # The last round prefilled the draft, so its seconds do not count.
            again = self.plain_rounds == 0 and measured.cost is None
            self.drafts = seconds_known and (again or (self.debt <= 0.0 and self.plain_rounds >= self.wait))
        self.began = self.now()
        limits = super().begin_round(rows)  # always: a stop around this one calls the wrapped stop anyway
        self.planned = self.drafts and any(limits)
        return limits if self.drafts else [0] * len(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        measured, seconds = self.measured, self.now() - self.began
        tried = self.planned and not self.on  # at the end of a text there may be no room for a draft
        if self.planned:
            super().observe(rows, drafted, accepted)
            if tried:
                measured.tokens.clear()
                self.debt += max(0.0, seconds - (sum(accepted) / len(rows) + 1) * median(measured.plain_seconds))
            measured.tokens.append(sum(accepted) / len(rows) + 1)
            # Rounds in which the draft prefills do not count.
            if not self.reads and self.plain_rounds <= 1:
                measured.drafting_seconds.append(seconds)
            self.drafted_rounds += 1
            self.reads = False
        elif not any(drafted):  # a stop around this one may have drafted
            if not self.first_round:
                measured.plain_seconds.append(seconds)
            self.debt = max(0.0, self.debt - self.settings.trials * seconds)
        self.first_round = False
        self.plain_rounds = 0 if self.planned else self.plain_rounds + 1
        self._switch(tried)
        self._remember()

    def _switch(self, tried: bool) -> None:
        """Enable or disable drafting for the next round. `tried`: the last round was a trial."""
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
    """Tokens and seconds of recent rounds, up to `window` of each kind."""

    def __init__(self, window: int):
        self.tokens: deque[float] = deque(maxlen=window)  # tokens per row of each drafting round
        self.drafting_seconds: deque[float] = deque(maxlen=window)  # of drafting rounds
        self.plain_seconds: deque[float] = deque(maxlen=window)  # of plain rounds
        self.cost: float | None = None  # T/T₀; kept while one of them is measured again

    def update_worth(self) -> float | None:
        """Return v = n̄ ÷ (T/T₀) from the measurements; None while one is missing."""
        if self.drafting_seconds and self.plain_seconds:
            self.cost = median(self.drafting_seconds) / median(self.plain_seconds)
        return None if self.cost is None or not self.tokens else fmean(self.tokens) / self.cost


class Off(NamedTuple):
    """The state of a call with drafting disabled; fields as in `FallbackRun`."""

    wait: int
    plain_rounds: int
    cost: float | None
    debt: float


# Disabled calls by target, draft, kind of call, and ⌊log₂ rows⌋ + 1.
OFF: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[PreTrainedModel, dict[Hashable, dict[int, Off]]]] = (
    WeakKeyDictionary()
)

register_stop("fallback", Fallback, example={"stop": "svip"})
