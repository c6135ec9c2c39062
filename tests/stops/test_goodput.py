"""Proves that γ by cost is the γ of the highest expected goodput, and that rounds without any draft are plain decoding."""

import itertools
import json
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import tiny
from support.stops import RAGGED, greedy_equals

import hf_lossy_assist as hla
from hf_lossy_assist import BatchSchedule, LossyPolicy, MovingAverage, as_policy
from hf_lossy_assist.artifacts.conditions import describe_machine
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import Profile
from hf_lossy_assist.methods.sv.profiled_runner import ObserveOnlyFilter
from hf_lossy_assist.models.identity import ModelIdentity
from hf_lossy_assist.stops import DraftStop, StopRun
from hf_lossy_assist.stops.moving_average import choose_for_batch, choose_for_rows


def sent(row) -> int:
    return sum(length * rounds for (length, _), rounds in row.steps.items())


# -- the choice -----------------------------------------------------------------------------------------------------------


def test_goodput_by_hand():
    """α = .5, T = 1 + .1·γ: 1/1, 1.5/1.1 = 1.364, 1.75/1.2 = 1.458, 1.875/1.3 = 1.442. At α = .9: 4.10/1.4 = 2.93 … 6.51/1.9 = 3.43."""
    costs = MovingAverage(step=0.1)
    seconds = [costs.seconds(1, gamma) for gamma in range(5)]
    assert [float(s[-1]) for s in seconds] == pytest.approx([1.0, 1.1, 1.2, 1.3, 1.4])
    for choose in (choose_for_rows, choose_for_batch):
        assert choose(np.array([0.5]), seconds) == [2]
        assert choose(np.array([0.9]), seconds) == [4]
        assert choose(np.array([0.0]), seconds) == [0]
    dear = [MovingAverage(step=0.6).seconds(1, gamma) for gamma in range(5)]
    assert choose_for_rows(np.array([0.5]), dear) == [0], "1.5 tokens in 1.6 are fewer than 1 in 1"


numbers = st.floats(0.01, 2.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=3), numbers, numbers, numbers, st.integers(1, 4))
def test_no_other_choice_is_better(alpha, step, token, fixed, longest):
    """Against every (γ_1, …, γ_B): rows may differ in `per="row"`, not in `per="batch"`."""
    costs = MovingAverage(step=step, token=token, fixed=fixed)
    seconds = [costs.seconds(len(alpha), gamma) for gamma in range(longest + 1)]

    def goodput(gammas):
        tokens = sum(a**i for a, gamma in zip(alpha, gammas, strict=True) for i in range(gamma + 1))
        return tokens / (fixed + step * max(gammas) + token * sum(gammas))

    every = max(goodput(gammas) for gammas in itertools.product(range(longest + 1), repeat=len(alpha)))
    assert goodput(choose_for_rows(np.array(alpha), seconds)) == pytest.approx(every, rel=1e-9)
    even = max(goodput([gamma] * len(alpha)) for gamma in range(longest + 1))
    assert goodput(choose_for_batch(np.array(alpha), seconds)) == pytest.approx(even, rel=1e-9)


def test_acceptance_is_a_moving_average_of_tested_tokens():
    """Accepted 3 of 4 drafted: 3 accepted, 1 refused. Accepted 2 of 2: none was refused. With window 2 a round weighs half the next one's."""
    stop = MovingAverage(step=0.1, window=2, initial=0.5).start(2)
    stop.observe([0, 1], [4, 2], [3, 2])
    assert stop.accepted == [3.0, 2.0] and stop.rejected == [1.0, 0.0]
    stop.observe([0], [4], [0])
    assert stop.accepted == [1.5, 2.0] and stop.rejected == [1.5, 0.0]
    # α of row 0 = (1.5 + .5)/(3 + 1) = .5, of row 1 = (2 + .5)/(2 + 1) = .833
    alone = [MovingAverage(step=0.1).seconds(1, gamma) for gamma in range(11)]
    assert stop.begin_round([0]) == choose_for_rows(np.array([0.5]), alone)
    assert stop.begin_round([1]) == choose_for_rows(np.array([2.5 / 3]), alone)
    pooled = MovingAverage(step=0.1, window=2, initial=0.5, per="batch").start(2)
    pooled.observe([0, 1], [4, 2], [3, 2])  # means 2.5 and 0.5: α = 3/4
    together = [MovingAverage(step=0.1).seconds(2, gamma) for gamma in range(11)]
    assert pooled.begin_round([0, 1]) == choose_for_batch(np.array([0.75, 0.75]), together)


