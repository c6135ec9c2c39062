"""Proves that the joint stop ends a batch's drafts where one token more no longer pays, by costs that it measures, and that one row is SVIP's."""

import gc
import math

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from support import tiny
from support.stops import RAGGED, answers, greedy_equals, logits

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, JointGoodput
from hf_lossy_assist.stops import cost_model
from hf_lossy_assist.stops import joint_goodput as joint
from hf_lossy_assist.stops.cost_model import BINS, PRIOR, WIDTH, AcceptanceEstimate, CostModel, RoundCosts, falling
from hf_lossy_assist.stops.joint_goodput import JointRun


SURE, TORN = [0.99, 0.01], [0.5, 0.5]  # H = .056 and .693 nats, √H = .237 and .833: bins 1 and 6
WHOLE = {"eos_token_id": tiny.NEVER_EMITTED}


def ask(run: JointRun, *laws: list[float], rows=None) -> list[bool]:
    """Return a run's answers for tokens from these laws, one for each row."""
    rows = range(len(laws)) if rows is None else rows
    return run.read([run.after_token(torch.zeros(len(laws), 1, dtype=torch.long), logits(*laws), rows=rows)])[0]


def test_the_choice_by_hand():
    """Until something is known 5 tokens; then while ā·Σ s^exponent ≥ ρ·(step + rows·token)."""
    settings = JointGoodput(step=0.1, token=0.05, exponent=2.0)
    run = settings.start(2)
    assert run.begin_round([0, 1]) == [40, 40]
    assert [ask(run, SURE, SURE) for _ in range(5)] == [[False, False]] * 4 + [[True, True]]
    run.observe([0, 1], [5, 5], [5, 3])  # tested: 5 and 4 tokens, accepted 8 of them
    run.begin_round([0, 1])
    # n̄ = 8/2 + 1 = 5 tokens a row in 1 + 5 · .2 = 2 units: ρ = 2 · 5/2 = 5; ā = 9/11. Σ s² ≥ 5 · .2 · 11/9 = 1.222.
    least = 11 / 9
    ask(run, SURE, SURE)
    assert run.least == pytest.approx(least)
    # Bin 1 has its middle at √H = 3/16: the bound is 1 − √.15 · 3/16 = .927, of 4 tokens; 8 of 9 were accepted.
    bound = 1 - math.sqrt(0.15) * 3 / 16
    a = (8 + PRIOR * bound) / (9 + PRIOR)
    longest = next(i for i in range(1, 40) if 2 * a ** (2 * i) < least)
    assert longest > 2
    found = [ask(run, SURE, SURE) for _ in range(longest - 1)]
    assert found == [[False, False]] * (longest - 2) + [[True, True]]


def test_doubtful_rows_go_on_beside_the_others_and_count_for_little():
    """Rows stop together or not at all; a doubtful token of each ends the round, one row's alone does not."""
    run = JointGoodput(step=0.05, exponent=1.0).start(4)
    run.begin_round([0, 1, 2, 3])
    for _ in range(5):
        ask(run, *[SURE] * 4)
    run.observe([0, 1, 2, 3], [5] * 4, [5] * 4)
    run.begin_round([0, 1, 2, 3])
    assert ask(run, SURE, SURE, SURE, TORN) == [False] * 4
    assert run.worth[3] < 0.75 < run.worth[0] == run.worth[1]
    for _ in range(9):
        found = ask(run, TORN, TORN, TORN, TORN)
        if all(found):
            return
        assert not any(found)
    pytest.fail("it goes on though s is next to nothing")


