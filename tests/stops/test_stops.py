"""Proves each draft stop's decision by hand, that nothing it learns outlives a call, that it works in Transformers' own loop, and that rounds
without any draft are plain decoding.
"""

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support import tiny
from support.refusals import refused
from support.stops import RAGGED, answers, greedy_equals, logits, stock_lengths

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, BatchSchedule, Confidence, Constant, Heuristic, LossyPolicy, as_policy
from hf_lossy_assist.methods.sv.collect_samples import ObserveOnlyFilter
from hf_lossy_assist.round import Selection
from hf_lossy_assist.stops import DraftStop, StopRun, entropy


def test_entropy_by_hand():
    """H(.5, .5) = ln 2; H of a sure token = 0; H(.25 × 4) = ln 4; zeros do not matter, also when they are −inf logits."""
    laws = logits([0.5, 0.5, 0, 0], [1, 0, 0, 0], [0.25] * 4, [0.5, 0.25, 0.25, 0])[0]
    expected = torch.tensor([math.log(2), 0.0, math.log(4), 1.5 * math.log(2)])
    torch.testing.assert_close(entropy(laws), expected)
    assert entropy(laws[None].double()).shape == (1, 4)
    torch.testing.assert_close(entropy(laws + 100.0), expected)  # logits are no probabilities: a shift changes nothing
    assert entropy(laws.to(torch.bfloat16)).dtype == torch.float32


# H(p, 1 − p) = −p ln p − (1 − p) ln(1 − p), in nats:
BELOW_060 = [0.2850, 0.7150]  # .2850 · 1.2553 + .7150 · .3355 = .3578 + .2399 = .5976
ABOVE_060 = [0.2900, 0.7100]  # .2900 · 1.2379 + .7100 · .3425 = .3590 + .2432 = .6022
BELOW_009 = [0.0178, 0.9822]  # .0178 · 4.0286 + .9822 · .0180 = .0717 + .0176 = .0893
ABOVE_009 = [0.0180, 0.9820]  # .0180 · 4.0174 + .9820 · .0182 = .0723 + .0178 = .0902


def test_svip_by_hand():
    """√(0.15 · H) > 0.3  ⇔  H > 0.09 / 0.15 = 0.60. As "entropy", √H > 0.3  ⇔  H > 0.09, and c plays no part."""
    assert answers(SVIP(), BELOW_060, ABOVE_060) == [False, True]
    assert answers(SVIP(), [*BELOW_060, 0.0, 0.0], [*ABOVE_060, 0.0, 0.0]) == [False, True]  # −inf logits
    assert answers(SVIP(), BELOW_009, ABOVE_009) == [False, False]
    for stop in (SVIP(form="entropy"), SVIP(form="entropy", c=100.0)):
        assert answers(stop, BELOW_009, ABOVE_009) == [False, True]
    assert answers(SVIP(h=math.inf), [0.25] * 4) == [False]
    assert answers(SVIP(h=0.0), [0.9, 0.1], [1.0, 0.0]) == [True, False]  # H = 0 is not above 0
    early, late = logits([0.5, 0.5]), logits([1.0, 0.0])  # it looks at the last scores only
    assert SVIP().should_stop(torch.tensor([[0, 1]]), early + late).tolist() == [False]
    assert SVIP().should_stop(torch.tensor([[0, 1]]), late + early).tolist() == [True]


def test_confidence_looks_at_the_drafted_token():
    laws = [[0.45, 0.30, 0.25]] * 3
    assert answers(Confidence(0.4), *laws, tokens=[0, 1, 2]) == [False, True, True]
    assert answers(Confidence(0.0), *laws, tokens=[0, 1, 2]) == [False] * 3
    assert answers(Confidence(1.0), [1.0, 0.0], [0.9, 0.1]) == [False, True]  # below 1, not at it


def test_constant_plans_ahead_and_never_looks():
    stop = Constant(7).start(3)
    assert stop.begin_round([0, 2]) == [7, 7] and not stop.settings.adaptive
    assert answers(stop, [0.25] * 4) == [False]
    stop.observe([0, 2], [7, 7], [0, 7])
    assert stop.begin_round([0, 2]) == [7, 7]


def test_heuristic_schedule_of_each_row():
    """All accepted: two more, up to the cap; else one less, down to 1. Rows are told apart by their number in the call."""
    stop = Heuristic(initial=2, max_draft=5).start(3)
    assert stop.begin_round([0, 1, 2]) == [2, 2, 2]
    stop.observe([0, 1, 2], [2, 2, 2], [2, 1, 0])
    assert stop.begin_round([0, 1, 2]) == [4, 1, 1]
    stop.observe([0, 2], [4, 1], [4, 0])  # row 1 was not asked this time
    assert stop.begin_round([0, 1, 2]) == [5, 1, 1]
    stop.observe([2], [1], [1])
    assert stop.begin_round([2, 0]) == [3, 5]


def test_heuristic_forgets_between_calls():
    stop = Heuristic(initial=3)
    first = stop.start(1)
    first.observe([0], [3], [3])
    assert first.begin_round([0]) == [5]
    assert stop.start(1).begin_round([0]) == [3] and stop == Heuristic(initial=3)
    model = tiny.shared("llama")
    figures = [
        hla.enable(model).generate(
            **tiny.prompts((9,)), assistant_model=tiny.draft_of(model, "always"), lossy_policy=stop, max_new_tokens=30,
            eos_token_id=tiny.NEVER_EMITTED, do_sample=False, return_dict_in_generate=True,
        ).speculation.summary()["acceptance_histogram_by_draft_length"]
        for _ in range(2)
    ]  # fmt: skip
    # 3 + 1, 5 + 1, 7 + 1 make 18 tokens; of the 12 left, 9 + 1 in the fourth round; the last one has room for 1 + 1.
    assert figures[0] == figures[1]
    assert {int(sent): sum(counts) for sent, counts in figures[0].items()} == {1: 1, 3: 1, 5: 1, 7: 1, 9: 1}


