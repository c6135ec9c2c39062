"""Intervals against published and hand-made values; AUROC by all pairs, by Newcombe's equation, and on texts whose tokens are alike."""

import math

import numpy as np
import pytest

from hf_lossy_assist.stats.intervals import auroc, mcnemar, newcombe, rate, ratio, wilson


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
    assert rate([10, 20, 30], [1.0, 2.0, 4.0]) == (pytest.approx(60 / 7), None, None)  # three units are too few
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


def by_pairs(scores, positive):
    """Compute the AUROC from all pairs of a positive and a negative one, weighted by how likely each is that."""
    scores, positive = np.asarray(scores, dtype=float), np.asarray(positive, dtype=float)
    weight = positive[:, None] * (1 - positive)[None]
    gaps = scores[:, None] - scores[None]
    return float((weight * ((gaps > 0) + (gaps == 0) / 2)).sum() / weight.sum())


def sample(texts=40, each=12, seed=0, spread=1.0, gap=1.0):
    """Scores with a shift that the tokens of a text share. (scores, positive, texts)."""
    random = np.random.default_rng(seed)
    text = np.arange(texts).repeat(each)
    positive = random.random(len(text)) < 0.3
    return random.normal(size=len(text)) + gap * positive + spread * random.normal(size=texts)[text], positive, text


def test_the_value_is_that_of_all_pairs():
    exact, positive, text = sample()
    soft = np.random.default_rng(1).random(len(exact))
    for digits in (0, 6):
        scores = exact.round(digits)  # few digits, many ties
        assert auroc(scores, positive, text).value == pytest.approx(by_pairs(scores, positive), abs=1e-12)
        assert auroc(scores, soft, text).value == pytest.approx(by_pairs(scores, soft), abs=1e-12)


def test_folds_are_compared_each_by_itself():
    scores, positive, text = sample()
    parts = text % 3
    by_fold = [by_pairs(scores[parts == k], positive[parts == k]) for k in range(3)]
    moved = scores + 100 * parts  # another scale in each fold
    found = auroc(moved, positive, text, parts)
    assert found.value == pytest.approx(np.mean(by_fold)) and found.low < found.value < found.high
    assert auroc(moved, positive, text).value != pytest.approx(np.mean(by_fold), abs=0.01)


def test_newcombes_ends_solve_his_equation():
    """|value − θ| = z·s(θ), with Hanley and McNeil's s written as they do: Q1 = θ/(2 − θ), Q2 = 2θ²/(1 + θ)."""

    def s(theta, m, n):
        q1, q2, less = theta / (2 - theta), 2 * theta**2 / (1 + theta), (m + n) / 2 - 1
        return math.sqrt((theta * (1 - theta) + less * (q1 - theta**2 + q2 - theta**2)) / (m * n))

    for value, m, n in ((1.0, 6, 23), (0.0, 6, 23), (0.8, 6, 23), (0.5, 400, 3), (0.97, 90, 2000)):
        low, high = newcombe(value, m, n)
        assert 0 <= low <= value <= high <= 1 and low < high
        for end in {low, high} - {0.0, 1.0}:
            assert abs(value - end) == pytest.approx(1.959963984540054 * s(end, m, n), abs=1e-8)
        assert (low, high) == pytest.approx(tuple(1 - end for end in newcombe(1 - value, m, n)[::-1]), abs=1e-8)


def test_no_wrong_pair_is_no_certainty():
    """6 positive tokens above all of 23 others: every resample says 1."""
    scores, text = np.arange(29.0), np.arange(29) % 6
    found = auroc(scores, scores > 22.5, text)
    assert found.value == found.high == 1.0 and 0.7 < found.low < 0.9


def test_texts_are_resampled_and_no_tokens():
    """Each token again and again says nothing new, and the interval stays; taken for texts of their own, they would narrow it."""
    given = sample(texts=12, each=20)
    often, more = (auroc(*(np.repeat(values, times) for values in given)) for times in (10, 20))
    assert more == pytest.approx(often, abs=1e-12)
    scores, positive = (np.repeat(values, 20) for values in given[:2])
    by_tokens = auroc(scores, positive, np.arange(len(scores)))
    assert by_tokens.high - by_tokens.low < 0.5 * (more.high - more.low)


@pytest.mark.nightly  # by hand and by all pairs above
def test_intervals_of_auroc_hold_what_they_promise(monkeypatch):
    """200 draws of 20 texts whose tokens are alike: 95 % intervals hold the true value in nine of ten or more."""
    monkeypatch.setattr("hf_lossy_assist.stats.intervals.RESAMPLES", 200)
    true, held = by_normal(1.0, 1.0), 0
    for seed in range(200):
        found = auroc(*sample(20, 12, seed + 10))
        held += found.low <= true <= found.high
    assert held >= 180


def by_normal(gap, spread):
    """P(positive > negative) of normal scores with a gap, each of another text: Φ(gap / √(2·(1 + spread²)))."""
    return 0.5 * (1 + math.erf(gap / math.sqrt(2 * (1 + spread**2)) / math.sqrt(2)))


def test_what_has_no_interval_and_what_no_value():
    scores, positive, text = sample(1, 30)
    assert auroc(scores, positive, text)[1:] == (None, None)
    with pytest.raises(ValueError, match="both labels"):
        auroc(scores, np.zeros(30), text)
    with pytest.raises(ValueError, match="both labels"):
        auroc(scores, positive, text, strata=positive.astype(int))