def test_rows_that_cannot_draft_on_count_for_nothing():
    """Three of four rows have ended: what the last may still gain is too little for a step of all four."""
    run = JointGoodput(step=0.2).start(4)
    run.begin_round([0, 1, 2, 3])
    for _ in range(5):
        ask(run, *[SURE] * 4)
    run.observe([0, 1, 2, 3], [5] * 4, [5] * 4)
    for open_, goes_on in (([0, 1, 2, 3], True), ([2], False), ([], False)):
        run.begin_round([0, 1, 2, 3])
        run.drafting(open_)
        assert ask(run, *[SURE] * 4) == [not goes_on] * 4
    for ended, goes_on in ((torch.tensor([False] * 4), True), (torch.tensor([True, True, False, True]), False)):
        run.begin_round([0, 1, 2, 3])
        assert ask(run, *[SURE] * 4) == [False] * 4
        run.stopped(ended)  # which the host has not looked at
        assert ask(run, *[SURE] * 4) == [not goes_on] * 4


def test_acceptance_is_the_bound_moved_to_what_was_counted():
    seen = AcceptanceEstimate()
    middles = (np.arange(BINS) + 0.5) * WIDTH
    assert seen.chances(0.15) == pytest.approx(np.maximum(1 - np.sqrt(0.15) * middles, 0))
    assert seen.chances(0.0).tolist() == [1.0] * BINS
    # Tested: 2, 2, 5 accepted, 5 rejected.
    seen.learn(np.array([[2, 2, 5], [5, 2, 2]]), np.array([3, 3]), np.array([3, 0]))
    assert seen.tested[[2, 5]].tolist() == [2, 2] and seen.accepted[[2, 5]].tolist() == [2, 1]
    assert seen.share == (3 + 1) / (4 + 2)
    bound = 1 - math.sqrt(0.15) * middles
    chances = seen.chances(0.15)
    assert chances[2] == pytest.approx((2 + PRIOR * bound[2]) / (2 + PRIOR))
    # Bin 5 has come out below bin 6, of which only the bound is known: they share their mean.
    assert chances[5] == chances[6] == pytest.approx((1 + PRIOR * bound[5] + PRIOR * bound[6]) / (2 + 2 * PRIOR))
    seen.learn(np.array([[2]]), np.array([1]), np.array([1]))
    assert seen.tested[2] == 2 * cost_model.KEEP + 1, "what is old counts less"


def test_a_surer_token_never_counts_for_less():
    """As scikit-learn has it; values of few digits are often equal."""
    random = np.random.default_rng(0)
    for digits in (1, 2, 9) * 10:
        values, weights = random.random(12).round(digits), random.uniform(0.1, 9, 12)
        found = falling(values, weights)
        expected = IsotonicRegression(increasing=False).fit_transform(np.arange(12), values, sample_weight=weights)
        assert (np.diff(found) <= 0).all() and found == pytest.approx(expected, abs=1e-9)


def test_many_tokens_outweigh_a_bound_nobody_has_tested():
    """All of 90 quite unsure tokens were accepted: what says otherwise of surer ones is four tokens' worth."""
    seen = AcceptanceEstimate()
    seen.learn(np.full((1, 90), 12), np.array([90]), np.array([90]))
    assert seen.chances(0.15)[:13].min() > 0.8


def test_bins_hold_every_entropy():
    found = cost_model.bins_of(torch.tensor([0.0, 0.0155, 0.0157, 12.0, math.inf, math.nan]))
    assert found.tolist() == [0, 0, 1, BINS - 1, BINS - 1, BINS - 1]


def test_seconds_are_taken_apart():
    """2 s + .5 s a row + .1 s a token, from rounds of several sizes, one of which was interrupted for 50 s."""
    fit = CostModel()
    for i, (rows, tokens) in enumerate(
        [(8, 48), (8, 72), (4, 16), (2, 20), (8, 16), (4, 36), (2, 6), (8, 32), (3, 30)] * 4
    ):
        fit.add((1, rows, tokens), 2 + 0.5 * rows + 0.1 * tokens + 50 * (i == 11))
    assert fit.of(0, 0, 1) == pytest.approx(0.1, rel=0.05)
    assert fit.of(1, 8, 48) == pytest.approx(10.8, rel=0.02)


