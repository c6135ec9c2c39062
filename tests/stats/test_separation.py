"""AUROC and its interval: by all pairs, by Newcombe's equation, and on texts whose tokens are alike."""

import math

import numpy as np
import pytest

from hf_lossy_assist.stats import intervals as separation
from hf_lossy_assist.stats.intervals import auroc, newcombe


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


@pytest.mark.full
def test_intervals_hold_what_they_promise(monkeypatch):
    """200 draws of 20 texts whose tokens are alike: 95 % intervals hold the true value in nine of ten or more."""
    monkeypatch.setattr(separation, "RESAMPLES", 200)
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
