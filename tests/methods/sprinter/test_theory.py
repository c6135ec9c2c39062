"""Proves SPRINTER's formulas by enumeration of every draft, verdict and coin, and against the engine's rules; FLOPs by hand.

Each check is also given a formula or a procedure that is wrong, and must reject it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.blocks import decide, make_round
from support.distributions import EXACT, SAMPLES, near
from support.refusals import refused
from transformers import GPT2Config, GPTNeoConfig, LlamaConfig, T5Config

from hf_lossy_assist import AcceptanceRule, Verified
from hf_lossy_assist.methods.sprinter.theory import (
    accepted_probability,
    expected_accepted,
    expected_stop_time,
    expected_strict_tokens,
    forward_flops,
    sprinter_acceptance_rate,
    sprinter_distance,
    sprinter_flops,
    sprinter_law,
    strict_acceptance_rate,
    strict_flops,
    total_variation,
)


def law(*weights: float) -> torch.Tensor:
    out = torch.tensor(weights, dtype=torch.float64)
    return out / out.sum()


PAIRS = {
    "mixed": (law(5, 3, 2, 0), law(2, 6, 0, 2)),
    "ties": (law(4, 2, 2, 1, 1), law(4, 1, 3, 1, 1)),
    "disjoint": (law(1, 1, 0, 0), law(0, 0, 3, 1)),
    "equal": (law(1, 2, 3), law(1, 2, 3)),
    "certain draft": (law(1, 2, 7), law(0, 1, 0)),
    "certain target": (law(0, 0, 1), law(4, 3, 3)),
}
RATES = [(0.0, 0.0), (1.0, 0.0), (0.8, 0.3), (0.3, 0.8), (0.5, 0.5), (1.0, 1.0), (0.0, 1.0)]  # η_TP, η_FP
each_pair = pytest.mark.parametrize("name", PAIRS)


# -- one token ------------------------------------------------------------------------------------------------------------


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    out = (p - q).clamp(min=0)
    return out / out.sum() if out.sum() > 0 else out  # never drawn from where p = q


def enumerate_step(
    p, q, yes: Callable[[int], float], after_yes=None, after_refusal=None
) -> tuple[torch.Tensor, float]:
    """The law (V,) of one token and the chance that the drafted one stays, from `yes`(x), the verifier's rate for each token.

    `after_yes`, `after_refusal`: laws in place of "x itself" where the target's test passes, and of norm((p − q)⁺).
    """
    out, acceptance = torch.zeros_like(p), 0.0
    other = residual(p, q) if after_refusal is None else after_refusal
    for x in range(len(p)):
        for verdict, chance in ((True, yes(x)), (False, 1 - yes(x))):
            weight = float(q[x]) * chance
            if weight == 0:
                continue
            if verdict:
                out[x] += weight
                acceptance += weight
                continue
            stays = min(1.0, float(p[x] / q[x]))
            acceptance += weight * stays
            if after_yes is None:
                out[x] += weight * stays
            else:
                out += weight * stays * after_yes
            for y in range(len(p)):
                out[y] += weight * (1 - stays) * other[y]
    return out, acceptance


def iid(p, q, eta_tp, eta_fp) -> Callable[[int], float]:
    return lambda x: eta_tp if q[x] <= p[x] else eta_fp


def same(a, b) -> bool:
    return bool(
        (torch.as_tensor(a, dtype=torch.float64) - torch.as_tensor(b, dtype=torch.float64)).abs().max() < EXACT
    )


def check_enumeration(p: torch.Tensor, q: torch.Tensor, eta_tp: float, eta_fp: float) -> None:
    found, acceptance = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp))
    assert same(found.sum(), 1)
    assert same(found, sprinter_law(p, q, eta_fp)) and same(acceptance, sprinter_acceptance_rate(p, q, eta_fp))
    assert same(total_variation(p, found), sprinter_distance(p, q, eta_fp))


@each_pair
@pytest.mark.parametrize("eta_tp, eta_fp", RATES)
def test_theorems_3_1_and_a_4_by_enumeration(name, eta_tp, eta_fp):
    check_enumeration(*PAIRS[name], eta_tp, eta_fp)


rates = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))
weights = st.lists(st.integers(0, 5), min_size=4, max_size=4).filter(any)  # zeros and ties are common


@pytest.mark.full
@given(weights, weights, rates, rates)
def test_any_laws_by_enumeration(p, q, eta_tp, eta_fp):
    check_enumeration(law(*p), law(*q), eta_tp, eta_fp)


def test_values_worked_out_by_hand():
    """p = (.5 .3 .2 0), q = (.2 .6 0 .2): d_TV = ½ (.3 + .3 + .2 + .2) = .5, and with η_FP = .4 the law is .6 p + .4 q."""
    p, q = PAIRS["mixed"]
    assert same(total_variation(p, q), 0.5) and same(strict_acceptance_rate(p, q), 0.5)
    assert same(sprinter_law(p, q, 0.4), torch.tensor([0.38, 0.42, 0.12, 0.08], dtype=torch.float64))
    assert same(sprinter_distance(p, q, 0.4), 0.2) and same(sprinter_acceptance_rate(p, q, 0.4), 0.7)


def test_the_enumeration_rejects_what_is_wrong():
    p, q = PAIRS["mixed"]
    eta_tp, eta_fp = 0.8, 0.3
    right, acceptance = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp))
    assert not same(right, sprinter_law(p, q, eta_tp)), "η_TP and η_FP confused"
    assert not same(right, sprinter_law(q, p, eta_fp)), "p and q confused"
    assert not same(acceptance, sprinter_acceptance_rate(p, q, eta_tp))
    assert not same(acceptance, strict_acceptance_rate(p, q))
    assert not same(total_variation(p, right), sprinter_distance(p, q, eta_tp))
    swapped, _ = enumerate_step(p, q, iid(p, q, eta_fp, eta_tp))
    assert not same(swapped, sprinter_law(p, q, eta_fp)), "a verifier that confuses its rates"
    redrawn, _ = enumerate_step(p, q, iid(p, q, eta_tp, eta_fp), after_refusal=p)
    assert not same(redrawn, sprinter_law(p, q, eta_fp)), "a correction from p in place of norm((p − q)⁺)"


def test_algorithm_2_as_printed_does_not_have_the_law_of_theorem_3_1():
    """It draws a new token from p where the target's test passes, in place of keeping the drafted one (§A.5)."""
    p, q = PAIRS["mixed"]
    printed, _ = enumerate_step(p, q, iid(p, q, 0.8, 0.3), after_yes=p)
    assert same(printed.sum(), 1) and not same(printed, sprinter_law(p, q, 0.3))
    # Not even with a verifier that always calls the target, which is plain strict decoding by Theorem 3.1.
    never, _ = enumerate_step(p, q, lambda x: 0.0, after_yes=p)
    assert not same(never, p)