def test_rounds_of_one_size_are_parts_alike():
    fit = CostModel()
    fit.add((1, 8, 48), 9.0)
    assert [fit.of(1, 0, 0), fit.of(0, 8, 0), fit.of(0, 0, 48)] == pytest.approx([3.0] * 3)
    for _ in range(70):
        fit.add((1, 8, 48), 6.0)
    assert fit.of(1, 8, 48) == pytest.approx(6.0, rel=0.01) and len(fit.points) == 1


def test_a_size_that_is_seen_all_the_time_does_not_drive_out_the_others():
    """Two sizes tell what a token costs, however long only one of them comes; of many sizes the latest are remembered."""
    fit = CostModel()
    for tokens in (10, *[20] * 300):
        fit.add((1, tokens), 1 + 0.2 * tokens)
    assert fit.of(0, 1) == pytest.approx(0.2, rel=0.1) and sum(map(len, fit.points.values())) == 1 + cost_model.EACH
    for tokens in range(30, 100):
        fit.add((1, tokens), 2 + 0.1 * tokens)
    assert fit.of(0, 1) == pytest.approx(0.1, rel=0.1) and len(fit.points) == cost_model.SIZES


def test_no_part_is_below_nothing():
    fit = CostModel()
    for tokens in (10, 20, 30, 40):
        fit.add((1, 8, tokens), 5 - 0.1 * tokens)
    assert fit.of(0, 0, 1) == 0.0


def test_a_measured_round():
    """It begins at 10, three tokens are drafted by 12, 12.5 and 13, the next round begins at 17: steps of .5, the rest 6."""
    costs = RoundCosts(None, 0.0, 1.0)
    assert not costs.ready
    costs.learn(4, [10.0, 12.0, 12.5, 13.0], 17.0, 3)
    assert costs.ready and list(costs.steps.points[1, 4]) == [0.5] and list(costs.rest.points[1, 4, 16]) == [6.0]
    assert costs.round(4, 3) == pytest.approx(7.0)
    costs.learn(4, [20.0, 22.0], 26.0, 1)  # one token: no second step to measure
    assert len(costs.steps.points[1, 4]) == 1 and list(costs.rest.points[1, 4, 8]) == [6.0]


def test_a_round_of_given_costs():
    """0.5 + 3 · 0.2 + 4 rows · 3 tokens · 0.1, whatever rounds take."""
    costs = RoundCosts(0.2, 0.1, 0.5)
    costs.learn(4, [10.0, 12.0], 17.0, 1)
    assert costs.ready and costs.step(4) == 0.2 and costs.column(4) == pytest.approx(0.4)
    assert costs.round(4, 3) == pytest.approx(0.5 + 0.6 + 1.2) and costs.round(4, 0) == pytest.approx(0.5)


class World:
    """Rounds on a clock of its own: `step` and `column` seconds for a batch of `rows`, and `fixed` for the rest of a round.

    Of the rows a share alpha^i accepts i tokens and more, as in rows whose tokens are accepted with probability alpha each.
    """

    def __init__(self, alpha: float, step: float, column: float, rows: int = 200, **settings):
        self.alpha, self.step, self.column, self.rows, self.time = alpha, step, column, rows, 0.0
        self.run = JointRun(JointGoodput(exponent=1.0, **settings), now=lambda: self.time)
        shares = (np.arange(rows) + 0.5) / rows
        self.accepts = [int(math.log(share) / math.log(alpha)) for share in shares]

    def seconds(self, gamma: int) -> float:
        return 1.0 + self.step * gamma + self.column * (gamma + 1)

    def round(self, first: bool = False) -> int:
        """One round; the first one of a call reads prompts. How much was drafted."""
        rows = list(range(self.rows))
        limits, gamma = self.run.begin_round(rows), 0
        stopped = False
        while not stopped and gamma < max(limits):
            gamma += 1
            self.time += self.step
            stopped = all(ask(self.run, *[SURE] * self.rows))
        self.time += self.seconds(gamma) - self.step * gamma + 30 * first
        self.run.observe(rows, [gamma] * self.rows, [min(n, gamma) for n in self.accepts])
        return gamma

    def rounds(self, count: int) -> list[int]:
        return [self.round(first=i == 0) for i in range(count)]

    def goodput(self, gamma: int) -> float:
        """Tokens of a row a second, at a constant draft length."""
        return sum(self.alpha**i for i in range(gamma + 1)) / self.seconds(gamma)