def test_a_row_that_gave_up_is_tried_again():
    stop = MovingAverage(step=0.3, window=4).start(1)
    for _ in range(4):
        stop.observe([0], [3], [0])
    assert stop.begin_round([0]) == [0]
    waited = 0
    while stop.begin_round([0]) == [0]:
        stop.observe([0], [0], [0])
        waited += 1
        assert waited < 30
    assert waited > 1


def test_limits_of_no_rows():
    assert MovingAverage(step=0.1).start(2).begin_round([]) == BatchSchedule({1: 3}).limits([]) == []


# -- costs of a profile ---------------------------------------------------------------------------------------------------


def make_profile(seconds, step, companion=0.0, gamma=3, models=("llama", "often")) -> Profile:
    """A profile of one row whose rounds take `seconds` with 0, 1, … tokens verified."""
    target = tiny.shared(models[0])
    draft = tiny.draft_of(target, models[1])
    numbers = (np.array([value]) for value in (step, companion, 0.0))
    latency = Latency(np.array([1]), np.arange(len(seconds))[None], np.array([seconds]), *numbers)
    bins = Bins(
        np.zeros(0, np.float32), np.zeros((1, 0), np.float32), np.ones((1, 1)), np.ones(1), np.ones((1, 1), np.int64)
    )
    me = [ModelIdentity.of(model) for model in (target, draft, draft)]
    return Profile(bins, latency, gamma, np.ones(1), *me, "", {}, describe_machine(torch.device("cpu")))


def test_seconds_of_a_profile_leave_the_companion_out():
    stop = MovingAverage(make_profile([1.0, 1.5, 1.75, 2.0], step=0.25, companion=8.0))
    assert stop.longest == 3
    assert [stop.seconds(1, gamma).tolist() for gamma in range(3)] == [[1.0], [1.25, 1.75], [1.5, 2.0, 2.25]]
    assert stop.seconds(2, 1).tolist() == [2.5, 3.0, 3.5]  # two rows: in proportion


def test_a_profile_chooses_as_the_same_numbers_do():
    by_table = MovingAverage(make_profile([1.0, 1.1, 1.2, 1.3], step=0.2)).start(1)
    by_hand = MovingAverage(step=0.2, token=0.1, max_draft=3).start(1)
    for n in (3, 0, 1, 2, 0, 0, 3):
        assert by_table.begin_round([0]) == by_hand.begin_round([0])
        for stop in (by_table, by_hand):
            stop.observe([0], [3], [n])


def test_a_profile_of_other_models_is_refused():
    stop = MovingAverage(make_profile([1.0, 1.1, 1.2, 1.3], step=0.2))
    greedy_equals(stop)
    model = tiny.shared("qwen2")
    with pytest.raises(ValueError, match="^this profile was made with the target [^\n]*$"):
        tiny.assisted(model, tiny.prompts((9,)), model, hla.LossyPolicy(stop=hla.AnyOf([stop, hla.SVIP()])))
    with pytest.raises(ValueError, match=r"^this profile's seconds [^\n]*MovingAverage\(step=…\)$"):
        tiny.assisted(tiny.shared("llama"), tiny.prompts((9,)), None, stop, prompt_lookup_num_tokens=3)
    greedy_equals(hla.LossyPolicy(stop=MovingAverage(step=0.05)), kind="rarely")


def test_a_policy_with_a_profile_in_its_stop(tmp_path):
    profile = make_profile([1.0, 1.1, 1.2, 1.3], step=0.2)
    policy = LossyPolicy(stop=hla.AtLeast(MovingAverage(profile, max_draft=2), 1))
    with pytest.raises(ValueError, match="^a profile that was never saved has no JSON form"):
        policy.to_dict()
    policy.save_pretrained(tmp_path / "made")
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"policy.json", "README.md", "stop_0_profile"}
    spec = json.loads((tmp_path / "made" / "policy.json").read_text())
    assert spec["stop"]["stop"]["profile"] == "stop_0_profile"
    loaded = LossyPolicy.from_pretrained(tmp_path / "made").stop.stop
    assert loaded.longest == 2 and loaded.seconds(1, 2).tolist() == policy.stop.stop.seconds(1, 2).tolist()
    assert as_policy(policy.to_dict()).to_dict() == policy.to_dict()


