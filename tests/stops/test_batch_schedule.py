"""Proves that rounds without any draft are plain decoding, and that lengths follow the number of unfinished rows."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
from support import tiny
from support.refusals import refused
from support.stops import RAGGED, greedy_equals

from hf_lossy_assist import BatchSchedule, LossyPolicy, as_policy
from hf_lossy_assist.methods.sv.collect_samples import ObserveOnlyFilter
from hf_lossy_assist.stops import DraftStop, StopRun


def sent(row) -> int:
    return sum(length * rounds for (length, _), rounds in row.steps.items())


def test_rows_that_never_draft_are_plain_decoding():
    stats = greedy_equals(BatchSchedule({1: 3, 2: 0}), RAGGED, eos_token_id=tiny.NEVER_EMITTED)
    assert stats.total().num_draft_tokens == 0 and "draft" not in stats.forwards
    assert all(row.num_new_tokens == row.num_spec_steps for row in stats.rows)
    rate = stats.summary()["draft_acceptance_rate"]
    assert rate in (0.0, None) or math.isnan(rate)


@dataclass(frozen=True)
class Sometimes(DraftStop):
    """Drafts nothing for `pause` rounds, then 3 tokens, and so on."""

    pause: int = 2
    adaptive: ClassVar[bool] = False

    @property
    def longest(self) -> int:
        return 3

    def start(self, rows):
        return SometimesRun(self)


class SometimesRun(StopRun):
    rounds = 0

    def begin_round(self, rows):
        self.rounds += 1
        return [3 if self.rounds % (self.settings.pause + 1) == 0 else 0] * len(rows)


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("gemma3", "t5", "lfm2"))]
)
def test_a_draft_that_was_idle_for_a_while_catches_up(name):
    stats = greedy_equals(Sometimes(), (9,) if name in tiny.ONE_ROW else RAGGED, "always", name)
    assert {3, 0} <= {length for length, _ in stats.total().steps}
    assert all(n == length for length, n in stats.total().steps), "the target itself drafts: all must be accepted"


def test_a_companion_has_nothing_to_read_in_a_round_without_drafts():
    companion = tiny.noisy(tiny.shared("llama"), 0.2)
    greedy_equals(LossyPolicy(stop=Sometimes(), filter=ObserveOnlyFilter(companion)), RAGGED)


def test_schedule_by_hand():
    stop = BatchSchedule({1: 7, 4: 5, 32: 0})
    assert [stop.limits(list(range(n)))[0] for n in (1, 3, 4, 31, 32, 100)] == [7, 7, 5, 5, 0, 0]
    assert stop.longest == 7 and stop.with_longest(6).table == ((1, 6), (4, 5), (32, 0))
    assert BatchSchedule([[32, 2], [1, 7]]) == BatchSchedule({"1": 7, "32": 2}) == BatchSchedule({1: 7, 32: 2})


def test_finished_rows_do_not_count():
    """One of five rows ends at its first token: four are left, of whom the finished one still stands in the batch for a while."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 1, 4, 14, 7))
    text = tiny.greedy(model, inputs, eos_token_id=tiny.NEVER_EMITTED)[:, 14:]
    eos = next(t for t in text[:, 0].tolist() if sum(t in other[:8].tolist() for other in text) == 1)
    seen = []

    @dataclass(frozen=True)
    class Counting(BatchSchedule):
        def limits(self, rows):
            seen.append(len(rows))
            return super().limits(rows)

    tiny.assisted(model, inputs, model, Counting({1: 2, 5: 1}), eos_token_id=eos)
    assert seen[:2] == [5, 4]


def test_schedule_of_rows_that_end_apart():
    """The last row drafts, after rounds in which nobody did."""
    model, inputs = tiny.shared("llama"), tiny.prompts(RAGGED)
    text = tiny.greedy(model, inputs, eos_token_id=tiny.NEVER_EMITTED)[:, 14:]
    ends = [int(text[row, 4 + 3 * row]) for row in range(3)]
    stats = greedy_equals(BatchSchedule({1: 3, 2: 0}), RAGGED, "always", eos_token_id=ends)
    longest = max(stats.rows, key=lambda row: row.num_new_tokens)
    assert sent(longest) > 0 and sum(sent(row) for row in stats.rows) == sent(longest)


def test_refused_in_one_line():
    for make, error, words in (
        (lambda: BatchSchedule({}), ValueError, "BatchSchedule.table"),
        (lambda: BatchSchedule({2: 5}), ValueError, "1 row"),
        (lambda: BatchSchedule([[1, 5], [1, 4]]), ValueError, "once"),
        (lambda: BatchSchedule({1.5: 5}), TypeError, "rows"),
        (lambda: as_policy({"stop": "batch_schedule"}), ValueError, "missing a required argument: 'table'"),
    ):
        refused(make, words, error)
