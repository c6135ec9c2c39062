"""Proves that drafting switches itself off where it does not pay, on again where it does, that the next call of its kind goes on there, and
that the text is the target's.
"""

import itertools
import json
from collections.abc import Callable

import pytest
import torch
from support import tiny
from support.stops import RAGGED, greedy_equals
from support.tiny import NEVER_EMITTED

import hf_lossy_assist as hla
from hf_lossy_assist import Constant, Fallback, LossyPolicy, as_policy
from hf_lossy_assist.stops.base import DraftStop
from hf_lossy_assist.stops.fallback import MOST_WAIT, FallbackRun, Remembered


GAMMA = 5


class Model:
    """Something to remember by."""


class World:
    """Calls on a clock of their own: 1 second a round without drafts, `cost` with, for as many rows as there are."""

    def __init__(self, stop: Fallback, accepts: Callable[[int], int], cost: float = 2.0, rows: int = 1):
        self.time, self.stop, self.accepts, self.cost, self.rows = 0.0, stop, accepts, cost, rows
        self.shares, self.sent = [1.0], GAMMA  # what of it each row accepts, in turn, and what a filter lets pass
        self.target, self.draft = Model(), Model()
        self.run = FallbackRun(stop, rows, now=lambda: self.time)

    def call(self, count: int, rows: int = 1, kind: str = "strict", prompt: float = 0.0) -> str:
        """The rounds of another call of the pair, whose first one takes `prompt` seconds more."""
        self.rows, self.run = rows, FallbackRun(self.stop, rows, now=lambda: self.time)
        self.run.pair(self.target, self.draft, kind)
        return self.rounds(count, prompt)

    def rounds(self, count: int, prompt: float = 0.0) -> str:
        """D for each round that drafted, A for each of the target alone."""
        out = ""
        for number in range(count):
            rows = list(range(self.rows))
            limits = self.run.begin_round(rows)
            self.time += (self.cost if limits[0] else 1.0) * self.rows + prompt * (number == 0)
            sent = [min(self.sent, limit) for limit in limits]
            agrees = [int(self.shares[row % len(self.shares)] * self.accepts(len(out))) for row in rows]
            self.run.observe(rows, sent, [min(pair) for pair in zip(sent, agrees, strict=True)])
            out += "D" if limits[0] else "A"
        return out


def lengths(rounds: str) -> list[tuple[str, int]]:
    return [(kind, len(list(group))) for kind, group in itertools.groupby(rounds)]


def test_a_draft_that_never_agrees():
    """Three rounds to see it, then 8, 16, 32 … without, one round that tries in between."""
    world = World(Fallback(Constant(GAMMA), wait=8, trials=1.0), lambda i: 0, cost=2.0)
    assert lengths(world.rounds(70)) == [
        ("D", 1), ("A", 1), ("D", 2), ("A", 8), ("D", 1), ("A", 16), ("D", 1), ("A", 32), ("D", 1), ("A", 7)
    ]  # fmt: skip


def test_what_trials_cost_is_bounded():
    """A trial whose draft reads a long prompt costs as much as many rounds: the next waits until that is 2 % of them."""
    for cost in (2.0, 5.0, 40.0):
        rounds = World(Fallback(Constant(GAMMA), wait=8), lambda i: 0, cost=cost).rounds(20_000)
        trials = rounds[4:].count("D")
        assert trials >= 2, "it does try again"
        assert (trials - 1) * (cost - 1) <= 0.02 * 20_000
        first, waited, second = lengths(rounds)[4:7]
        assert first == second == ("D", 1) and waited == ("A", max(16, round((cost - 1) / 0.02))), cost


def test_what_it_costs_decides():
    """2 tokens a round of 1.5 are worth 1.33 rounds without drafts, 1 token is worth 0.67."""
    for accepted, goes_on in ((1, True), (0, False)):
        world = World(Fallback(Constant(GAMMA)), lambda i, accepted=accepted: accepted, cost=1.5)
        assert (world.rounds(20)[-1] == "D") == goes_on
    for cost in (0.97, 1.03):  # within the margin on stays on
        world = World(Fallback(Constant(GAMMA), margin=0.05), lambda i: 0, cost=cost)
        assert lengths(world.rounds(40))[-1] == ("D", 38)


def test_rows_that_agree_apart_are_weighed_together_and_what_a_filter_drops_was_drafted():
    """One row of four agrees, wherever it stands: two tokens a row on average."""
    for shares, (cost, goes_on) in itertools.product(([1, 0, 0, 0], [0, 0, 0, 1]), ((1.5, True), (2.5, False))):
        world = World(Fallback(Constant(GAMMA)), lambda i: 4, cost=cost, rows=4)
        world.shares = shares
        assert (world.rounds(20)[-1] == "D") == goes_on, (shares, cost)
    world = World(Fallback(Constant(GAMMA), wait=8, trials=1.0), lambda i: 4, cost=1.5)
    world.sent = 0
    assert lengths(world.rounds(12)) == [("D", 1), ("A", 1), ("D", 2), ("A", 8)]