@each_pair
def test_a_verifier_whose_rate_depends_on_the_token(name):
    """The distance and A.4 then hold with the mean rate over norm((q − p)⁺); the mean over the drafted tokens is another."""
    p, q = PAIRS[name]
    rates = torch.linspace(0.1, 0.9, len(p), dtype=torch.float64)
    found, acceptance = enumerate_step(p, q, lambda x: float(rates[x]))
    mean = float((rates * residual(q, p)).sum())
    assert same(total_variation(p, found), sprinter_distance(p, q, mean))
    assert same(acceptance, sprinter_acceptance_rate(p, q, mean))
    if name == "mixed":
        unacceptable = q * (q > p)
        assert not same(
            total_variation(p, found),
            sprinter_distance(p, q, float((rates * unacceptable).sum() / unacceptable.sum())),
        )
        assert not same(found, sprinter_law(p, q, mean))


def test_laws_of_many_positions_at_once():
    p, q = (torch.stack([PAIRS["mixed"][i], PAIRS["disjoint"][i]]).reshape(2, 1, 4) for i in (0, 1))
    assert sprinter_law(p, q, 0.3).shape == (2, 1, 4)
    for measure in (total_variation, strict_acceptance_rate):
        assert measure(p, q).shape == (2, 1)
    assert same(sprinter_distance(p, q, 0.3)[1, 0], sprinter_distance(*PAIRS["disjoint"], 0.3))
    assert same(sprinter_acceptance_rate(p, q, 0.3)[1, 0], 0.3)


