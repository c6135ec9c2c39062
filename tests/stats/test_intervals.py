"""Intervals against published and hand-made values."""

import numpy as np
import pytest

from hf_lossy_assist.stats.intervals import mcnemar, rate, ratio, wilson


def test_wilson():
    """Brown, Cai and DasGupta (2001) and by hand: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    for hits, count in ((0, 10), (3, 10), (10, 10), (81, 263)):
        found, p, z = wilson(hits, count), hits / count, 1.959963984540054
        middle, half = p + z * z / (2 * count), z * np.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
        low, high = ((middle + sign * half) / (1 + z * z / count) for sign in (-1, 1))
        assert found == pytest.approx((p, low, high), abs=1e-12)
    assert wilson(81, 263)[1:] == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe (1998), Table I


def test_mcnemar_is_the_exact_one():
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(1, 5) == pytest.approx(2 * (1 + 6) / 2**6)
    assert mcnemar(5, 1) == mcnemar(1, 5)
    assert mcnemar(0, 5) == pytest.approx(2 / 2**5)


def test_a_rate_is_of_sums_and_one_unit_has_no_interval():
    assert rate([10], [2.0]) == (5.0, None, None)
    assert rate([10, 20, 30], [1.0, 2.0, 4.0]) == (pytest.approx(60 / 7), None, None), (
        "three units say nothing of their spread"
    )
    found = rate([10, 20, 30, 40], [1.0, 2.0, 4.0, 5.0])
    assert found.value == pytest.approx(100 / 12) and found.low < found.value < found.high


def test_the_interval_by_hand():
    """Rates of 10, 10, 10 and 40 in equal seconds: jackknife of the logarithm, and Student's t of 3 degrees of freedom, 3.18245."""
    without = np.log([20, 20, 20, 10])
    error = np.sqrt(3 / 4 * ((without - without.mean()) ** 2).sum())
    assert rate([10, 10, 10, 40], [1, 1, 1, 1]) == pytest.approx(
        (17.5, 17.5 * np.exp(-3.182446 * error), 17.5 * np.exp(3.182446 * error)), rel=1e-6
    )


def test_where_one_unit_has_it_all_there_is_no_interval_of_the_logarithm():
    assert rate([0, 0, 0, 0, 0.5], [1.0] * 5) == (0.1, None, None)
    assert ratio([1, 0, 0, 0], [1.0] * 4, [1, 1, 0, 1], [1.0] * 4) == (pytest.approx(1 / 3), None, None)


def test_a_ratio_resamples_the_units_together():
    """One arm is twice as fast on every unit, whose lengths differ by far: the ratio is 2 whatever is drawn."""
    amounts, seconds = [1.0, 10.0, 100.0, 7.0], [1.0, 3.0, 7.0, 0.5]
    found = ratio(amounts, [s / 2 for s in seconds], amounts, seconds)
    assert found == pytest.approx((2.0, 2.0, 2.0))


@pytest.mark.full
def test_intervals_hold_what_they_promise():
    """1000 runs of 4, 8 and 24 prompts: 95 % intervals hold the true ratio as often, up to three standard errors."""
    random = np.random.default_rng(3)
    for units in (4, 8, 24):
        held = 0
        for _ in range(1000):
            amounts = random.integers(20, 100, units)
            seconds, others = (amounts / 50 * random.lognormal(-0.02, 0.2, units) for _ in range(2))
            _, low, high = ratio(amounts, seconds, amounts, others)
            held += low <= 1 <= high
        assert abs(held / 1000 - 0.95) <= 3 * np.sqrt(0.95 * 0.05 / 1000) + 0.01, units
