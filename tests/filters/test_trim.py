"""Trimming drafted blocks by an estimate: calibrated, exact by enumeration, greedily the target's text, and by hand where it cuts."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from support import many, small, tiny
from support.blocks import draft_of
from support.enumeration import marginal, off
from support.refusals import refused
from support.sv_models import END, models, prompts

import hf_lossy_assist as hla
from hf_lossy_assist.filters import survival
from hf_lossy_assist.filters.survival import Survival, cut, describe
from hf_lossy_assist.filters.trim import EXPLORE, KNOWN, WARM, AdaptiveTrim, TrimRun
from hf_lossy_assist.models import row_model


CLOSE, FAR = 2e-6, 1e-3  # as in test_lossless_registry


# -- the cut --------------------------------------------------------------------------------------------------------------

PI = torch.tensor([[0.9, 0.6, 0.3], [0.8, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("lengths", "token", "column", "sent"),
    [
        ([3, 3], 0.0, 0.0, [3, 3]),
        ([3, 3], 0.5, 0.0, [2, 1]),
        ([1, 3], 0.25, 0.0, [1, 1]),
        ([3, 3], 0.0, 0.7, [2, 2]),  # 1.7, .8 and .4 a column
        ([1, 3], 0.0, 0.7, [1, 1]),  # the second column has one row
        ([0, 3], 0.0, 0.9, [0, 0]),
        ([3, 3], 0.5, 0.3, [1, 1]),  # beyond .5 a token: .7, .1
    ],
)
def test_the_cut_by_hand(lengths, token, column, sent):
    assert cut(PI, torch.tensor(lengths), token, column).tolist() == sent


def test_no_later_token_moves_a_cut():
    torch.manual_seed(0)
    for _ in range(200):
        pi, place = torch.rand(3, 4).cumprod(dim=1), int(torch.randint(4, ()))
        lengths, prices = torch.randint(5, (3,)), torch.rand(2).tolist()
        other, shorter = pi.clone(), lengths.clone()
        other[:, place + 1 :] *= torch.rand(3, 3 - place)
        shorter[lengths > place + 1] = place + 1
        before = cut(pi, lengths, *prices).clamp(max=place + 1)
        assert torch.equal(before, cut(other, lengths, *prices).clamp(max=place + 1))
        assert torch.equal(before, cut(pi, shorter, *prices).clamp(max=place + 1))


# -- the estimate ---------------------------------------------------------------------------------------------------------


def rounds(weights, count, seed=0, certain=False):
    """Drafts of 8 rows and 5 tokens, and how many of them each row accepts where the truth is a logistic model with `weights`."""
    torch.manual_seed(seed)
    for _ in range(count):
        q = torch.nn.functional.one_hot(torch.zeros(8, 5, dtype=torch.long), 2).float()
        if not certain:
            peak = torch.rand(8, 5) * 0.48 + 0.51
            q = torch.stack([peak, 1 - peak], dim=-1)
        draft = draft_of(torch.zeros(8, 5, dtype=torch.long), torch.full((8,), 5), q)
        chance = (describe(draft) @ torch.tensor(weights)).sigmoid()
        yield draft, (torch.rand(8, 5) < chance).long().cumprod(dim=1).sum(dim=1), chance


@pytest.mark.parametrize("before", [None, (6.0, 0.0, 0.0, 0.0), (-6.0, 0.0, 0.0, 0.0)], ids=str)
def test_it_is_calibrated_soon_also_where_it_was_sure_of_the_contrary(before):
    estimate, errors = Survival(torch.device("cpu")), []
    for weights, count in [(before, 100), ((0.5, 0.7, -2.0, 0.0), 160)]:
        for draft, accepted, chance in rounds(weights, count) if weights else ():
            found = estimate.of(describe(draft))
            errors.append(float((found - chance.cumprod(dim=1)).abs().mean()))
            estimate.learn(describe(draft), draft.lengths, accepted)
    assert np.mean(errors[-40:]) < 0.04
    assert before is None or errors[-160] > 0.2, "what it knew at first was no worse"


def test_certain_drafts_have_an_estimate_by_place():
    estimate = Survival(torch.device("cpu"))
    none = replace(next(rounds((0.0,) * 4, 1))[0], probs=None)
    assert estimate.of(describe(none))[0, 0] > 0.95, "neutral: a certain draft is believed"
    for draft, accepted, _ in rounds((0.6, 0.0, -4.0, 0.0), 200, certain=True):
        estimate.learn(describe(draft), draft.lengths, accepted)
    found = estimate.of(describe(none))[0]
    expected = torch.sigmoid(0.6 - 4.0 * torch.arange(5) / survival.PLACES).cumprod(dim=0)
    assert (found - expected).abs().max() < 0.06


def test_only_what_was_tested_is_learned_and_invalid_logits_do_no_harm():
    one, other = Survival(torch.device("cpu")), Survival(torch.device("cpu"))
    (draft, _, _), sent, accepted = next(rounds((0.0,) * 4, 1)), torch.full((8,), 3), torch.ones(8, dtype=torch.long)
    one.learn(describe(draft), sent, accepted)
    q = draft.probs.clone()
    q[:, 2:] = torch.nan
    other.learn(describe(replace(draft, probs=q)), sent, accepted)
    assert torch.equal(one.weights, other.weights) and bool(one.weights.isfinite().all())
    assert not torch.equal(one.weights, Survival(torch.device("cpu")).weights)


# -- prices ---------------------------------------------------------------------------------------------------------------


def test_the_price_by_hand():
    """Not before `WARM` rounds of such batches; 2 rows, 3 tokens each, in 1 + 4·.1 + 2·(2·.05) = 1.6 units."""
    run = AdaptiveTrim(step=0.1, token=0.05).start()
    draft = draft_of(torch.zeros(2, 4, dtype=torch.long), torch.tensor([4, 4]))
    for n in range(EXPLORE + 1):
        expected = 0.05 * 2 * 3 / 1.6 if WARM <= n < EXPLORE else 0.0
        assert run.known.price(2, 2) == pytest.approx(expected), n
        run.begin_round(2, None)
        selection = run.select(draft, None, None)
        assert (selection.counts is None) == (expected == 0.0)
        run.observe(replace(selection, counts=[2, 2]), torch.tensor([2, 2]), 4)
    assert run.known.price(9, 9) == 0.0, "batches of another size"


def test_measured_costs():
    """A draft of 3 tokens takes .3 s, a round beside it 1 s and .1 s for each verified token of each row."""
    seconds = [0.0]
    run = TrimRun(AdaptiveTrim(), now=lambda: seconds[0])
    draft = draft_of(torch.zeros(2, 3, dtype=torch.long), torch.tensor([3, 3]))
    for n in range(40):
        run.begin_round(2, None)
        seconds[0] += 0.3
        selection = run.select(draft, None, None)
        verified = 1 + n % 3
        seconds[0] += 1 + 0.1 * 2 * (verified + 1)
        run.observe(replace(selection, counts=[verified] * 2), torch.tensor([1, 1]), 2)
    assert run.known.costs.column(1) == pytest.approx(0.1, rel=0.05)
    assert run.known.price(2, 2) == pytest.approx(0.1 * 2 * 2 / (1.3 + 0.1 * 2 * 3), rel=0.05)


def test_the_joint_stop_beside_it_by_hand():
    """Drafting on costs a step alone, and only rows whose next token is worth verifying count."""
    run = hla.JointGoodput(step=0.1, token=0.05, exponent=1.0).start(2)
    run.trims = True
    run.begin_round([0, 1])
    sure = (torch.tensor([[0.99, 0.01]] * 2).log(),)
    for _ in range(5):
        run.after_token(torch.zeros(2, 1, dtype=torch.long), sure, rows=[0, 1])
    run.observe([0, 1], [3, 1], [3, 1])  # 3 tokens a row in 1 + 5·.1 + 2·(2·.05) = 1.7 units; ā = 5/6
    run.begin_round([0, 1])
    assert not run.after_token(torch.zeros(2, 1, dtype=torch.long), sure, rows=[0, 1]).any()
    rate = 2 * 3 / 1.7 * 6 / 5
    assert (run.least, run.each) == (pytest.approx(rate * 0.1), pytest.approx(rate * 0.05))
    for worth, stops in (((0.9, 0.1), False), ((0.6, 0.6), False), ((0.4, 0.4), True), ((0.6, 0.2), True)):
        run.worth, run.factors = torch.tensor(worth), torch.ones_like(run.factors)
        found = run.after_token(torch.zeros(2, 1, dtype=torch.long), sure, rows=[0, 1])
        assert found.tolist() == [stops] * 2, worth


def test_settings():
    assert hla.as_policy("trim").filter == AdaptiveTrim() and hla.as_policy("trim").lossless
    spec = {"filter": {"name": "trim", "step": 0.1, "token": 0.2, "fixed": 1.0}}
    assert hla.LossyPolicy.from_dict(spec).to_dict() == spec
    refused(lambda: AdaptiveTrim(token=0.1).start(), "no effect without step")
    refused(lambda: AdaptiveTrim(step=0.1, fixed=0), "above 0")
    refused(lambda: hla.as_policy("trim", companion="org/name"), "companion=… is for .* leave it out")
    refused(lambda: hla.as_policy({"filter": {"name": "trim", "companion": "org/name"}}), "companion")


# -- the law --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Practised(AdaptiveTrim):
    """A filter that knows what rounds cost and give, so that it cuts in the first."""

    def start(self):
        return practise(super().start())


def practise(run):
    run.known.rounds = WARM
    run.known.averages = {size: [1.0, 2.0, 2.0, 1.5] for size in range(1, 4)}
    return run


class Peeking(TrimRun):
    """Decides on a token by what was drawn."""

    def select(self, draft, companion, randomness):
        q = draft.at_tokens(draft.probs)
        selection = super().select(replace(draft, probs=torch.stack([q, 1 - q], dim=-1)), companion, randomness)
        return replace(selection, draft=draft)


@dataclass(frozen=True)
class PeekingTrim(AdaptiveTrim):
    def start(self):
        return practise(Peeking(self))


class Early(hla.Confidence):
    """Ends the round for all rows where it ends one's draft."""

    patience = 0.0


