"""Proves the rules that decide about several tokens together: block verification has the target's law and accepts no less than
token by token; FLy, limits and regret follow their definitions, coin by coin; the ensemble is Transformers' own.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from support import formulas, tiny
from support.blocks import changed, decide, greedy_block, make_round, random_block, sampling_block, started
from support.distributions import REJECT, Tables, goodness, sample, target_law
from support.formulas import blocks
from transformers.generation.utils import _speculative_sampling

import hf_lossy_assist as hla
from hf_lossy_assist import BlockVerification, FLy, LossyPolicy, Strict
from hf_lossy_assist.rules import draw
from hf_lossy_assist.rules.acceptance import prefix


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

# -- block verification ---------------------------------------------------------------------------------------------------


def edges(block):
    return BlockVerification().probability(block).nan_to_num()[..., None]


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize(("gamma", "size"), [(1, 4), (2, 4), (3, 3), (3, 4)])
def test_blocks_have_the_targets_law(gamma, size, certain, monkeypatch):
    """The first γ + 1 tokens, where a shorter round goes on with the target: to 1e-12."""
    monkeypatch.setattr("support.distributions.V", size)
    monkeypatch.setattr("support.formulas.V", size)
    for seed in range(2):
        tables = Tables(seed, gamma)
        law = formulas.first_tokens(
            formulas.outcomes(BlockVerification(), tables, gamma, edges, certain), tables, gamma + 1
        )
        for text in itertools.product(range(size), repeat=gamma + 1):
            chance = math.prod(float(tables.p[text[:i]][x]) for i, x in enumerate(text))
            assert float(law[text]) == pytest.approx(chance, abs=1e-12)


def test_the_enumeration_finds_a_wrong_block_rule():
    """Token by token with the block's chances: another law."""

    class Wrong(BlockVerification):
        def accepts(self, verified, coins):
            return coins < self.probability(verified)

    tables = Tables(0, 2)
    law = formulas.first_tokens(formulas.outcomes(Wrong(), tables, 2, edges), tables, 3)
    exact = formulas.first_tokens(formulas.outcomes(Strict(), tables, 2, edges), tables, 3)
    assert (law - exact).abs().max() > 1e-3


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_blocks_keep_at_least_as_much_as_token_by_token(certain):
    """P(at least i accepted | x₁ … xᵢ) is w for blocks and Π min(1, p/q) ≤ w token by token; on average it is more."""
    gamma, gains = 3, []
    for seed in range(3):
        tables = Tables(seed, gamma)
        drafts, weights, p, q = blocks(tables, gamma, certain)
        some = weights > 0
        block = sampling_block(p[some], None if certain else q[some], drafts[some])
        w = BlockVerification().weights(block)[:, 1:]
        single = Strict().probability(block).cumprod(dim=1)
        assert (w >= single - 1e-12).all()

        longer = {}
        for name, rule in (("block", BlockVerification()), ("strict", Strict())):
            out = formulas.outcomes(rule, tables, gamma, edges, certain)
            longer[name] = [sum(x for tokens, x in out.items() if len(tokens) > i) for i in range(1, gamma + 1)]
        for blockwise, strict in zip(longer["block"], longer["strict"], strict=True):
            assert blockwise >= strict - 1e-12
        gains.append(sum(longer["block"]) - sum(longer["strict"]))
        expected = (weights[some, None] * w).sum(dim=0)
        assert longer["block"] == pytest.approx(expected.tolist(), abs=1e-12)
    # Certain tokens have p/q = p ≤ 1, so that nothing good can make up for something bad.
    assert abs(max(gains)) < 1e-12 if certain else max(gains) > 1e-3


