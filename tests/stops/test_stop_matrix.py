"""Every draft stop by every property: its JSON form comes back, its limits stay within bounds, a call leaves nothing to the next, rows do not mix, and
the text is the target's.
"""

import copy
import itertools
import json
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from support import tiny
from support.heads import draft_of, head_for
from support.stops import LEAVES, ROUNDS, stock_lengths, walk
from transformers import StoppingCriteria

import hf_lossy_assist as hla
from hf_lossy_assist.stops import STOPS, StopRun


@dataclass(frozen=True)
class Case:
    """One stop, and what is true of it.

    `stop`: settings under which the rounds of the tiny models differ in length, where they can. `longest`: settings that always draft
    the longest, whatever is drafted and accepted. `form`: the JSON form of `stop`, but for a head.
    """

    stop: hla.DraftStop
    form: dict[str, Any]
    longest: hla.DraftStop | None
    state: bool  # its run keeps something from token to token or from round to round
    varied: bool = True  # rounds differ in length
    rows_apart: bool = True  # a row drafts as it would alone


@cache
def token_head() -> hla.LinearHead:
    """A random head on the state that encodes a token, above a half for most tokens, so that products of it fall slowly."""
    predicting = state_head()
    head = hla.LinearHead(
        hla.HeadConfig(predicting.config.hidden_size, features=hla.FeatureSpec(position="token"))
    ).eval()
    head.load_state_dict(predicting.state_dict())
    with torch.no_grad():
        head.linear.bias += 4.0
    return head


@cache
def state_head() -> hla.Head:
    """A random head on the state that predicts a token; an object of its own, because saving marks a head."""
    return head_for.__wrapped__(draft_of("llama"))


SHY = {
    "name": "confidence", "threshold": 0.3, "max_draft": 20,
}  # in the forms of stops around it  # fmt: skip

CASES = {
    "constant": Case(
        hla.Constant(4), {"name": "constant", "gamma": 4},
        longest=hla.Constant(6), state=False, varied=False,
    ),
    "heuristic": Case(
        hla.Heuristic(2, 9), {"name": "heuristic", "initial": 2, "max_draft": 9},
        longest=None, state=True,
    ),
    "confidence": Case(
        hla.Confidence(0.17, 9), {"name": "confidence", "threshold": 0.17, "max_draft": 9},
        longest=hla.Confidence(0.0, 6), state=False,
    ),
    "svip": Case(
        hla.SVIP(h=1.5, form="entropy"), {"name": "svip", "h": 1.5, "c": 0.15, "form": "entropy", "max_draft": 40},
        longest=hla.SVIP(h=math.inf, max_draft=6), state=False,
    ),
    "head": Case(
        hla.HeadStop(state_head(), 0.4), {"name": "head", "threshold": 0.4, "max_draft": 20, "patience": 1.0},
        longest=hla.HeadStop(state_head(), 0.0, 6), state=False,
    ),
    "specdec": Case(
        hla.SpecDecPP(token_head(), 0.5), {"name": "specdec", "threshold": 0.5, "max_draft": 20},
        longest=hla.SpecDecPP(token_head(), 1.0, 6), state=True,
    ),
    "batch_schedule": Case(
        hla.BatchSchedule({1: 7, 3: 2}), {"name": "batch_schedule", "table": [[1, 7], [3, 2]]},
        longest=hla.BatchSchedule({1: 6}), state=False, varied=False, rows_apart=False,
    ),
    "joint_goodput": Case(
        hla.JointGoodput(step=0.1, token=0.01),
        {"name": "joint_goodput", "h": 0.3, "c": 0.15, "max_draft": 40, "exponent": 2.0, "step": 0.1, "token": 0.01, "fixed": 1.0},
        longest=hla.JointGoodput(h=math.inf, max_draft=6, step=0.0), state=True, rows_apart=False,
    ),
    "at_least": Case(
        hla.AtLeast(hla.Confidence(0.3), 3), {"name": "at_least", "stop": SHY, "n": 3},
        longest=hla.AtLeast(hla.Confidence(1.0), 20), state=True,
    ),
    "any_of": Case(
        hla.AnyOf([hla.Confidence(0.3), hla.Heuristic(4, 9), hla.Constant(7)]),
        {"name": "any_of", "stops": [SHY, {"name": "heuristic", "initial": 4, "max_draft": 9}, {"name": "constant", "gamma": 7}]},
        longest=hla.AnyOf([hla.Constant(8), hla.Confidence(0.0, 6)]), state=True,
    ),
    "all_of": Case(
        hla.AllOf([hla.Confidence(0.3), hla.SVIP(h=1.5, form="entropy"), hla.Constant(2)]),
        {"name": "all_of", "stops": [SHY, {"name": "svip", "h": 1.5, "c": 0.15, "form": "entropy", "max_draft": 40},
                                     {"name": "constant", "gamma": 2}]},
        longest=hla.AllOf([hla.Confidence(0.0, 6), hla.Confidence(1.0, 6)]), state=True,
    ),
    "fallback": Case(  # with this margin nothing depends on the seconds of a round
        hla.Fallback(hla.Confidence(0.3), margin=1.0),
        {"name": "fallback", "stop": SHY, "margin": 1.0, "first": 3, "window": 8, "wait": 32, "trials": 0.02},
        longest=None, state=True, rows_apart=False,
    ),
}  # fmt: skip