# -- the engine ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByVerdict(AcceptanceRule):
    """Accepts where a coin of the verifier's says yes; the union with strict acceptance is the engine's."""

    eta_tp: float = 1.0
    eta_fp: float = 0.0
    lossless: ClassVar[bool] = False

    def probability(self, block):
        acceptable = block.at_tokens(block.q) <= block.at_tokens(block.p)
        eta = torch.where(acceptable, self.eta_tp, self.eta_fp)
        return (torch.rand_like(eta) < eta).float()


def one_token_block(p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor) -> Verified:
    """A row for each of `tokens` (B,), one drafted token in each. p is put in place: log and softmax would break its ties."""
    rows = len(tokens)
    p = p.expand(rows, 2, -1)
    block = make_round(
        tokens[:, None], torch.ones(rows, dtype=torch.long), q.expand(rows, 1, -1), True, logits=p.log()
    )
    vars(block)["p"] = p
    return block


def shares_near(tokens: torch.Tensor, expected: torch.Tensor) -> bool:
    shares = torch.bincount(tokens, minlength=len(expected)) / len(tokens)
    return all(near(float(s), float(e), len(tokens)) for s, e in zip(shares, expected, strict=True))


@pytest.mark.parametrize("name", ["mixed", "ties", "disjoint"])
def test_decide_gives_the_same_law(name):
    """The same with the engine's coins and an i.i.d. verifier; a verifier with swapped rates is found out."""
    p, q = PAIRS[name]
    drafted = q.multinomial(SAMPLES, replacement=True)
    block = one_token_block(p, q, drafted)

    def emitted(eta_tp: float, eta_fp: float):
        verdict = decide(ByVerdict(eta_tp, eta_fp), block)
        return torch.where(verdict.accepted > 0, drafted, verdict.token), verdict

    tokens, verdict = emitted(0.8, 0.3)
    assert shares_near(tokens, sprinter_law(p, q, 0.3))
    assert near(float(verdict.accepted.double().mean()), float(sprinter_acceptance_rate(p, q, 0.3)))
    # What only the verifier let through is the gain over strict: η_FP · d_TV.
    assert near(float(verdict.lossy.double().mean()), float(sprinter_distance(p, q, 0.3)))
    assert not shares_near(emitted(0.3, 0.8)[0], sprinter_law(p, q, 0.3))


# -- one round -------------------------------------------------------------------------------------------------------------

ROUNDS = [(5, 0.9, 0.5), (5, 1.0, 0.5), (3, 0.6, 0.2), (1, 0.7, 0.0), (0, 0.9, 0.4), (4, 0.0, 0.3), (2, 0.3, 0.6)]
CAPS = [None, 1, 3, 5, 9]
LONG = 200  # behind it no round above goes on: 0.6^190 is 1e-42
each_round = pytest.mark.parametrize("r, eta_tp, eta_fp", ROUNDS)


def mean_accepted(r, eta_tp, eta_fp, cap=None, steps=False) -> float:
    """E[min(N, cap)], or E[min(N + 1, cap)], as a sum over the probabilities of Theorem 3.3."""
    return math.fsum(
        min(i + steps, math.inf if cap is None else cap) * accepted_probability(i, r, eta_tp, eta_fp)
        for i in range(LONG)
    )


@each_round
def test_theorem_3_3_by_every_verdict(r, eta_tp, eta_fp):
    """N = i: i verdicts of yes, of which the first r are on acceptable tokens, and a no."""
    yes = [eta_tp if place < r else eta_fp for place in range(13)]
    for i in range(12):
        exact = math.prod(yes[:i]) * (1 - yes[i])
        assert accepted_probability(i, r, eta_tp, eta_fp) == pytest.approx(exact, abs=EXACT)
    if 0 < eta_tp != eta_fp and r > 1:
        assert accepted_probability(1, r, eta_fp, eta_tp) != pytest.approx(yes[0] * (1 - yes[1]), abs=EXACT), "swapped"