def trimmed(kind=Practised, token=0.4, **parts):
    return hla.LossyPolicy(filter=kind(step=0.1, token=token), **parts)


@pytest.mark.full(every=3)
@pytest.mark.parametrize("rule", [hla.Strict(), hla.BlockVerification()], ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("stop", [hla.Constant(3), hla.Confidence(0.45, 3), hla.SVIP(0.4, max_draft=3)], ids=str)
def test_the_law_of_one_row(stop, rule):
    target, draft, _ = models()
    for token in (0.3, 0.5):
        distance, runner = off(target, draft, trimmed(token=token, rule=rule, stop=stop), prompts(5), end=END)
        assert distance < CLOSE and runner.dropped > 0.01 and runner.verified > 0.01


def test_a_cut_by_the_token_itself_has_another_law():
    target, draft, _ = models()
    policy = trimmed(PeekingTrim, stop=hla.Constant(2))
    assert off(target, draft, policy, prompts(5), end=END)[0] > FAR


@pytest.mark.full(every=4)
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "stop",
    [hla.Constant(2), Early(0.3, 2), hla.JointGoodput(c=0.6, max_draft=2, step=0.1)],
    ids=lambda s: type(s).__name__,
)
def test_the_law_of_two_rows_together(monkeypatch, stop, ragged):
    """V = 3. Also where one row's draft ends another's: whether a token is there is known before it is drawn."""
    target, draft, _ = models(3)
    if ragged:
        monkeypatch.setattr(row_model.RowModel, "skips_padding", lambda *_: True)
    policy = trimmed(token=0.5 if stop.patience < 1 else 0.2, stop=stop)
    distance, runner = off(target, draft, policy, prompts(4, 4, size=3), length=2, end=END, real=ragged)
    rows = [np.abs(marginal(runner.law, b) - marginal(runner.expected, b)).max() for b in (0, 1)]
    assert distance < CLOSE and max(rows) < CLOSE and runner.dropped > 0.01