RAGGED = (9, 1, 4, 14)
WHOLE = {"eos_token_id": tiny.NEVER_EMITTED}


def write(stop, kind="often", inputs=None, **settings):
    model = tiny.shared("llama")
    return tiny.assisted(model, inputs or tiny.prompts(RAGGED), tiny.draft_of(model, kind), stop, **settings)


def test_no_stop_is_forgotten():
    assert {type(case.stop) for case in CASES.values()} == set(STOPS.values())
    assert all(type(CASES[name].stop) is cls for name, cls in STOPS.items())


def test_json_round_trip(tmp_path):
    for name, case in CASES.items():
        policy = hla.LossyPolicy(stop=case.stop)
        policy.save_pretrained(tmp_path / name)
        loaded = hla.LossyPolicy.from_pretrained(tmp_path / name)
        assert loaded == policy and hash(loaded) == hash(policy), name
        spec = loaded.to_dict()
        assert {key: value for key, value in spec["stop"].items() if key != "head"} == case.form
        assert json.loads(json.dumps(spec)) == spec, "the JSON form is plain JSON"
        assert hla.as_policy(json.dumps(spec)) == hla.as_policy(spec) == policy, name


def test_with_longest():
    """`num_assistant_tokens=` bounds drafts: no first draft is longer, the settings that always draft the longest draft so many, the rest stays."""
    for gamma, case in itertools.product((1, 3, 5), CASES.values()):
        for stop in filter(None, (case.stop, case.longest)):
            changed = stop.with_longest(gamma)
            assert type(changed) is type(stop) and changed.with_longest(gamma) == changed
            limits = changed.start(2).begin_round([0, 1])
            assert max(limits) <= gamma, stop
            assert stop is not case.longest or limits == [gamma, gamma] == [changed.longest] * 2, stop
            for what in ("adaptive", "features", "patience"):
                assert getattr(changed, what) == getattr(stop, what), stop
            lengths = ("gamma", "max_draft", "initial", "table", "n", "stop", "stops")
            assert all(value == getattr(stop, key) for key, value in vars(changed).items() if key not in lengths)


def test_a_run_keeps_what_it_learns_to_itself():
    """The settings do not change, and the next run drafts the same; `walk` checks that limits stay within [0, longest]."""
    for name, case in CASES.items():
        before, run = copy.copy(case.stop), case.stop.start(2)
        assert isinstance(run, StopRun) and isinstance(run, StoppingCriteria) and run.settings is case.stop
        assert (type(run) is not StopRun) == case.state, "a separate run is for state"
        first = walk(case.stop)
        assert walk(case.stop) == first and case.stop == before, name
        with pytest.raises(AttributeError):
            case.stop.max_draft = 3
        drafted = [n for b, lengths in enumerate(first) for n in lengths[: LEAVES[b]]]
        assert len(set(drafted)) > 2 or not case.varied, "lengths that do not differ prove little"
        if case.longest is not None:
            longest = case.longest.longest
            assert walk(case.longest) == [[longest] * leaves + [0] * (ROUNDS - leaves) for leaves in LEAVES], name


