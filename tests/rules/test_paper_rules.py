"""The rules of examples/reproduce: FLy and regret follow their definitions, coin by coin; the ensemble is Transformers' own."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from support import formulas, paper_rules, tiny
from support.blocks import changed, decide, greedy_block, make_round, random_block
from support.distributions import REJECT, Tables
from support.formulas import blocks
from support.paper_rules import Ensemble, FLy, RegretBudget, SyntheticForBenchmarks

import hf_lossy_assist as hla
from hf_lossy_assist import Strict


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


def test_a_policy_that_names_one_says_where_it_is():
    for entry in paper_rules.ENTRIES:
        line = rf"^lossy_policy: {entry.name} [^\n]*examples/reproduce/{entry.make.__module__}.py[^\n]*$"
        for policy in ({"rule": {"name": entry.name, **entry.neutral}}, f"{entry.name}:a=1+svip"):
            with pytest.raises(ValueError, match=line):
                hla.as_policy(policy)


def test_the_command_knows_a_registered_one(hf_lossy):
    with paper_rules.registered():
        assert "in Python: lossy_rules.FLy" in hf_lossy("policies", "fly").out


def test_a_window_that_no_draft_has_is_strict():
    block = random_block(0)
    coins = torch.rand(block.tokens.shape)
    assert torch.equal(FLy(2**31 - 1, 0.0).accepts(block, coins), Strict().accepts(block, coins))


def test_divergence():
    logits, q = torch.randn(2, 40, 9) * 3
    q = q.softmax(dim=-1)
    found = paper_rules.find_kl(hla.Distributions(logits, q))[:, 0]
    p = logits.double().softmax(-1).numpy()
    expected = np.array([formulas.divergence(*pair) for pair in zip(p, q.double().numpy(), strict=True)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


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


def test_flys_distribution_by_enumeration():
    """Every draft and every pattern of strict decisions."""
    settings = ((1, 0.9, 3), (2, 0.9, 3), (2, 0.6, 2), (0, 0.9, 3), (3, 0.0, 9))
    for (window, entropy, top_k), seed in itertools.product(settings, range(2)):
        tables, gamma = Tables(seed, 3), 3
        rule = FLy(window, entropy, top_k)
        found = formulas.outcomes(rule, tables, gamma, lambda b: Strict().probability(b)[..., None])
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
        assert formulas.distance(found, out) < 1e-9, (window, entropy, top_k)


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


def test_regret_by_hand():
    """
    regrets 0 1 2 0 | 1 of one draft, left 5 4 3 2 1

    budget 3: all but the last, which would make it 4    budget 2: up to the 2    local 0.5: 1 ≤ .5·4, 2 > .5·3    per_block 1: the 1
    """
    scores = torch.zeros(1, 6, 4)
    scores[0, :, 0], scores[0, :, 1], scores[0, :, 2] = 5.0, 4.0, 3.0
    block = make_round(torch.tensor([[0, 1, 2, 0, 1]]), torch.tensor([5]), None, False, None, scores)
    for rule, accepted in (
        (RegretBudget(4.0), 5), (RegretBudget(3.0), 4), (RegretBudget(2.0), 2),
        (RegretBudget(9.0, local=0.5), 2), (RegretBudget(9.0, per_block=1), 2), (RegretBudget(0.5), 1),
        (RegretBudget(9.0, per_block=0), 1), (RegretBudget(0.0), 1),
    ):  # fmt: skip
        verdict = decide(rule, block)
        assert verdict.accepted.tolist() == [accepted], rule
    assert verdict.token.tolist() == [0]


def test_regret_of_a_forbidden_token_is_too_much():
    scores = torch.zeros(1, 2, 4)
    scores[0, 0] = torch.tensor([5.0, 4.0, -math.inf, 0.0])
    block = make_round(torch.tensor([[2]]), torch.tensor([1]), None, False, None, scores)
    assert decide(RegretBudget(math.inf), block).accepted.tolist() == [0]


def test_regret_is_spent_over_the_rounds_of_each_row():
    """Two rows of three keep their accounts though the first of them leaves the batch; another call starts afresh."""
    scores = torch.zeros(3, 2, 4)
    scores[:, :, 0], scores[:, :, 1] = 5.0, 4.0
    for _ in range(2):
        run = RegretBudget(2.0).start([torch.tensor([1])] * 3)
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


@pytest.mark.full
@pytest.mark.parametrize(("kind", "weight"), [("often", 0.8), ("rarely", 0.5)])
def test_greedy_ensemble_is_that_of_transformers(kind, weight):
    model = tiny.build("llama")
    draft = tiny.draft_of(tiny.build("llama"), kind)
    draft.generation_config.update(
        num_assistant_tokens=5, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    settings = {"max_new_tokens": tiny.NEW, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    inputs = tiny.prompts((9,))
    expected = model.generate(**inputs, **settings, assistant_model=draft, assistant_ensemble_weight=weight)
    ours = tiny.assisted(model, inputs, draft, Ensemble(weight), **settings)
    assert torch.equal(ours.sequences, expected)
    if kind == "rarely":
        alone = model.generate(**inputs, **settings)
        assert not torch.equal(expected, alone), "the ensemble decides otherwise than the target somewhere"


def test_synthetic_acceptance_has_its_rate_in_greedy_decoding():
    """Sampling: by its formula, as every rule."""
    four = torch.full((20_000,), 4)
    block = changed(random_block(0, rows=20_000), sampling=False, lengths=four, sent=four)
    torch.manual_seed(0)
    verdict = decide(SyntheticForBenchmarks(0.7), block)
    expected = torch.tensor([0.3 * 0.7**n for n in range(4)] + [0.7**4])
    assert chisquare(torch.bincount(verdict.accepted).numpy(), (expected * 20_000).numpy()).pvalue > REJECT
    assert torch.equal(verdict.token, block.argmax[torch.arange(20_000), verdict.accepted])
    assert torch.equal(decide(SyntheticForBenchmarks(1.0), block).accepted, block.drafted)
