"""Drafting that was off at a call's end is off at the beginning of the next call of its kind, and the draft model then reads nothing ahead."""

import pytest
import torch
from support import tiny
from support.stops import RAGGED

import hf_lossy_assist as hla
from hf_lossy_assist import Constant, Fallback
from hf_lossy_assist.stops.base import DraftStop
from hf_lossy_assist.stops.fallback import MOST_WAIT, FallbackRun, Remembered


class Model:
    """Something to remember by."""


class Pair:
    """Calls of two models on a clock of their own: 1 second a round, `cost` with drafts, of which `accepts` tokens are accepted."""

    def __init__(self, stop, accepts=0, cost=2.0):
        self.stop, self.accepts, self.cost, self.time = stop, accepts, cost, 0.0
        self.target, self.draft, self.lucky = Model(), Model(), False

    def call(self, rounds, rows=1, kind="strict", prompt=0.0):
        """D for each round that drafted, A for each of the target alone. `prompt`: seconds that the first one takes to read it."""
        run, out = FallbackRun(self.stop, rows, now=lambda: self.time), ""
        run.pair(self.target, self.draft, kind)
        for _ in range(rounds):
            limits = run.begin_round(list(range(rows)))
            self.time += prompt + (self.cost if limits[0] else 1.0)
            prompt = 0.0
            run.observe(list(range(rows)), limits, [min(self.accepts, limit) for limit in limits])
            if limits[0] and self.lucky:
                self.accepts = self.lucky = 0
            out += "D" if limits[0] else "A"
        return out


def test_the_next_call_goes_on_with_the_waiting():
    pair = Pair(Fallback(Constant(5), wait=8, trials=1.0))
    assert pair.call(10) == "DADD" + "A" * 6
    assert pair.call(20) == "AA" + "D" + "A" * 16 + "D", "8 rounds without in both calls together, then twice as many"
    assert pair.call(40) == "A" * 32 + "D" + "A" * 7


def test_the_next_call_goes_on_with_what_trials_cost():
    pair = Pair(Fallback(Constant(5), wait=8))
    assert pair.call(13) == "DADD" + "A" * 8 + "D", "one second lost, which is 2 % of 50"
    assert pair.call(30) + pair.call(30) == "A" * 50 + "D" + "A" * 9


def test_other_rows_and_other_kinds_begin_as_ever():
    pair = Pair(Fallback(Constant(5)))
    assert pair.call(6) == "DADDAA"
    assert pair.call(6, rows=8) == "DADDAA" and pair.call(6, kind="top_k") == "DADDAA"
    assert pair.call(6) == "A" * 6 and pair.call(6, rows=12) == "A" * 6, "12 rows are about 8"
    pair.stop = Fallback(Constant(4))
    assert pair.call(6) == "DADDAA"


def test_a_draft_that_begins_to_agree_comes_back_for_good():
    pair = Pair(Fallback(Constant(5), wait=8))
    assert pair.call(6) == "DADDAA"
    pair.accepts = 5
    assert pair.call(12) == "A" * 6 + "D" * 6
    assert pair.call(6) == "DADDDD"


def test_a_round_that_reads_a_prompt_does_not_say_what_rounds_cost():
    """Else one lucky trial of the next call would have it draft in vain to its end."""
    pair = Pair(Fallback(Constant(5), wait=8, trials=1.0))
    assert pair.call(6) + pair.call(5, prompt=100.0) == "DADDAA" + "A" * 5
    pair.accepts, pair.lucky = 5, True
    assert pair.call(16, prompt=100.0) == "AA" + "D" * 6 + "A" * 8


def test_waiting_has_an_end():
    pair = Pair(Fallback(Constant(5), wait=400, trials=1.0))
    for _ in range(5):
        pair.call(2000)
    out = pair.call(3 * MOST_WAIT)
    assert 2 <= out.count("D") <= 3


def test_a_stop_that_cannot_be_hashed_is_not_remembered():
    class Listed(DraftStop):
        adaptive, __hash__ = False, None
        longest = 3

    pair = Pair(Fallback(Listed()))
    assert pair.call(6) == "DADDAA" and pair.call(6) == "DADDAA"


def test_a_draft_that_begins_late_reads_all_at_once_and_the_text_is_the_targets():
    """Rows of several lengths: the draft has two forwards for what it missed, one with logits of a single place."""
    model, wait = tiny.shared("llama"), 12
    draft, policy = tiny.draft_of(model, "often"), Fallback(Constant(3), wait=wait)
    settings = {"max_new_tokens": 24, "eos_token_id": tiny.NEVER_EMITTED}
    reads = []
    hook = draft.register_forward_pre_hook(
        lambda _, args, kwargs: reads.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    with pytest.MonkeyPatch.context() as patch:
        # As if the last call had found that it does not pay.
        def pair(self, target, draft, kind):
            last = Remembered(wait, 0, 50.0, 0.0)
            self.begins_alone = self.switch.recall_from({len(RAGGED).bit_length(): last})

        patch.setattr(FallbackRun, "pair", pair)
        out = tiny.assisted(model, tiny.prompts(RAGGED), draft, policy, **settings)
    hook.remove()
    assert torch.equal(out.sequences, tiny.greedy(model, tiny.prompts(RAGGED), **settings))
    assert out.speculation.rows[0].num_plain_steps >= wait
    assert reads[0] == max(RAGGED) + wait - 1 and reads[1] == 1, "the prompts and what was written without it"


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_what_a_call_is_remembered_by():
    """Rules of one name, temperatures and drafters may accept, or draft, much more than others."""
    model = tiny.shared("llama")
    kinds, draft = [], tiny.draft_of(model, "often")
    stop = Fallback(Constant(3))
    calls = [
        ({"rule": {"name": "top_k", "k": 1}}, {}), ({"rule": {"name": "top_k", "k": 9}}, {}), ({}, {}),
        ({}, {"drafter": "composite"}), ({}, {"do_sample": True, "temperature": 0.2}),
        ({}, {"do_sample": True, "temperature": 2.0}),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FallbackRun, "pair", lambda *args: kinds.append(args[-1]))
        for _ in range(2):
            for policy, settings in calls:
                policy = hla.as_policy(policy | {"stop": stop})
                tiny.assisted(model, tiny.prompts((5,)), draft, policy, max_new_tokens=2, **settings)
    assert kinds[:6] == kinds[6:] and len(set(kinds)) == 6