@pytest.mark.parametrize("names", [("heuristic", "joint_goodput"), pytest.param(tuple(CASES), marks=pytest.mark.full)])
def test_rows_in_another_order_draft_the_same(names):
    """Also with other numbers in the call: what is kept of a row is its own."""
    for name in names:
        stop, found = CASES[name].stop, walk(CASES[name].stop)
        for order in ((1, 3, 0, 2), (3, 2, 1, 0)):
            assert walk(stop, order=order) == walk(stop, numbers=order) == walk(stop, order[::-1], order) == found


@pytest.mark.parametrize(
    "name", [name if name == "svip" else pytest.param(name, marks=pytest.mark.full) for name in CASES]
)
def test_in_generate(name):
    """The text is the target's under strict acceptance, two calls draft the same lengths, and rounds differ in length."""
    case, kinds = CASES[name], [tiny.DRAFTS[list(CASES).index(name) % len(tiny.DRAFTS)], "often"]
    expected = tiny.greedy(tiny.shared("llama"), tiny.prompts(RAGGED))
    for kind in dict.fromkeys(kinds):
        out = write(case.stop, kind)
        assert torch.equal(out.sequences, expected) and out.speculation.lossless
    again = write(case.stop, kind).speculation.rows
    assert [row.steps for row in out.speculation.rows] == [row.steps for row in again]
    # With end tokens off, so that what a row has learnt is its own in each of its rounds.
    prompts, together = tiny.prompts(RAGGED), write(case.stop, **WHOLE).speculation.rows
    sent = {length for row in together for length, _ in row.steps}
    assert (len(sent) > 2 or not case.varied) and max(sent) <= case.stop.longest
    for b, width in list(enumerate(RAGGED))[::3] if case.rows_apart else ():
        alone = {key: value[b : b + 1, -width:] for key, value in prompts.items()}
        [row] = write(case.stop, inputs=alone, **WHOLE).speculation.rows
        assert row.steps == together[b].steps and row.token_sources == together[b].token_sources


@pytest.mark.full
def test_in_transformers_loop():
    """It has one row, so that a stop that weighs rows against each other is refused there."""
    for name, case in CASES.items():
        if case.stop.joint:
            with pytest.raises(ValueError, match=f"^{type(case.stop).__name__} weighs the rows of a batch[^\n]*$"):
                stock_lengths(case.stop, "often")
            continue
        equal, sent = stock_lengths(case.stop, "often")
        assert equal and max(sent) <= case.stop.longest, name


class Odd(hla.DraftStop):
    """One class, one method: stops after an odd token."""

    longest = 7

    def should_stop(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 2 == 1


def test_a_custom_stop_is_one_class_with_one_method():
    out = write(Odd(), **WHOLE)
    assert torch.equal(out.sequences, tiny.greedy(tiny.shared("llama"), tiny.prompts(RAGGED), **WHOLE))
    assert len({length for row in out.speculation.rows for length, _ in row.steps}) > 2
    assert stock_lengths(hla.AtLeast(Odd(), 2), "often")[0]
    assert torch.equal(write(hla.AnyOf([Odd(), hla.SVIP()]), **WHOLE).sequences, out.sequences)


def test_a_stop_that_answers_nothing_is_refused():
    class Silent(hla.DraftStop):
        longest = 3

        def __call__(self, input_ids, scores, **kwargs):
            return input_ids[:, -1] % 2 == 1

    with pytest.raises(NotImplementedError, match=r"^Silent needs a method should_stop, or adaptive = False$"):
        write(Silent())
    with pytest.raises(AttributeError, match="max_draft"):
        write(hla.DraftStop())
