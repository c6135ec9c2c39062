"""Every rule, stop and filter beside an EAGLE-3 drafter: it works as with a draft model, or is refused by name in one line."""

from functools import cache

import numpy as np
import pytest
import torch
from support import eagle, heads, tiny
from support.rule_cases import BOTH, CASES, GREEDY, SAMPLING
from support.sv_models import bins, steep
from support.tiny import NEVER_EMITTED

import hf_lossy_assist as hla
from hf_lossy_assist.registry import list_entries


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

PROMPTS = (9, 1, 4, 14)


@cache
def drafter():
    return eagle.trained(hla.enable(tiny.shared("llama")), tiny.prompts(PROMPTS), tiny.NEW, draft_vocabulary=70)


def write(policy, mode, **more):
    settings = {"eos_token_id": NEVER_EMITTED, "max_new_tokens": 12} | more
    if mode == SAMPLING:
        settings |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
    drafts = drafter()  # which draws random numbers where it is made
    torch.manual_seed(3)
    return tiny.assisted(tiny.shared("llama"), tiny.prompts(PROMPTS), drafts, policy, **settings)


@pytest.mark.full(every=45)
@pytest.mark.nightly(every=15)
@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, case in CASES.items() for mode in case.modes])
def test_rules(name, mode):
    case = CASES[name]
    if case.neutral is not None:
        neutral, strict = write(case.neutral, mode), write("strict", mode)
        assert neutral.sequences.equal(strict.sequences) and neutral.speculation.num_lossy_accepts == 0
    out = write(case.ladder[-1], mode)
    assert out.sequences.shape == (4, 14 + 12) and out.speculation.lossless == case.ladder[-1].lossless


def stops():
    """Every registered stop that can be made of its defaults, and some that hold others."""
    for entry in list_entries("stop"):
        if not entry.required:
            yield entry.make()
    yield hla.AnyOf([hla.SVIP(), hla.Heuristic(3)])


@pytest.mark.full(every=3)
@pytest.mark.parametrize("stop", list(stops()), ids=lambda stop: type(stop).__name__)
def test_stops(stop):
    expected = tiny.greedy(tiny.shared("llama"), tiny.prompts(PROMPTS), eos_token_id=NEVER_EMITTED, max_new_tokens=12)
    out = write(hla.LossyPolicy(hla.Strict(), stop), GREEDY)
    assert out.sequences.equal(expected)
    sampled = write(hla.LossyPolicy(hla.Strict(), stop), SAMPLING)
    assert sampled.sequences.shape == expected.shape


@pytest.mark.parametrize("mode", BOTH)
def test_sv_with_a_companion(mode):
    """A draft model as the companion of an EAGLE-3 draft, as in SV's Figure 7."""
    target, companion = tiny.shared("llama"), tiny.draft_of(tiny.shared("llama"), "often")
    made = steep(target, drafter(), companion, bins(np.random.default_rng(0)), batch=4)
    out = write(hla.SpeculativeVerification(made, companion, 4), mode)
    if mode == GREEDY:
        assert out.sequences.equal(write("strict", GREEDY).sequences)
    total = out.speculation.total()
    assert total.num_dropped_tokens > 0 and out.speculation.forwards["companion"] > 0
    other = steep(target, tiny.draft_of(target, "rarely"), companion, bins(np.random.default_rng(0)), batch=4)
    with pytest.raises(ValueError, match="was made for the draft") as error:
        write(hla.SpeculativeVerification(other, companion, 4), mode)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", BOTH)
def test_sprinter_with_a_head_on_the_drafters_states(mode):
    spec = heads.linear()
    assert write(hla.HeadStop(spec, 0.4, 4), GREEDY).sequences.equal(write("strict", GREEDY).sequences)
    total = write(hla.LossyPolicy(hla.AllButLast(), hla.HeadStop(spec, 0.4, 4)), mode).speculation.total()
    assert total.num_unchecked_tokens > 0
