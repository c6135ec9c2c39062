"""A stop that disables drafting while it does not pay, by measured seconds and accepted tokens; `AutoDrafter` decides by the same switch."""

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from transformers import PreTrainedModel

from ..registry.frozen import PositiveShare, Several, Share
from .base import DraftStop
from .composite_stops import CompositeStop, CompositeStopRun
from .cost_model import PairMemory


MOST_WAIT = 1024  # longest wait for the next trial, in rounds without drafts
LEAST = 0.01  # least cost of a drafting round, as a divisor
STALE = 256  # drafting rounds after which remembered seconds of a plain round are measured again


class SwitchRule(NamedTuple):
    """Settings of a `DraftSwitch`; the first ones as in `Fallback`."""

    margin: float
    first: int
    window: int
    wait: int
    trials: float
    tries: int = 1  # drafting rounds of one trial
    near: int = 1  # rounds without drafts after which a drafting round still counts, although the draft reads them
    remembers: bool = False  # calls continue where the last one ended even if it drafted


class Measurements:
    """Tokens and seconds of recent rounds, up to `window` of each kind."""

    def __init__(self, window: int):
        self.tokens: deque[float] = deque(maxlen=window)  # tokens per row of each drafting round
        self.drafting_seconds: deque[float] = deque(maxlen=window)  # of drafting rounds
        self.plain_seconds: deque[float] = deque(maxlen=window)  # of plain rounds
        self.cost: float | None = None  # T/T₀; kept while one of them is measured again

    def update_worth(self, rate: float = 1.0) -> float | None:
        """Return v = n̄ ÷ (1 + ρ·(T/T₀ − 1)) from the measurements; None while one is missing.

        Drafting pays at v > 1: n̄ tokens for T, rather than 1 token for T₀ and ρ = `rate` tokens for each T₀ of the rest of T.
        """
        if self.drafting_seconds and self.plain_seconds:
            self.cost = median(self.drafting_seconds) / median(self.plain_seconds)
        if self.cost is None or not self.tokens:
            return None
        return fmean(self.tokens) / max(1 + rate * (self.cost - 1), LEAST)


class Remembered(NamedTuple):
    """The state in which a call ended, for the next one; fields as in `DraftSwitch`."""

    wait: int
    idle: int
    cost: float | None
    debt: float
    on: bool = False
    measured: Measurements | None = None