def test_with_longest_of_the_heuristic_is_its_first_draft():
    for gamma, longest in ((9, 40), (50, 50)):
        changed = Heuristic().with_longest(gamma)
        assert changed == Heuristic(gamma, longest) and changed.start(2).begin_round([0, 1]) == [gamma, gamma]


def test_engine_gives_the_stop_raw_logits():
    """At temperature 100 every processed law is nearly flat; a stop that saw it would end each draft after one token."""
    model = tiny.shared("llama")
    with torch.no_grad():
        measured = entropy(model(tiny.prompts((9,))["input_ids"]).logits[0, -1])
    stop = SVIP(form="entropy", h=math.sqrt(measured.item() + 0.3))
    stats = hla.enable(model).generate(
        **tiny.prompts((9,)), assistant_model=model, lossy_policy=stop, max_new_tokens=20, do_sample=True,
        temperature=100.0, top_k=0, eos_token_id=tiny.NEVER_EMITTED, return_dict_in_generate=True,
    ).speculation  # fmt: skip
    assert stats.total().num_draft_tokens > stats.total().num_spec_steps


@pytest.mark.full
def test_drafts_in_transformers_loop_get_shorter():
    """With the model as its own draft all is accepted, so that the lengths are the stop's alone: 24 = 5 + 5 + 5 + 5 + 4."""
    assert stock_lengths(Constant(4), "always")[1] == [4, 4, 4, 4, 3]
    assert stock_lengths(SVIP(h=0.0), "always")[1] == [1] * 11 + [1]  # always uncertain: the token itself stays
    assert stock_lengths(SVIP(h=math.inf, max_draft=23), "always")[1] == [23]
    assert stock_lengths(Confidence(1.0), "always")[1] == [1] * 12
    assert stock_lengths(Heuristic(1, 40), "always")[1] == [1, 3, 5, 7, 3]  # 2 + 4 + 6 + 8, then 4 places are left
    middle = stock_lengths(SVIP(form="entropy", h=1.76), "always")[1]
    assert len(set(middle)) > 1 and 1 in middle


class Float(hla.DraftStop):
    longest = 4

    def should_stop(self, input_ids, scores, **kwargs):
        return torch.ones(len(input_ids))


@dataclass(frozen=True)
class OneAnswer(hla.DraftStop):
    """Its run answers for no row in particular."""

    max_draft: int = 4

    def start(self, rows):
        methods = {"after_token": lambda self, *args, **kwargs: torch.tensor(True)}
        return type("Whole", (StopRun,), methods)(self)


@dataclass(frozen=True)
class OneLength(hla.VerifyFilter):
    """Send as much of every row as of the first."""

    def select(self, draft, companion, randomness):
        return Selection(draft, draft.lengths[:1])


@dataclass(frozen=True)
class Plans(hla.DraftStop):
    """Plans whatever it is made with."""

    plan: object
    most: object = 4
    adaptive = False

    @property
    def longest(self):
        return self.most

    def limits(self, rows):
        return self.plan


NUMBER, LIST = "expected a whole number", "Plans.limits: expected a list of 2 numbers, one a row, got"
WRONG = [
    (Plans([9, 9]), ValueError, f"Plans.limits: {NUMBER} from 0 to 4, got 9"), (Plans([2]), TypeError, f"{LIST} [2]"),
    (Plans([2, -3]), ValueError, f"Plans.limits: {NUMBER} from 0 to 4, got -3"), (Plans(None), TypeError, f"{LIST} None"),
    (Plans([2, 2.5]), TypeError, f"Plans.limits: {NUMBER} from 0 to 4, got 2.5"),
    *((Plans([2, 2], most), TypeError, f"Plans.longest: {NUMBER} of at least 1, got {most!r}") for most in (None, "x", 2.5)),
    (Float(), TypeError, "Float: should_stop: expected bool of shape (2,), got "),
    (OneAnswer(), TypeError, "Whole: after_token: expected bool of shape (2,), got bool of shape ()"),
    (hla.LossyPolicy(filter=OneLength()), TypeError, "OneLength: select: Selection.sent: expected int64 of shape (2,), got "),
]  # fmt: skip


def test_what_a_custom_stop_or_filter_gets_wrong_is_one_line():
    model = tiny.shared("llama")
    for stop, error, line in WRONG:
        with pytest.raises(error, match=f"^{re.escape(line)}[^\n]*$"):
            tiny.assisted(model, tiny.prompts((5, 3)), tiny.draft_of(model, "often"), stop)


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


def test_a_drafted_end_token_ends_the_draft():
    text = tiny.greedy(tiny.shared("llama"), tiny.prompts((9,)), eos_token_id=tiny.NEVER_EMITTED)[0, 9:].tolist()
    end = next(n for n in range(6, 12) if text[n] not in text[:n] and n % 6)  # within a draft of six
    stats = greedy_equals(Constant(5), (9,), "always", eos_token_id=text[end])
    assert stats.total().num_draft_tokens == sum(n for _, n in stats.total().steps.elements()) > 0


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
