"""Proves SPRINTER's formulas of whole rounds: against the sums they are of, and by simulation.

Each check is also given a formula that is wrong, and must reject it. Simulations are seeded, and must come within 3 standard errors.
"""

import math
from fractions import Fraction

import pytest
import torch
from support.distributions import EXACT, SAMPLES, near
from support.ideal_verifier import IIDVerifier

from hf_lossy_assist.methods.sprinter.theory import (
    accepted_probability,
    expected_accepted,
    expected_stop_time,
    expected_strict_tokens,
)


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


def simulated(r, eta_tp, eta_fp, length=64, seed=0) -> torch.Tensor:
    """N of many rounds: verdicts on r acceptable and then only unacceptable tokens, counted up to the first no."""
    acceptable = (torch.arange(length) < r).expand(SAMPLES, length)
    verdicts = IIDVerifier(eta_tp, eta_fp, torch.Generator().manual_seed(seed))(acceptable)
    return verdicts.byte().cumprod(dim=1).sum(dim=1).double()


def mean_near(values: torch.Tensor, expected: float) -> bool:
    return abs(float(values.mean()) - expected) <= 3 * float(values.std()) / math.sqrt(len(values)) + EXACT


@each_round
def test_theorem_3_3_sums_up(r, eta_tp, eta_fp):
    assert math.fsum(accepted_probability(i, r, eta_tp, eta_fp) for i in range(LONG)) == pytest.approx(1, abs=EXACT)
    for cap in CAPS:
        assert expected_accepted(r, eta_tp, eta_fp, cap) == pytest.approx(
            mean_accepted(r, eta_tp, eta_fp, cap), abs=EXACT
        )


@each_round
def test_theorem_3_4_sums_up(r, eta_tp, eta_fp):
    for cap in CAPS:
        steps = mean_accepted(r, eta_tp, eta_fp, cap, steps=True)
        assert expected_stop_time(r, eta_tp, eta_fp, 0.1, cap) == pytest.approx(0.1 * steps, abs=EXACT)
    one_more = expected_accepted(r, eta_tp, eta_fp) + 1
    assert expected_stop_time(r, eta_tp, eta_fp, 1.0) == pytest.approx(one_more, abs=EXACT)


@each_round
def test_the_papers_closed_forms(r, eta_tp, eta_fp):
    if eta_tp == 1:
        return  # 0/0 as printed; the limit is tested below
    eq_3 = (eta_tp - eta_tp**r) / (1 - eta_tp) + eta_tp**r / (1 - eta_fp)
    eq_4 = (1 - eta_tp**r) / (1 - eta_tp) + eta_tp**r / (1 - eta_fp)
    assert expected_accepted(r, eta_tp, eta_fp) == pytest.approx(eq_3, abs=EXACT)
    assert expected_stop_time(r, eta_tp, eta_fp, 1.0) == pytest.approx(eq_4, abs=EXACT)


@pytest.mark.full(every=3)
@each_round
def test_simulated_rounds(r, eta_tp, eta_fp):
    n = simulated(r, eta_tp, eta_fp)
    counts = torch.bincount(n.long(), minlength=12) / SAMPLES
    for i in range(12):
        assert near(float(counts[i]), accepted_probability(i, r, eta_tp, eta_fp)), i
    for cap in CAPS:
        limit = math.inf if cap is None else cap
        assert mean_near(n.clamp(max=limit), expected_accepted(r, eta_tp, eta_fp, cap)), cap
        assert mean_near(0.1 * (n + 1).clamp(max=limit), expected_stop_time(r, eta_tp, eta_fp, 0.1, cap)), cap


def test_the_checks_of_rounds_reject_what_is_wrong():
    r, eta_tp, eta_fp = 5, 0.9, 0.5
    n, exact = simulated(r, eta_tp, eta_fp), mean_accepted(r, eta_tp, eta_fp)
    wrong = {
        "swapped": expected_accepted(r, eta_fp, eta_tp),
        "one acceptable token less": expected_accepted(r - 1, eta_tp, eta_fp),
        "the refused token counted": expected_accepted(r, eta_tp, eta_fp) + 1,
        "cut off": expected_accepted(r, eta_tp, eta_fp, 8),
        "nearly right": expected_accepted(r, eta_tp, eta_fp + 0.01),
    }
    for name, value in wrong.items():
        assert value != pytest.approx(exact, abs=EXACT), name
        assert not mean_near(n, value), name
    assert not mean_near((n + 1).clamp(max=5), expected_accepted(r, eta_tp, eta_fp, 5)), "N in place of N + 1"
    assert not near(float((n == 2).double().mean()), accepted_probability(2, r, eta_fp, eta_tp))


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