class DraftSwitch:
    """Enables or disables drafting between rounds: each calls `begin`, then `drafted` or `passed`. `now`: clock in seconds."""

    def __init__(self, rule: SwitchRule, rows: int, now: Callable[[], float] = time.perf_counter):
        self.rule, self.now, self.measured = rule, now, Measurements(rule.window)
        self.rows = rows  # unfinished rows when the seconds were measured
        self.wait = rule.wait  # rounds without drafts before the next trial
        self.on = True
        self.drafted_rounds = 0
        self.reads = True  # the draft has to prefill before it drafts
        self.first_round = True  # the target prefills in this round
        self.idle = 0  # rounds since the last drafting round
        self.debt = 0.0  # seconds lost by trials beyond their share
        self.left = 0  # rounds left of a trial
        # Tokens per row in the seconds of a plain round; above 1 if others draft when this switch does not.
        self.rate = 1.0
        self.since_plain = 0  # drafting rounds since the last plain one
        self.known: dict[int, Remembered] = {}
        self.began = 0.0
        self.drafts = True  # whether this round may draft
        self.tries = False  # whether it is one of a trial, or measures a plain round

    def recall_from(self, memory: dict[int, Remembered]) -> bool:
        """Continue from calls with the same models, by ⌊log₂ rows⌋ + 1; return whether this call begins without drafts."""
        self.known = memory
        return self._recall() and not self.on

    def _recall(self) -> bool:
        last = self.known.get(self.rows.bit_length())
        if last is not None:
            self.drafted_rounds = self.rule.first
            self.wait, self.idle, _, self.debt, self.on, measured = last
            self.measured = self.measured if measured is None else measured
            self.measured.cost = last.cost
        return last is not None

    def _remember(self) -> None:
        if self.on and not self.rule.remembers:
            self.known.pop(self.rows.bit_length(), None)
            return
        measured = self.measured if self.rule.remembers else None
        self.known[self.rows.bit_length()] = Remembered(
            self.wait, self.idle, self.measured.cost, self.debt, self.on, measured
        )

    def begin(self, rows: int) -> bool:
        """Begin a round with `rows` unfinished rows; return whether it may draft."""
        if 2 * rows <= self.rows or rows >= 2 * self.rows:  # rounds cost less or more now
            self.rows, self.left = rows, 0
            self._forget_seconds()
            if not self._recall() and not self.on:  # drafting may pay for other numbers of rows
                self.measured.cost = None
                self.wait, self.idle = self.rule.wait, self.rule.wait - 1
        measured = self.measured
        seconds_known = bool(measured.plain_seconds)
        if self.on:
            drafting_unknown = measured.cost is not None and not measured.drafting_seconds
            stale = self.rule.remembers and self.since_plain >= STALE
            self.drafts = (seconds_known and not stale) or not self.drafted_rounds or drafting_unknown
            self.tries = not self.drafts
        else:
            # The last round prefilled the draft, so its seconds do not count, or a trial is not over.
            again = self.idle == 0 and (measured.cost is None or self.left > 0)
            self.drafts = seconds_known and (again or (self.debt <= 0.0 and self.idle >= self.wait))
            self.tries = self.drafts or not seconds_known
        self.began = self.now()
        return self.drafts

    def _forget_seconds(self) -> None:
        if self.rule.remembers:  # other numbers of rows have measurements of their own
            tokens, self.measured = self.measured.tokens, Measurements(self.rule.window)
            self.measured.tokens.extend(tokens)
            return
        self.measured.drafting_seconds.clear()
        self.measured.plain_seconds.clear()

    @property
    def elapsed(self) -> float:
        """Seconds since the round began."""
        return self.now() - self.began

    def drafted(self, tokens: float) -> None:
        """End a round that has drafted; `tokens`: committed per row."""
        measured, seconds = self.measured, self.elapsed
        tried = not self.on
        if tried:
            if self.left == 0:
                measured.tokens.clear()
                self.left = self.rule.tries
            self.left -= 1
            plain = median(measured.plain_seconds)
            self.debt += max(0.0, seconds - plain - (tokens - 1) / self.rate * plain)
        measured.tokens.append(tokens)
        # Rounds in which the draft prefills do not count.
        if not self.reads and self.idle <= self.rule.near:
            measured.drafting_seconds.append(seconds)
        self.drafted_rounds += 1
        self.reads = self.first_round = False
        self.idle, self.since_plain = 0, self.since_plain + 1
        self._switch(tried)
        self._remember()

    def passed(self, plain: bool = True) -> float | None:
        """End a round of the target alone (`plain`), or one that has drafted in another way; return its seconds, None if they include a prefill."""
        seconds, counts = self.elapsed, not self.first_round
        if plain:
            if counts:
                self.measured.plain_seconds.append(seconds)
            self.debt, self.since_plain = max(0.0, self.debt - self.rule.trials * seconds), 0
        self.first_round = False
        self.idle += 1
        self._switch(False)
        self._remember()
        return seconds if counts else None

    def _switch(self, tried: bool) -> None:
        """Enable or disable drafting for the next round. `tried`: the last round was part of a trial."""
        worth = self.measured.update_worth(self.rate)
        if worth is None or self.drafted_rounds < self.rule.first or (tried and self.left):
            return
        if worth > 1 + self.rule.margin:
            self.on, self.wait, self.left = True, self.rule.wait, 0
        elif tried:
            self.wait = min(2 * self.wait, MOST_WAIT)
        elif worth < 1 - self.rule.margin:
            self.on = False


class Fallback(CompositeStop, name="fallback", example={"stop": "svip"}):
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
        first: drafting rounds before drafting may be disabled.
        window: number of recent rounds of each kind to measure by.
        wait: rounds without drafts before the first trial.
        trials: the maximum cost of trials, as a share of all rounds' seconds.
    """

    stop: DraftStop
    margin: Share = 0.05
    first: Several = 3
    window: Several = 8
    wait: Several = 32
    trials: PositiveShare = 0.02

    @property
    def parts(self) -> tuple[DraftStop, ...]:
        return (self.stop,)

    def with_longest(self, gamma: int) -> "Fallback":
        return replace(self, stop=self.stop.with_longest(gamma))

    def start(self, rows: int) -> "FallbackRun":
        return FallbackRun(self, rows)


class FallbackRun(CompositeStopRun):
    """The run of `Fallback`: plans no draft in rounds in which its switch says so. `now`: clock in seconds."""

    settings: Fallback

    def __init__(self, settings: Fallback, rows: int, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings, rows)
        rule = SwitchRule(settings.margin, settings.first, settings.window, settings.wait, settings.trials)
        self.switch = DraftSwitch(rule, rows, now)
        self.planned = False  # whether the wrapped stop also gives a row a limit above 0

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        super().pair(target, draft, kind)
        try:
            self.begins_alone = self.switch.recall_from(OFF.recall(target, draft, (kind, self.settings), {}))
        except TypeError:  # a user-defined stop that is not hashable
            return

    def begin_round(self, rows: list[int]) -> list[int]:
        drafts = self.switch.begin(len(rows))
        limits = super().begin_round(rows)  # always: a stop around this one calls the wrapped stop anyway
        self.planned = drafts and any(limits)
        return limits if drafts else [0] * len(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        if self.planned:
            super().observe(rows, drafted, accepted)
            self.switch.drafted(sum(accepted) / len(rows) + 1)
        else:  # a stop around this one may have drafted
            self.switch.passed(plain=not any(drafted))


OFF: PairMemory[dict[int, Remembered]] = PairMemory()  # disabled calls by ⌊log₂ rows⌋ + 1
