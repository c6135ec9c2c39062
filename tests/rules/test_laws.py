"""Proves that lossless sampling has exactly the target's law: by enumeration of every draft and coin, and by χ² over real calls.

Enumeration runs in float64 through the package's own rule objects. The χ² tests draw through `generate` and compare with the
law that the target's own warped probabilities give; the same counts must reject a rule that is wrong, or they prove nothing.
"""

import pytest
import torch
from support.blocks import Everything, decide, sampling_block
from support.distributions import REJECT, Tables, V, goodness, sample, target_law
from support.formulas import first_two
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist import AcceptanceRule, Strict
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


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*policy is lossy")
def test_samples_have_the_targets_distribution():
    """All 216 texts of three tokens; the same counts find a rule that is wrong."""
    settings, warpers = {"temperature": 0.7, "top_p": 0.9}, (TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9))
    expected = target_law(warpers)
    torch.manual_seed(0)
    assert goodness(sample(hla.LossyPolicy(stop=hla.SVIP(h=0.45)), settings), expected) > REJECT
    assert goodness(sample(hla.LossyPolicy(Everything()), settings, calls=1), expected) < REJECT