@pytest.mark.parametrize(
    ("alpha", "step", "column"),
    [(0.8, 0.05, 0.05), *(pytest.param(*x, marks=pytest.mark.full) for x in ((0.8, 0.2, 0.0), (0.95, 0.05, 0.01)))],
)
def test_it_finds_about_the_length_of_the_highest_goodput(alpha, step, column):
    """Nobody tells it what a step, a column or the rest costs, or how much is accepted."""
    world = World(alpha, step, column)
    found = world.rounds(60)
    assert found[:2] == [5, 5], "the first round is of the prompts, the second one measures"
    best = max(map(world.goodput, range(1, 41)))
    assert min(map(world.goodput, found[10:])) > 0.97 * best, found
    assert min(world.goodput(1), world.goodput(40)) < 0.7 * best, "this world does not care"
    costs = world.run.estimates.costs
    assert costs.step(200) == pytest.approx(step, rel=0.02)
    assert costs.round(200, found[-1]) == pytest.approx(world.seconds(found[-1]), rel=0.02)


def test_steps_as_dear_as_the_target_end_the_draft_at_once():
    assert World(0.8, step=1.0, column=0.0).rounds(20)[-10:] == [1] * 10


def test_what_costs_nothing_is_drafted_to_the_end():
    world = World(0.8, step=1e-5, column=0.0, max_draft=12)
    assert world.rounds(20)[-10:] == [12] * 10
    assert World(0.8, step=1e-5, column=0.2, max_draft=12).rounds(20)[-1] < 8, "columns that cost are another thing"


def test_one_row_is_svips():
    for shared, more in (({}, {}), ({}, {"step": 0.1}), ({"h": 0.2, "c": 0.4, "max_draft": 7}, {})):
        run, svip = JointGoodput(**shared, **more).start(1), SVIP(**shared).start(1)
        torch.manual_seed(1)
        for _ in range(4):
            assert run.begin_round([0]) == svip.begin_round([0])
            laws = (torch.randn(30, 12) * torch.rand(30, 1) * 6).softmax(dim=-1).tolist()
            found = [(answers(run, law)[0], answers(svip, law)[0]) for law in laws]
            assert all(ours == expected for ours, expected in found) and len(set(found)) == 2
            run.observe([0], [3], [2])


def test_the_last_row_of_a_batch_is_svips():
    run = JointGoodput(step=0.1).start(3)
    run.begin_round([0, 1, 2])
    ask(run, SURE, SURE, SURE)
    run.observe([0, 1, 2], [1, 1, 1], [1, 1, 1])
    run.begin_round([1])
    assert ask(run, SURE, SURE, TORN) == answers(SVIP(), SURE, SURE, TORN) == [False, False, True]


def test_greedy_text_is_the_targets_whatever_the_clock_says(monkeypatch):
    """A clock that goes by leaps, and one that stands still."""
    torch.manual_seed(0)
    leaps = iter(torch.rand(100_000).cumsum(0).tolist())
    for now in (lambda: next(leaps), lambda: 0.0):
        monkeypatch.setattr(JointRun.__init__, "__defaults__", (now,))
        monkeypatch.setattr(joint, "KNOWN", type(joint.KNOWN)())
        greedy_equals(JointGoodput(), RAGGED, "often")


INSIDE = (
    hla.Fallback(JointGoodput(), first=1, window=2, wait=2), hla.AnyOf([JointGoodput(), hla.Heuristic()]),
    hla.AllOf([JointGoodput(), SVIP()]), hla.AtLeast(JointGoodput(), 2),
)  # fmt: skip