def test_the_papers_example():
    """Two tokens a and b, p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, γ = 2: 11/9 accepted in place of 10/9 (§2)."""
    tables = Tables(0, 2)
    for prefix_ in tables.p:
        tables.p[prefix_] = torch.tensor([1 / 3, 2 / 3, 0, 0, 0], dtype=torch.float64)
        tables.q[prefix_] = torch.tensor([2 / 3, 1 / 3, 0, 0, 0], dtype=torch.float64)
    for rule, accepted in ((Strict(), 10 / 9), (BlockVerification(), 11 / 9)):
        out = formulas.outcomes(rule, tables, 2, edges)
        assert sum(chance * (len(tokens) - 1) for tokens, chance in out.items()) == pytest.approx(accepted, abs=1e-12)


def test_one_outcome_may_be_shorter():
    block, lengths = random_block(0, rows=50_000), []
    block = changed(block, lengths=torch.full_like(block.drafted, 4), sent=torch.full_like(block.drafted, 4))
    for rule in (Strict(), BlockVerification()):
        torch.manual_seed(0)
        lengths.append(decide(rule, block).accepted)
    assert (lengths[1] < lengths[0]).any() and (lengths[1] > lengths[0]).any()
    assert lengths[1].double().mean() > lengths[0].double().mean() + 0.01


@pytest.mark.full
@pytest.mark.nightly(every=6)
@pytest.mark.parametrize("stop", [None, hla.SVIP(h=0.45)], ids=["constant", "svip"])
def test_samples_of_blocks_have_the_targets_law(stop):
    """Through generate, drafts of one length and of many."""
    torch.manual_seed(0)
    assert goodness(sample(LossyPolicy(BlockVerification(), stop), {"temperature": 1.3}), target_law_at(1.3)) > REJECT


def target_law_at(temperature):
    from transformers import TemperatureLogitsWarper

    return target_law((TemperatureLogitsWarper(temperature),))


def test_equal_laws_are_accepted_whole():
    p = torch.rand(500, 4, 6).softmax(-1)
    tokens = draw(p[:, :3])
    verdict = decide(BlockVerification(), sampling_block(p, p[:, :3], tokens))
    assert (verdict.accepted == 3).float().mean() > 0.99
    nothing = decide(BlockVerification(), sampling_block(p[:, :1], None, torch.zeros(500, 0, dtype=torch.long)))
    assert not nothing.accepted.any()


def test_block_verification_refuses_to_be_combined():
    for make in (
        lambda: hla.Union((BlockVerification(), hla.TopK(2))),
        lambda: hla.Limited(BlockVerification(), per_request=3),
        lambda: hla.Limited(hla.SyntheticForBenchmarks(0.5)),
    ):
        with pytest.raises(ValueError, match="decides alone and cannot be combined"):
            make()


# -- FLy ------------------------------------------------------------------------------------------------------------------


def fly(window, entropy, top_k):
    """The definition with loops: `strict` are the strict decisions of one row, `laws` its p, `draft` its tokens."""

    def accepted(draft, strict, laws):
        for i, x in enumerate(draft):
            if strict[i]:
                continue
            top = sorted(laws[i], reverse=True)[:top_k]
            uncertain = -sum(p * math.log(p) for p in top if p > 0) >= entropy
            whole = i + window < len(draft)
            if not (uncertain and laws[i][x] > 0 and whole and all(strict[i + 1 : i + 1 + window])):
                return i
        return len(draft)

    return accepted


@pytest.mark.parametrize(
    ("window", "entropy", "top_k"), [(1, 0.9, 3), (2, 0.9, 3), (2, 0.6, 2), (0, 0.9, 3), (3, 0.0, 9)]
)
def test_flys_law_by_enumeration(window, entropy, top_k):
    """Every draft and every pattern of strict decisions."""
    for seed in range(2):
        tables, gamma = Tables(seed, 3), 3
        found = formulas.outcomes(
            FLy(window, entropy, top_k), tables, gamma, lambda b: Strict().probability(b)[..., None]
        )
        definition, out = fly(window, entropy, top_k), {}
        for draft, weight, p, q in zip(*(x.tolist() for x in blocks(tables, gamma, False)), strict=True):
            a = [min(1.0, p[i][x] / q[i][x]) if q[i][x] else 0.0 for i, x in enumerate(draft)]
            for pattern in itertools.product((True, False), repeat=gamma):
                chance = weight * math.prod(a[i] if yes else 1 - a[i] for i, yes in enumerate(pattern))
                if chance == 0:
                    continue
                n = definition(draft, pattern, p)
                law = formulas.strict(np.array(p[n]), np.array(q[n]))[1] if n < gamma else p[n]
                for token, share in enumerate(law):
                    key = (*draft[:n], token)
                    out[key] = out.get(key, 0.0) + chance * share
        assert formulas.distance(found, out) < 1e-9