@each_round
def test_theorems_3_3_and_3_4_sum_up_to_the_papers_closed_forms(r, eta_tp, eta_fp):
    assert math.fsum(accepted_probability(i, r, eta_tp, eta_fp) for i in range(LONG)) == pytest.approx(1, abs=EXACT)
    for cap in CAPS:
        accepted, steps = (mean_accepted(r, eta_tp, eta_fp, cap, steps=steps) for steps in (False, True))
        assert expected_accepted(r, eta_tp, eta_fp, cap) == pytest.approx(accepted, abs=EXACT)
        assert expected_stop_time(r, eta_tp, eta_fp, 0.1, cap) == pytest.approx(0.1 * steps, abs=EXACT)
    one_more = expected_accepted(r, eta_tp, eta_fp) + 1
    assert expected_stop_time(r, eta_tp, eta_fp, 1.0) == pytest.approx(one_more, abs=EXACT)
    if eta_tp == 1:
        return  # 0/0 as printed; the limit is tested below
    eq_3 = (eta_tp - eta_tp**r) / (1 - eta_tp) + eta_tp**r / (1 - eta_fp)
    eq_4 = (1 - eta_tp**r) / (1 - eta_tp) + eta_tp**r / (1 - eta_fp)
    assert expected_accepted(r, eta_tp, eta_fp) == pytest.approx(eq_3, abs=EXACT)
    assert expected_stop_time(r, eta_tp, eta_fp, 1.0) == pytest.approx(eq_4, abs=EXACT)


def test_the_sums_reject_what_is_wrong():
    r, eta_tp, eta_fp = 5, 0.9, 0.5
    exact = mean_accepted(r, eta_tp, eta_fp)
    for wrong in (
        expected_accepted(r, eta_fp, eta_tp), expected_accepted(r - 1, eta_tp, eta_fp), expected_accepted(r, eta_tp, eta_fp, 8),
        expected_accepted(r, eta_tp, eta_fp) + 1,
    ):  # fmt: skip
        assert wrong != pytest.approx(exact, abs=EXACT)


@given(st.integers(0, 12), rates, rates, rates, st.integers(1, 30))
def test_better_verifiers_looser_ones_and_higher_caps_accept_more(r, a, b, eta, cap):
    low, high = sorted((a, b))
    for function in (expected_accepted, lambda *args: expected_stop_time(*args[:3], 0.1, *args[3:])):
        larger = ((low, eta, cap), (high, eta, cap), (high, eta, cap + 1), (high, eta))
        values = [function(r, *args) for args in larger]
        assert values == pytest.approx(sorted(values), rel=1e-12)
        assert function(r, eta, low, cap) <= function(r, eta, high, cap) * (1 + 1e-12)
    assert expected_accepted(r, a, b, cap) <= cap + EXACT


def test_limits_and_extremes():
    assert expected_accepted(5, 1, 0) == 5 and expected_accepted(5, 1, 0.5) == 6
    assert expected_accepted(5, 1 - 1e-12, 0.5) == pytest.approx(6, abs=1e-10)
    assert expected_accepted(5, 0, 1) == 0 and expected_accepted(0, 0, 0.5) == 1
    assert expected_accepted(5, 0.5, 1) == expected_accepted(0, 0, 1) == math.inf
    assert expected_accepted(5000, 0.5, 1) == math.inf  # though 0.5^5000 is 0 in float64
    assert expected_stop_time(5, 0.5, 1, 0.1) == math.inf and expected_stop_time(5, 0.5, 1, 0.0) == 0
    assert expected_accepted(5, 1, 1, 40) == 40 and expected_stop_time(5, 1, 1, 0.5, 40) == 20
    assert expected_accepted(5, 0.5, 1, 7) == pytest.approx(0.96875 + 2 / 32, abs=EXACT)
    assert expected_accepted(5, 0.9, 0.5, 0) == 0 and expected_stop_time(5, 0.9, 0.5, 2.0, 1) == 2
    assert expected_accepted(5, 0.9, 0.5, 10**6) == pytest.approx(expected_accepted(5, 0.9, 0.5), abs=EXACT)


@pytest.mark.parametrize("below", [1e-3, 1e-9, 1e-15])
def test_rates_of_nearly_one_lose_no_digits(below):
    x = Fraction(1 - below)
    exact = float(sum(x**k for k in range(1, 31)))
    assert expected_accepted(30, float(x), 0.0) == pytest.approx(exact, rel=1e-14)


