"""Proves that lossless sampling has exactly the target's law: by enumeration of every draft and coin, and by χ² over real calls.

Enumeration runs in float64 through the package's own rule objects. The χ² tests draw through `generate` and compare with the
law that the target's own warped probabilities give; the same counts must reject a rule that is wrong, or they prove nothing.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support.blocks import Everything, decide, sampling_block
from support.distributions import (
    CALLS,
    NEW,
    PROMPT,
    REJECT,
    SIZE,
    Tables,
    V,
    first_two,
    goodness,
    pair,
    sample,
    target_law,
)
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

import hf_lossy_assist as hla
from hf_lossy_assist import AcceptanceRule, Strict
from hf_lossy_assist.rules import draw


# -- exact enumeration ----------------------------------------------------------------------------------------------------


@pytest.mark.full(every=3)
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_two_tokens_have_the_targets_law(gamma, certain):
    """`certain`: q = None. Which tokens then are proposed, and how often, must not matter."""
    for seed in range(3):
        tables = Tables(seed, gamma + 1)
        expected = torch.stack([tables.p[()][x] * tables.p[x,] for x in range(V)])
        law = first_two(Strict(), tables, gamma, certain)
        torch.testing.assert_close(law, expected, atol=1e-12, rtol=0)
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


# -- χ² through generate --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Doubtful(AcceptanceRule):
    """Nearly right: it accepts a tenth too often."""

    lossless: ClassVar[bool] = False

    def probability(self, block):
        return (Strict().probability(block) + 0.1).clamp(max=1.0)


SETTINGS = {
    "temperature 0.7": ({"temperature": 0.7}, (TemperatureLogitsWarper(0.7),)),
    "temperature 1.3": ({"temperature": 1.3}, (TemperatureLogitsWarper(1.3),)),
    "top_p 0.8": ({"top_p": 0.8}, (TopPLogitsWarper(0.8),)),
}


def check_law(name, stop, calls, monkeypatch):
    """Samples under `stop` have the target's law over all 216 texts of three tokens; the same counts find a rule that is wrong."""
    settings, warpers = SETTINGS[name]
    law = target_law(warpers)
    torch.manual_seed(0)
    assert goodness(sample(hla.LossyPolicy(stop=stop), settings, calls), law) > REJECT
    # The warning of a lossy policy is not the matter here.
    monkeypatch.setattr("hf_lossy_assist.generation.speculative.announce", lambda policy: None)
    counts = sample(hla.LossyPolicy(rule=Everything(), stop=stop), settings, calls=1)
    assert goodness(counts, law) < REJECT, "the samples cannot tell a wrong rule from the target"


@pytest.mark.full
@pytest.mark.nightly(every=24)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("stop", [None, hla.SVIP(h=0.45), hla.Confidence(0.3)], ids=["constant", "svip", "confidence"])
def test_samples_have_the_targets_law(name, stop, monkeypatch):
    check_law(name, stop, CALLS, monkeypatch)


OTHER_STOPS = {
    "at_least": hla.AtLeast(hla.Confidence(0.3), 3),
    "any_of": hla.AnyOf([hla.Confidence(0.15), hla.Heuristic(4, 9)]),
    "all_of": hla.AllOf([hla.Confidence(0.3), hla.SVIP(form="entropy", h=1.5), hla.Constant(2)]),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", OTHER_STOPS)
def test_samples_under_other_stops_have_the_targets_law(name, monkeypatch):
    check_law("temperature 0.7", OTHER_STOPS[name], 2, monkeypatch)


@pytest.mark.nightly
def test_the_samples_find_a_rule_that_is_nearly_right(monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.generation.speculative.announce", lambda policy: None)
    for name, (settings, warpers) in SETTINGS.items():
        assert goodness(sample(hla.LossyPolicy(rule=Doubtful()), settings), target_law(warpers)) < REJECT, name


def test_stops_do_stop_in_that_test():
    """The draft stops above end some drafts after one token and let others run, or they would have proved nothing."""
    target, draft = pair()
    for stop in (hla.SVIP(h=0.45), hla.Confidence(0.3)):
        out = target.generate(
            PROMPT, attention_mask=torch.ones_like(PROMPT), do_sample=True, num_return_sequences=200, max_new_tokens=NEW,
            assistant_model=draft, lossy_policy=stop, return_dict_in_generate=True,
        )  # fmt: skip
        sent = {length for length, _ in out.speculation.total().steps}
        assert {1, 2} <= sent, stop


@pytest.mark.nightly
def test_prompt_lookup_has_the_targets_law():
    """q = None through the engine, at batch 1: a prompt that repeats itself, so that there is something to look up.

    Two tokens of each call count, 800 in all: of a rule that accepts a tenth too often (`Doubtful`) they give p < 1e-20.
    """
    target, _ = pair()
    torch.manual_seed(0)
    prompt, counts, accepted = torch.tensor([[3, 1, 4, 3, 1, 4, 3, 1]]), torch.zeros(SIZE**2, dtype=torch.long), 0
    for _ in range(400):
        out = target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=3,
            prompt_lookup_num_tokens=2, lossy_policy="strict", return_dict_in_generate=True,
        )  # fmt: skip
        counts[out.sequences[0, -3] * SIZE + out.sequences[0, -2]] += 1
        accepted += out.speculation.total().num_accepted_draft_tokens
    assert 0 < accepted < 800
    after = torch.cat([prompt.expand(SIZE, -1), torch.arange(SIZE)[:, None]], dim=1)
    with torch.no_grad():
        first = target(prompt).logits[0, -1].double().softmax(-1)
        second = target(after).logits[:, -1].double().softmax(-1)
    assert goodness(counts, (first[:, None] * second).flatten()) > REJECT
