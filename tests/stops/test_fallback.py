"""Proves that drafting switches itself off where it does not pay, on again where it does, and that the text is the target's."""

import itertools
import json
from collections.abc import Callable

from support.stops import greedy_equals
from support.tiny import NEVER_EMITTED

import hf_lossy_assist as hla
from hf_lossy_assist import Constant, Fallback, LossyPolicy, as_policy
from hf_lossy_assist.stops.fallback import FallbackRun


GAMMA = 5


class World:
    """Rounds of given cost on a clock of its own: 1 second without drafts, `cost` with, for as many rows as there are."""

    def __init__(self, stop: Fallback, accepts: Callable[[int], int], cost: float, rows: int = 1):
        self.time, self.accepts, self.cost, self.rows = 0.0, accepts, cost, rows
        self.shares, self.sent = [1.0], GAMMA  # what of it each row accepts, in turn, and what a filter lets pass
        self.run = FallbackRun(stop, rows, now=lambda: self.time)

    def rounds(self, count: int) -> str:
        """D for each round that drafted, A for each of the target alone."""
        out = ""
        for _ in range(count):
            rows = list(range(self.rows))
            limits = self.run.begin_round(rows)
            drafts = limits[0] > 0
            self.time += (self.cost if drafts else 1.0) * self.rows
            sent = [min(self.sent, limit) for limit in limits]
            agrees = [int(self.shares[row % len(self.shares)] * self.accepts(len(out))) for row in rows]
            self.run.observe(rows, sent, [min(pair) for pair in zip(sent, agrees, strict=True)])
            out += "D" if drafts else "A"
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


def test_a_draft_that_agrees_goes_on():
    world = World(Fallback(Constant(GAMMA)), lambda i: 4, cost=2.0)
    assert lengths(world.rounds(50)) == [("D", 1), ("A", 1), ("D", 48)], "one round alone says what that costs"


def test_what_it_costs_decides():
    """2 tokens a round of 1.5 are worth 1.33 rounds without drafts, 1 token is worth 0.67."""
    for accepted, goes_on in ((1, True), (0, False)):
        world = World(Fallback(Constant(GAMMA)), lambda i, accepted=accepted: accepted, cost=1.5)
        assert (world.rounds(20)[-1] == "D") == goes_on
    for cost in (0.97, 1.03):  # within the margin on stays on
        world = World(Fallback(Constant(GAMMA), margin=0.05), lambda i: 0, cost=cost)
        assert lengths(world.rounds(40))[-1] == ("D", 38)


def test_it_comes_back():
    """The draft agrees in rounds 14 to 59; the next round that tries finds out, and the waiting starts anew."""
    world = World(
        Fallback(Constant(GAMMA), wait=8, window=4, trials=1.0), lambda i: 4 if 14 <= i < 60 else 0, cost=2.0
    )
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


def test_drafting_gets_dear_for_fewer_rows():
    world = World(Fallback(Constant(GAMMA)), lambda i: 1, cost=1.5, rows=8)
    assert world.rounds(10)[-1] == "D"
    world.rows, world.cost = 2, 3.0
    assert lengths(world.rounds(10)) == [("D", 1), ("A", 9)]


def test_rows_that_agree_apart_are_weighed_together():
    """One row of four agrees, wherever it stands: two tokens a row on average."""
    for shares, (cost, goes_on) in itertools.product(([1, 0, 0, 0], [0, 0, 0, 1]), ((1.5, True), (2.5, False))):
        world = World(Fallback(Constant(GAMMA)), lambda i: 4, cost=cost, rows=4)
        world.shares = shares
        assert (world.rounds(20)[-1] == "D") == goes_on, (shares, cost)


def test_a_filter_that_drops_every_draft_is_drafting_all_the_same():
    world = World(Fallback(Constant(GAMMA), wait=8, trials=1.0), lambda i: 4, cost=1.5)
    world.sent = 0
    assert lengths(world.rounds(30))[:4] == [("D", 1), ("A", 1), ("D", 2), ("A", 8)]


def test_it_is_counted():
    """Ten draft models' worth of work for nothing: most rounds are the target's alone, and say so."""
    stats = greedy_equals(Fallback(Constant(40)), kind="never", eos_token_id=NEVER_EMITTED, max_new_tokens=100)
    total = stats.total()
    assert total.num_plain_steps > 60 and total.num_plain_steps == sum(
        n for (sent, _), n in total.steps.items() if not sent
    )
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
