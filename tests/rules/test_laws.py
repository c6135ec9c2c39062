"""Proves that lossless sampling has exactly the target's law, by enumeration of every draft and coin in float64 and by χ² over real calls; and that
block verification has it too and accepts no less than token by token.
"""

import itertools
import math

import pytest
import torch
from support import formulas
from support.blocks import Everything, decide, sampling_block
from support.distributions import REJECT, Tables, V, goodness, sample, target_law
from support.formulas import blocks, first_two
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist import AcceptanceRule, BlockVerification, Strict
from hf_lossy_assist.rules import draw


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_two_tokens_have_the_targets_distribution(certain):
    """`certain`: q = None. Which tokens then are proposed, and how often, must not matter."""
    for gamma, seed in ((1, 0), (1, 1), (2, 2), (3, 0)):
        tables = Tables(seed, gamma + 1)
        expected = torch.stack([tables.p[()][x] * tables.p[x,] for x in range(V)])
        found = first_two(Strict(), tables, gamma, certain)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
        wrong = first_two(Everything(), tables, gamma, certain)
        assert (wrong - expected).abs().max() > 1e-3, "the enumeration cannot tell a wrong rule"


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_decide_draws_by_that_law(certain):
    """The same with real coins: 100 000 rows of one block through `decide`."""
    rows, tables = 100_000, Tables(5, 2)
    p, q = tables.p[()].float(), tables.q[()].float()
    tokens = draw(q.expand(rows, 1, V)) if not certain else torch.arange(rows)[:, None] % V
    block = sampling_block(p.expand(rows, 2, V), None if certain else q.expand(rows, 1, V), tokens)

    def p_value(rule: AcceptanceRule) -> float:
        verdict = decide(rule, block)
        emitted = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.token)
        return goodness(torch.bincount(emitted, minlength=V), p.double())

    assert p_value(Strict()) > REJECT
    assert p_value(Everything()) < REJECT


@pytest.mark.nightly  # `test_lossless_registry.py` has the law of whole texts, and the test above that of real coins
@pytest.mark.filterwarnings("ignore:.*policy is lossy")
def test_samples_have_the_targets_distribution():
    """All 216 texts of three tokens; the same counts find a rule that is wrong."""
    settings, warpers = {"temperature": 0.7, "top_p": 0.9}, (TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9))
    expected = target_law(warpers)
    torch.manual_seed(0)
    assert goodness(sample(hla.LossyPolicy(stop=hla.SVIP(h=0.45)), settings), expected) > REJECT
    assert goodness(sample(hla.LossyPolicy(Everything()), settings, calls=1), expected) < REJECT


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


def edges(block):
    return BlockVerification().probability(block).nan_to_num()[..., None]


@pytest.mark.parametrize(("gamma", "size"), [(2, 4), pytest.param(3, 3, marks=pytest.mark.full)])
def test_blocks_have_the_targets_distribution(gamma, size, monkeypatch):
    """The first γ + 1 tokens, where a shorter round goes on with the target: to 1e-12."""
    monkeypatch.setattr("support.distributions.V", size)
    monkeypatch.setattr("support.formulas.V", size)
    for seed, certain in itertools.product(range(2), (False, True)):
        tables = Tables(seed, gamma)
        found = formulas.outcomes(BlockVerification(), tables, gamma, edges, certain)
        law = formulas.first_tokens(found, tables, gamma + 1)
        for text in itertools.product(range(size), repeat=gamma + 1):
            chance = math.prod(float(tables.p[text[:i]][x]) for i, x in enumerate(text))
            assert float(law[text]) == pytest.approx(chance, abs=1e-12)


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


def test_equal_laws_are_accepted_whole():
    p = torch.rand(500, 4, 6).softmax(-1)
    tokens = draw(p[:, :3])
    for rule in (BlockVerification(), Strict()):
        verdict = decide(rule, sampling_block(p, p[:, :3], tokens))
        assert (verdict.accepted == 3).float().mean() > 0.99  # rounding may turn a coin at 1 − 1e-7, never more
    nothing = decide(BlockVerification(), sampling_block(p[:, :1], None, torch.zeros(500, 0, dtype=torch.long)))
    assert not nothing.accepted.any()


def test_block_verification_refuses_to_be_combined():
    for make in (
        lambda: hla.Union((BlockVerification(), hla.TopK(2))),
        lambda: hla.Limited(BlockVerification(), per_request=3),
    ):
        with pytest.raises(ValueError, match="decides alone and cannot be combined"):
            make()