def test_fly_when_greedy():
    """
    drafted 5 6 7 8; the target says 5 9 7 8: the 6 is kept where two more tokens stand behind it and agree

    row 1: the 8 behind it does not agree   row 2: three drafted tokens, one behind the 6   row 3: the target is sure of the 9
    """
    best = [[5, 9, 7, 8, 4], [5, 9, 7, 3, 4], [5, 9, 7, 8, 4], [5, 9, 7, 8, 4]]
    block = greedy_block([[5, 6, 7, 8]] * 4, best, [4, 4, 3, 4])
    block.logits[3, 1] *= 50
    verdict = decide(FLy(2, 0.3), block)
    assert verdict.accepted.tolist() == [4, 1, 1, 1] and verdict.token.tolist() == [4, 9, 9, 9]
    assert verdict.lossy.long().tolist() == [[0, 1, 0, 0]] + [[0] * 4] * 3


def test_fly_never_keeps_an_impossible_token():
    block = greedy_block([[5, 6, 7, 8]], [[5, 9, 7, 8, 4]], [4])
    block.logits[0, 1, 6] = -math.inf
    assert decide(FLy(1, 0.0), block).accepted.tolist() == [1]


# -- regret ---------------------------------------------------------------------------------------------------------------


def test_regret_by_hand():
    """
    regrets 0 1 2 0 | 1 of one draft, left 5 4 3 2 1

    budget 3: all but the last, which would make it 4    budget 2: up to the 2    local 0.5: 1 ≤ .5·4, 2 > .5·3    per_block 1: the 1
    """
    scores = torch.zeros(1, 6, 4)
    scores[0, :, 0], scores[0, :, 1], scores[0, :, 2] = 5.0, 4.0, 3.0
    block = make_round(torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([5]), None, False, None, scores)
    for rule, accepted in (
        (hla.RegretBudget(4.0), 5), (hla.RegretBudget(3.0), 4), (hla.RegretBudget(2.0), 2),
        (hla.RegretBudget(9.0, local=0.5), 2), (hla.RegretBudget(9.0, per_block=1), 2), (hla.RegretBudget(0.5), 1),
        (hla.RegretBudget(9.0, per_block=0), 1), (hla.RegretBudget(0.0), 1),
    ):  # fmt: skip
        verdict = decide(rule, block)
        assert verdict.accepted.tolist() == [accepted], rule
    assert verdict.token.tolist() == [0]


def test_regret_of_a_forbidden_token_is_too_much():
    scores = torch.zeros(1, 2, 4)
    scores[0, 0] = torch.tensor([5.0, 4.0, -math.inf, 0.0])
    block = make_round(torch.tensor([[2]]), torch.tensor([1]), None, False, None, scores)
    assert decide(hla.RegretBudget(math.inf), block).accepted.tolist() == [0]


def test_regret_is_spent_over_the_rounds_of_each_row():
    """Two rows of three keep their accounts though the first of them leaves the batch; another call starts afresh."""
    scores = torch.zeros(3, 2, 4)
    scores[:, :, 0], scores[:, :, 1] = 5.0, 4.0
    for _ in range(2):
        run = hla.RegretBudget(2.0).start([torch.tensor([1])] * 3)
        for index, tokens, accepted in (
            ([0, 1, 2], [1, 1, 0], [1, 1, 1]), ([0, 1, 2], [1, 0, 1], [1, 1, 1]), ([1, 2], [1, 0], [1, 1]),
            ([1, 2], [1, 1], [0, 1]), ([1, 2], [0, 1], [1, 0]),
        ):  # fmt: skip
            rows = len(index)
            block = make_round(
                torch.tensor(tokens)[:, None], torch.ones(rows, dtype=torch.long), None, False, None, scores[:rows],
                torch.tensor(index),
            )  # fmt: skip
            verdict = decide(run, block)
            assert verdict.accepted.tolist() == accepted


