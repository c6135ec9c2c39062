"""A stop that disables drafting while it does not pay."""

import time
from collections.abc import Callable, Hashable

from transformers import PreTrainedModel

from ..registry.frozen import PositiveShare, Several, Share
from .composite_stops import CompositeStopRun, WrappingStop
from .cost_model import PairMemory
from .draft_switch import DraftSwitch, Remembered, SwitchRule


class Fallback(WrappingStop, name="fallback", example={"stop": "svip"}):
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

    margin: Share = 0.05
    first: Several = 3
    window: Several = 8
    wait: Several = 32
    trials: PositiveShare = 0.02

    @property
    def rule(self) -> SwitchRule:
        """When drafting is switched off and on."""
        return SwitchRule(self.margin, self.first, self.window, self.wait, self.trials)

    def start(self, rows: int) -> "FallbackRun":
        return FallbackRun(self, rows)


class FallbackRun(CompositeStopRun):
    """The run of `Fallback`: plans no draft in rounds in which its switch says so. `now`: clock in seconds."""

    settings: Fallback

    def __init__(self, settings: Fallback, rows: int, now: Callable[[], float] = time.perf_counter):
        super().__init__(settings, rows)
        self.switch = DraftSwitch(settings.rule, rows, now)
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