# -- in the engine --------------------------------------------------------------------------------------------------------


def test_more_is_drafted_where_more_is_accepted():
    whole = {"eos_token_id": tiny.NEVER_EMITTED}
    always, never = (
        greedy_equals(MovingAverage(step=0.1), kind=kind, **whole).total() for kind in ("always", "never")
    )
    assert sent(always) / always.num_spec_steps > 3 * sent(never) / never.num_spec_steps
    assert always.num_spec_steps < tiny.NEW / 3 and never.num_spec_steps == tiny.NEW
    assert (0, 0) in never.steps, "it gave up for some rounds"


def test_drafting_that_never_pays_is_plain_decoding():
    stats = greedy_equals(MovingAverage(step=50.0), RAGGED)
    assert stats.total().num_draft_tokens == 0 and "draft" not in stats.forwards
    assert all(row.num_new_tokens == row.num_spec_steps for row in stats.rows)
    assert stats.summary()["draft_acceptance_rate"] in (0.0, None) or math.isnan(
        stats.summary()["draft_acceptance_rate"]
    )


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


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_draft_that_was_idle_for_a_while_catches_up(name):
    stats = greedy_equals(Sometimes(), (9,) if name in tiny.ONE_ROW else RAGGED, "always", name)
    assert {3, 0} <= {length for length, _ in stats.total().steps}
    assert all(n == length for length, n in stats.total().steps), "the target itself drafts: all must be accepted"


def test_a_companion_has_nothing_to_read_in_a_round_without_drafts():
    companion = tiny.noisy(tiny.shared("llama"), 0.2)
    greedy_equals(LossyPolicy(stop=Sometimes(), filter=ObserveOnlyFilter(companion)), RAGGED)


# -- by the number of rows ------------------------------------------------------------------------------------------------


def test_schedule_by_hand():
    stop = BatchSchedule({1: 7, 4: 5, 32: 0})
    assert [stop.limits(list(range(n)))[0] for n in (1, 3, 4, 31, 32, 100)] == [7, 7, 5, 5, 0, 0]
    assert stop.longest == 7 and stop.with_longest(6).table == ((1, 6), (4, 5), (32, 0))
    assert BatchSchedule([[32, 2], [1, 7]]) == BatchSchedule({"1": 7, "32": 2}) == BatchSchedule({1: 7, 32: 2})


def test_finished_rows_do_not_count():
    """One of five rows ends at its first token: four are left, of whom the finished one still stands in the batch for a while."""
    model, inputs = tiny.shared("llama"), tiny.prompts((9, 1, 4, 14, 7))
    text = tiny.greedy(model, inputs, eos_token_id=tiny.NEVER_EMITTED)[:, 14:]
    eos = next(
        int(t) for row in range(5) for t in text[row, :1] if sum(int(t) in other[:8].tolist() for other in text) == 1
    )
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


# -- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: MovingAverage(), ValueError, "profile=.*step="),
        (lambda: MovingAverage(make_profile([1.0, 1.1], 0.1, gamma=1), step=0.1), ValueError, "either"),
        (lambda: MovingAverage("folder"), TypeError, "MovingAverage.profile: expected a Profile, got str"),
        (lambda: MovingAverage(step=0.1, per="all"), ValueError, "MovingAverage.per"),
        (
            lambda: MovingAverage(make_profile([1.0, 1.1], 0.1, gamma=1), max_draft=2),
            ValueError,
            "up to 1: .*--gamma 2",
        ),
        (lambda: MovingAverage(make_profile([1.0, 1.1], 0.1, gamma=1)).with_longest(9), ValueError, "--gamma 9"),
        (lambda: BatchSchedule({}), ValueError, "BatchSchedule.table"),
        (lambda: BatchSchedule({2: 5}), ValueError, "1 row"),
        (lambda: BatchSchedule([[1, 5], [1, 4]]), ValueError, "once"),
        (lambda: BatchSchedule({1: 0}), ValueError, "every γ is 0"),
        (lambda: BatchSchedule({"one": 5}), TypeError, "rows"),
        (lambda: BatchSchedule(5), TypeError, "BatchSchedule.table"),
        (lambda: BatchSchedule([5, 4]), TypeError, "BatchSchedule.table"),
        (lambda: BatchSchedule("17"), TypeError, "BatchSchedule.table"),
        (lambda: as_policy({"stop": "batch_schedule"}), ValueError, "needs table"),
    ],
)
def test_refused_in_one_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