# -- texts ----------------------------------------------------------------------------------------------------------------

CUTS = Practised(step=0.1, token=0.15)


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_greedy_text_is_the_targets(name):
    target = tiny.shared(name)
    for lengths, kind in (((7,), "often"), ((3, 9, 5, 5), "rarely")):
        inputs = tiny.prompts(lengths)
        policy = hla.LossyPolicy(stop=hla.Constant(5), filter=CUTS)
        out = tiny.assisted(target, inputs, tiny.draft_of(target, kind), policy)
        assert torch.equal(out.sequences, tiny.greedy(target, inputs))
        total = out.speculation.total()
        assert total.num_dropped_tokens > 0 and total.num_draft_tokens > 0


@pytest.mark.full
def test_drafters_that_are_no_model():
    found = hla.demo.load()
    target = hla.enable(found.target)
    inputs = found.tokenizer([p.prompt for p in hla.demo.problems(3, 5)], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    expected = target.generate(**inputs, **settings).sequences
    for drafter in (hla.demo.drafter(), hla.demo.drafter("dspark"), "suffix"):
        policy = hla.LossyPolicy(stop=hla.Constant(5), filter=Practised(step=0.1, token=0.6))
        out = target.generate(**inputs, drafter=drafter, lossy_policy=policy, **settings)
        assert torch.equal(out.sequences, expected) and out.speculation.total().num_dropped_tokens > 0
    both = target.generate(**inputs, assistant_model=found.draft, drafter="composite", lossy_policy=policy, **settings)
    assert torch.equal(both.sequences, expected) and both.speculation.total().num_dropped_tokens > 0


@pytest.mark.full
def test_transformers_loop():
    target = small.llama(layers=3)
    policy, settings = hla.LossyPolicy(stop=hla.Constant(5), filter=Practised(step=0.1, token=0.6)), many.SETTINGS
    inputs = small.one()
    with hla.in_transformers_loop(target, policy) as loop:
        looped = target.generate(**inputs, assistant_model=small.near(target), **settings)
    assert torch.equal(looped, target.generate(**inputs, **settings))
    assert loop.speculation.total().num_dropped_tokens > 0


def test_what_never_cuts_is_no_filter():
    """Bit-equal, sampled too: without a price of verifying, and before anything is known."""
    target = tiny.shared("llama")
    inputs, draft = tiny.prompts((3, 6, 5)), tiny.draft_of(target, "often")
    for chosen, new in ((Practised(step=0.3), 12), (AdaptiveTrim(step=0.1, token=9.0), WARM)):
        texts = []
        for filter_ in (hla.VerifyAll(), chosen):
            torch.manual_seed(3)
            policy = hla.LossyPolicy(stop=hla.Constant(4), filter=filter_)
            out = tiny.assisted(target, inputs, draft, policy, do_sample=True, max_new_tokens=new)
            assert out.speculation.total().num_dropped_tokens == 0
            texts.append(out.sequences)
        assert torch.equal(*texts)


@pytest.mark.full
def test_many_prompts():
    target, draft = many.enabled_pair()
    texts = many.prompts()
    found = many.together((target, draft), texts, hla.LossyPolicy(stop=hla.Constant(4), filter=CUTS), max_rows=3)
    assert found == [many.alone(target, text, **many.SETTINGS) for text in texts]


@pytest.mark.full
def test_it_learns_for_the_pairs_next_call():
    target = tiny.build("llama")
    hla.enable(target)
    draft, inputs = tiny.draft_of(target, "rarely"), tiny.prompts((4, 7))
    policy = hla.LossyPolicy(stop=hla.Constant(5), filter=AdaptiveTrim())
    for _ in range(2):
        out = tiny.assisted(target, inputs, draft, policy)
        assert torch.equal(out.sequences, tiny.greedy(target, inputs))
    (known,) = KNOWN[target][draft].values()
    assert known.rounds > WARM and known.costs.known and 2 in known.averages