def test_leviathans_tokens_per_round():
    assert expected_strict_tokens(0, 5) == 1 and expected_strict_tokens(1, 5) == 6
    assert expected_strict_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)
    # Drafted tokens that each stay with probability α are a verifier that says yes with α, and never more than γ of them.
    assert expected_strict_tokens(0.8, 5) == pytest.approx(1 + expected_accepted(5, 0.8, 0.0, 5))


# -- FLOPs --------------------------------------------------------------------------------------------------------------


def llama_flops(c, t: int, past: int) -> int:
    d, wide, narrow = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    projections = 2 * t * (d * wide + 2 * d * narrow + wide * d)
    attention = 2 * (2 * t * (past + t) * wide)  # scores, and their product with the values
    mlp = 3 * (2 * t * d * c.intermediate_size)
    return c.num_hidden_layers * (projections + attention + mlp) + 2 * t * d * c.vocab_size


def gpt2_flops(c, t: int, past: int) -> int:
    d, ff = c.n_embd, c.n_inner or 4 * c.n_embd
    layer = 2 * t * 4 * d * d + 2 * (2 * t * (past + t) * d) + 2 * (2 * t * d * ff)
    return c.n_layer * layer + 2 * t * d * c.vocab_size


def tiny_llama(**other):
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3}
    return LlamaConfig(**(sizes | {"num_attention_heads": 4, "num_key_value_heads": 2} | other))


@pytest.mark.full(every=2)
@pytest.mark.parametrize("tokens, past", [(1, 0), (3, 0), (1, 9), (4, 9)])
def test_flops_by_hand(tokens, past):
    for config in (tiny_llama(), tiny_llama(num_key_value_heads=4), tiny_llama(tie_word_embeddings=True)):
        more = forward_flops(config, tokens, past) - llama_flops(config, tokens, past)
        assert more in (0, tokens * config.head_dim)  # the rotary angles, where a release computes them as a product
    gpt2 = GPT2Config(vocab_size=61, n_embd=24, n_layer=2, n_head=3, n_positions=32)
    assert forward_flops(gpt2, tokens, past) == gpt2_flops(gpt2, tokens, past)
    assert forward_flops(gpt2, tokens, past, embedding=True) - gpt2_flops(gpt2, tokens, past) == 2 * tokens * 61 * 24


def test_flops_tell_grouped_heads_and_leave_the_config_alone():
    config = tiny_llama()
    before = config.to_dict()
    assert forward_flops(config) < forward_flops(tiny_llama(num_key_value_heads=4))
    assert config.to_dict() == before and config._attn_implementation != "eager"


@pytest.mark.nightly
def test_the_papers_table_of_flops():
    """Its four figures cannot be met by one count, for two models with equal layers differ in it; its ratios nearly can."""
    neo = {"vocab_size": 50257, "max_position_embeddings": 2048}
    half = [[["global", "local"], 6]]
    models = {  # billions of FLOPs for 20 tokens: the paper's, and what this counts with the embedding
        "neo": (GPTNeoConfig(hidden_size=768, num_layers=12, num_heads=12, attention_types=half, **neo), 8.01, 6.50),
        "neo_large": (GPTNeoConfig(hidden_size=2048, num_layers=24, num_heads=16, **neo), 64.66, 56.63),
        "gpt2": (GPT2Config(), 7.25, 6.50),
        "gpt2_xl": (GPT2Config(n_embd=1600, n_layer=48, n_head=25), 71.78, 65.54),
    }
    count, bare = {}, {}
    for name, (config, paper, ours) in models.items():
        count[name], bare[name] = forward_flops(config, 20, embedding=True), forward_flops(config, 20)
        assert count[name] / 1e9 == pytest.approx(ours, abs=0.005), name
        assert 1.09 < paper / (count[name] / 1e9) < 1.24, name
    assert count["neo"] == count["gpt2"]
    assert count["neo_large"] / count["neo"] == pytest.approx(8.71, abs=0.01)  # "roughly 8"; 8.07 in the table
    assert count["gpt2_xl"] / count["gpt2"] == pytest.approx(10.08, abs=0.01)  # "roughly 10"; 9.90
    assert bare["neo_large"] / bare["neo"] == pytest.approx(10.60, abs=0.01)
    assert bare["gpt2_xl"] / bare["gpt2"] == pytest.approx(12.57, abs=0.01)