# -- ensemble, against Transformers' own ----------------------------------------------------------------------------------


@pytest.mark.full(every=3)
@pytest.mark.parametrize("weight", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("kind", ["often", "rarely"])
def test_greedy_ensemble_is_that_of_transformers(weight, kind):
    model = tiny.build("llama")
    draft = tiny.draft_of(tiny.build("llama"), kind)
    draft.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    settings = {"max_new_tokens": tiny.NEW, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    inputs = tiny.prompts((9,))
    expected = model.generate(**inputs, **settings, assistant_model=draft, assistant_ensemble_weight=weight)
    alone = model.generate(**inputs, **settings)
    ours = tiny.assisted(model, inputs, draft, hla.Ensemble(weight), **settings)
    assert torch.equal(ours.sequences, expected)
    if kind == "rarely" and weight < 0.8:
        assert not torch.equal(expected, alone), "the ensemble decides otherwise than the target somewhere"


@pytest.mark.full
def test_sampled_ensemble_has_the_law_of_transformers():
    """Their function drawn 4000 times from hand-made laws, and our law of the same round."""
    tables, gamma, weight = Tables(7, 2), 2, 0.4
    law = formulas.outcomes(hla.Ensemble(weight), tables, gamma, lambda b: ensemble_edges(b, weight))
    keys = [key for key, chance in law.items() if chance > 1e-12]
    counts = dict.fromkeys(keys, 0)
    torch.manual_seed(1)
    q = lambda x: tables.q[x].float()  # noqa: E731
    for _ in range(4000):
        draft: list[int] = []
        for _ in range(gamma):
            draft.append(int(torch.multinomial(q(tuple(draft)), 1)))
        places = [tuple(draft[:i]) for i in range(gamma + 1)]
        tokens, n = _speculative_sampling(
            torch.tensor([draft]), torch.stack([q(x) for x in places[:-1]])[None].log(), gamma,
            torch.stack([tables.p[x].float() for x in places])[None].log(), assistant_ensemble_weight=weight,
        )  # fmt: skip
        assert tokens.shape[1] == int(n) + 1
        counts[tuple(tokens[0].tolist())] += 1
    expected = [law[key] * 4000 for key in keys]
    assert chisquare([counts[key] for key in keys], expected, sum_check=False).pvalue > REJECT
    wrong = formulas.outcomes(hla.Ensemble(0.7), tables, gamma, lambda b: ensemble_edges(b, 0.7))
    other = np.array([max(wrong.get(key, 0.0), 1e-9) for key in keys])
    assert chisquare([counts[key] for key in keys], other / other.sum() * 4000, sum_check=False).pvalue < REJECT


def ensemble_edges(block, weight):
    return hla.Ensemble(weight).probability(block)[..., None].nan_to_num()


# -- synthetic ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [True, False])
def test_synthetic_acceptance_has_its_rate(sampling):
    four = torch.full((20_000,), 4)
    block = changed(random_block(0, rows=20_000), sampling=sampling, lengths=four, sent=four)
    torch.manual_seed(0)
    verdict = decide(hla.SyntheticForBenchmarks(0.7), block)
    expected = torch.tensor([0.3 * 0.7**n for n in range(4)] + [0.7**4])
    assert chisquare(torch.bincount(verdict.accepted).numpy(), (expected * 20_000).numpy()).pvalue > REJECT
    if not sampling:
        assert torch.equal(verdict.token, block.argmax[torch.arange(20_000), verdict.accepted])
    coins_ = torch.rand(block.tokens.shape)
    run = started(hla.SyntheticForBenchmarks(1.0), block)
    assert torch.equal(prefix(run, block, coins_)[0].sum(dim=1), block.drafted)