@pytest.mark.full
def test_it_works_inside_other_stops(monkeypatch):
    for stop in INSIDE:
        assert stop.joint and not hla.AnyOf([SVIP(), hla.AtLeast(SVIP(), 2)]).joint
        monkeypatch.setattr(joint, "KNOWN", type(joint.KNOWN)())
        greedy_equals(stop, RAGGED, "often")
        (kinds,) = next(iter(joint.KNOWN.values())).values()
        (known,) = kinds.values()
        assert known.averages[0] > 1 and known.accepted.tested.sum() > 4, stop


def test_it_decides_without_a_look_at_the_device():
    """A tensor on "meta" holds no numbers: to read one is an error."""
    run = JointGoodput(step=0.05).start(3)
    run.begin_round([0, 1, 2])
    for _ in range(5):
        ask(run, SURE, SURE, SURE)
    run.observe([0, 1, 2], [5] * 3, [5] * 3)
    run.begin_round([0, 1, 2])
    run.edges = run.edges.to("meta")
    for may in ([0, 1, 2], [0, 1, 2], [2]):
        run.drafting(may)
        found = run.after_token(
            torch.zeros(3, 1, dtype=torch.long, device="meta"), (torch.zeros(3, 2, device="meta"),), rows=range(3)
        )
        assert found.device.type == "meta" and found.shape == (3,)


class Watching(hla.Runner):
    """Keeps the first round's draft."""

    def decode(self, call):
        drafts = []
        call.on_round = lambda verified, verdict: drafts.append(verified.tokens)
        stats = super().decode(call)
        self.first = drafts[0]
        return stats


def test_what_a_place_draws_does_not_depend_on_how_long_the_draft_is():
    """The drafts of the first round, rows with generators of their own: a longer one begins with the shorter one."""
    model, first = tiny.shared("llama"), {}
    for longest in (2, 4):
        generators = [torch.Generator().manual_seed(seed) for seed in range(4)]
        runner = Watching(JointGoodput(max_draft=longest), tiny.draft_of(model, "often"), generator=generators)
        model.generate(**tiny.prompts(RAGGED), do_sample=True, max_new_tokens=9, custom_generate=runner, **WHOLE)
        first[longest] = runner.first
    assert first[4].shape == (4, 4) and torch.equal(first[4][:, :2], first[2])


@pytest.mark.full
def test_what_was_learnt_of_a_pair_is_for_it_alone():
    model = tiny.build("llama")
    one, other = tiny.noisy(model, 0.05), tiny.noisy(model, 0.3)

    def write(draft, stop, target):
        tiny.assisted(target, tiny.prompts(RAGGED), draft, stop, **WHOLE)

    write(one, JointGoodput(), model)
    (known,) = joint.KNOWN[model][one].values()
    rounds, tested = known.averages[0], known.accepted.tested.sum()
    assert known.costs.ready and rounds > 1 and tested > 4
    write(other, hla.AtLeast(JointGoodput(), 1), model)
    write(one, JointGoodput(step=0.1), model)
    assert [*joint.KNOWN[model][one].values()] == [known] and (known.averages[0], known.accepted.tested.sum()) == (
        rounds,
        tested,
    )
    assert known not in joint.KNOWN[model][other].values()
    tiny.assisted(model, tiny.prompts(RAGGED), one, JointGoodput(), do_sample=True, **WHOLE)
    assert len(joint.KNOWN[model][one]) == 2 and known.averages[0] == rounds, "sampled tokens are accepted otherwise"
    write(one, hla.AnyOf([JointGoodput(max_draft=9), SVIP()]), model)
    assert known.averages[0] > rounds
    pairs = len(joint.KNOWN)
    del model, one, other, known
    gc.collect()
    assert len(joint.KNOWN) < pairs, "models are not kept for what is known of them"


def test_costs_without_a_step_are_refused():
    with pytest.raises(ValueError, match="no effect without step"):
        JointGoodput(token=0.1).start(1)