def test_it_comes_back():
    """The draft agrees in rounds 14 to 59; the next round that tries finds out, and the waiting starts anew."""
    stop = Fallback(Constant(GAMMA), wait=8, window=4, trials=1.0)
    world = World(stop, lambda i: 4 if 14 <= i < 60 else 0)
    found = lengths(world.rounds(90))
    assert found[:6] == [("D", 1), ("A", 1), ("D", 2), ("A", 8), ("D", 1), ("A", 16)]
    assert found[6][0] == "D" and 60 - 29 <= found[6][1] <= 60 - 29 + 4, "on, until four rounds have given too little"
    assert found[7] == ("A", 8), "not 32: it had paid in between"


def test_margin_1_never_switches_off():
    world = World(Fallback(Constant(GAMMA), margin=1.0), lambda i: 0, cost=9.0)
    assert lengths(world.rounds(40)) == [("D", 1), ("A", 1), ("D", 38)]


def test_seconds_are_taken_again_when_half_of_the_rows_have_ended():
    world = World(Fallback(Constant(GAMMA)), lambda i: 4, cost=2.0, rows=8)
    assert lengths(world.rounds(10)) == [("D", 1), ("A", 1), ("D", 8)]
    world.rows = 5
    assert lengths(world.rounds(10)) == [("D", 10)]
    world.rows = 4
    assert lengths(world.rounds(10)) == [("D", 1), ("A", 1), ("D", 8)]


@pytest.mark.full
def test_it_is_counted():
    """Ten draft models' worth of work for nothing: most rounds are the target's alone, and say so."""
    stats = greedy_equals(Fallback(Constant(40)), kind="never", eos_token_id=NEVER_EMITTED, max_new_tokens=100)
    total = stats.total()
    assert total.num_plain_steps == sum(n for (sent, _), n in total.steps.items() if not sent) > 60
    assert stats.summary()["num_plain_steps"] == total.num_plain_steps
    always = greedy_equals(Fallback(Constant(GAMMA), margin=1.0), kind="always", eos_token_id=NEVER_EMITTED)
    assert always.total().num_plain_steps <= 2, "the one that is measured, and perhaps a last token"


def test_json_and_one_argument():
    policy = LossyPolicy(rule=hla.TopK(2), stop=hla.SVIP()).with_fallback(wait=9)
    spec = json.loads(json.dumps(policy.to_dict()))
    assert spec["stop"]["name"] == "fallback" and spec["stop"]["stop"]["name"] == "svip" and spec["stop"]["wait"] == 9
    assert as_policy(spec) == policy
    assert LossyPolicy().with_fallback().stop == Fallback(Constant())
    assert Fallback(Constant(7)).longest == 7 and Fallback(Constant(7)).with_longest(3).longest == 3


def test_the_next_call_goes_on_with_the_waiting():
    pair = World(Fallback(Constant(5), wait=8, trials=1.0), lambda i: 0)
    assert pair.call(10) == "DADD" + "A" * 6
    assert pair.call(20) == "AA" + "D" + "A" * 16 + "D", "8 rounds without in both calls together, then twice as many"
    assert pair.call(40) == "A" * 32 + "D" + "A" * 7


def test_the_next_call_goes_on_with_what_trials_cost():
    pair = World(Fallback(Constant(5), wait=8), lambda i: 0)
    assert pair.call(13) == "DADD" + "A" * 8 + "D", "one second lost, which is 2 % of 50"
    assert pair.call(30) + pair.call(30) == "A" * 50 + "D" + "A" * 9


def test_other_rows_and_other_kinds_begin_as_ever():
    pair = World(Fallback(Constant(5)), lambda i: 0)
    assert pair.call(6) == "DADDAA"
    assert pair.call(6, rows=8) == "DADDAA" and pair.call(6, kind="top_k") == "DADDAA"
    assert pair.call(6) == "A" * 6 and pair.call(6, rows=12) == "A" * 6, "12 rows are about 8"
    pair.stop = Fallback(Constant(4))
    assert pair.call(6) == "DADDAA"


def test_a_draft_that_begins_to_agree_comes_back_for_good():
    pair = World(Fallback(Constant(5), wait=8), lambda i: 0)
    assert pair.call(6) == "DADDAA"
    pair.accepts = lambda i: 5
    assert pair.call(12) == "A" * 6 + "D" * 6
    assert pair.call(6) == "DADDDD"


def test_a_round_that_reads_a_prompt_does_not_say_what_rounds_cost():
    """Else one lucky trial of the next call would have it draft in vain to its end."""
    pair = World(Fallback(Constant(5), wait=8, trials=1.0), lambda i: 0)
    assert pair.call(6) + pair.call(5, prompt=100.0) == "DADDAA" + "A" * 5
    pair.accepts = lambda i: 5 if i < 3 else 0
    assert pair.call(16, prompt=100.0) == "AA" + "D" * 6 + "A" * 8


def test_waiting_has_an_end():
    pair = World(Fallback(Constant(5), wait=400, trials=1.0), lambda i: 0)
    for _ in range(5):
        pair.call(2000)
    out = pair.call(3 * MOST_WAIT)
    assert 2 <= out.count("D") <= 3


def test_a_stop_that_cannot_be_hashed_is_not_remembered():
    class Listed(DraftStop):
        adaptive, __hash__ = False, None
        longest = 3

    pair = World(Fallback(Listed()), lambda i: 0)
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