def test_flops_of_a_round():
    assert strict_flops(5, 1.0, 10.0) == 55
    assert sprinter_flops(5, 1.0, 0.5, 10.0) == 17.5
    # The saving that the paper names, (γ − 1)·F_t less the verifier; and none where the target fills its cache.
    assert strict_flops(5, 1.0, 10.0) - sprinter_flops(5, 1.0, 0.5, 10.0) == 4 * 10 - 5 * 0.5
    assert sprinter_flops(5, 1.0, 0.5, 10.0, cached=True) == strict_flops(5, 1.0, 10.0) + 5 * 0.5
    one = [sprinter_flops(1, 1.0, 0.0, 10.0, cached=cached) for cached in (False, True)]
    assert one == [strict_flops(1, 1.0, 10.0)] * 2


# -- wrong arguments -------------------------------------------------------------------------------------------------------


P, Q = PAIRS["mixed"]


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: sprinter_law(P, Q[:3], 0.1), ValueError, "one shape"),
        (lambda: total_variation(torch.tensor(1.0), torch.tensor(1.0)), ValueError, "one shape"),
        (lambda: total_variation(P[:0], Q[:0]), ValueError, "one shape"),
        (lambda: sprinter_law(P.log_softmax(0), Q, 0.1), ValueError, "p: .*sum to 1"),
        (lambda: sprinter_law(P, Q * math.nan, 0.1), ValueError, "q: .*sum to 1"),
        (lambda: total_variation(P, torch.tensor([1.5, -0.5, 0, 0])), ValueError, "q: .*from -0.5 to 1.5"),
        (lambda: total_variation(torch.tensor([1, 0]), torch.tensor([1, 0])), TypeError, "p: .*floating point"),
        (lambda: total_variation([0.5, 0.5], [0.5, 0.5]), TypeError, r"p: expected a tensor .*got \[0.5, 0.5\]"),
        (lambda: total_variation(P, Q.numpy()), TypeError, "q: expected a tensor"),
        (lambda: total_variation(P.to(torch.float8_e4m3fn), Q), TypeError, "p: .*floating point .*got torch.float8"),
        (lambda: sprinter_law(P, Q, 1.1), ValueError, "eta_fp: .*0 to 1, got 1.1"),
        (lambda: sprinter_distance(P, Q, math.nan), ValueError, "eta_fp"),
        (lambda: sprinter_acceptance_rate(P, Q, "0.1"), TypeError, "eta_fp"),
        (lambda: accepted_probability(-1, 5, 0.9, 0.5), ValueError, "i: "),
        (lambda: accepted_probability(1, 5.0, 0.9, 0.5), TypeError, "r: "),
        (lambda: expected_accepted(5, -0.1, 0.5), ValueError, "eta_tp"),
        (lambda: expected_accepted(5, 0.9, 0.5, -1), ValueError, "cap: .*at least 0"),
        (lambda: expected_stop_time(5, 0.9, 0.5, 0.1, 0), ValueError, "cap: .*at least 1"),
        (lambda: expected_stop_time(5, 0.9, 0.5, -0.1), ValueError, "t_d"),
        (lambda: expected_strict_tokens(1.5, 5), ValueError, "alpha"),
        (lambda: expected_strict_tokens(0.5, -1), ValueError, "gamma"),
        (lambda: strict_flops(0, 1.0, 1.0), ValueError, "gamma"),
        (lambda: sprinter_flops(5, 1.0, -1.0, 1.0), ValueError, "FLOPs"),
        (lambda: forward_flops(tiny_llama(), 0), ValueError, "tokens"),
        (lambda: forward_flops(tiny_llama(), 10**9), ValueError, "tokens: expected a whole number from 1 to 100000000"),
        (lambda: forward_flops(tiny_llama(), 1, 10**9), ValueError, "past: expected a whole number from 0 to 100000000"),
        (lambda: forward_flops("gpt2"), TypeError, "config: .*got str"),
        (lambda: forward_flops(T5Config()), TypeError, "config: .*causal LM, got T5Config"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(call, error, words):
    refused(call, words, error)
