"""A head's short curves: they are those of all its tokens, and what is read of anybody's file is curves or is refused."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score
from support.refusals import refused

from hf_lossy_assist.training.head_quality import BINS, POINTS, Bin, Curves, compute_curves


def drawn(count=1000, seed=0, digits=8):
    """Tokens whose probabilities are true."""
    generator = np.random.default_rng(seed)
    scores = generator.beta(0.6, 0.3, count).round(digits)
    return scores, generator.random(count) < scores


@pytest.mark.parametrize("digits", [8, 1])  # of probabilities: with one, most are equal
def test_a_short_roc_has_the_area_of_the_whole(digits):
    scores, positive = drawn(digits=digits)
    curves = compute_curves(scores, scores, positive)
    assert len(curves.roc) <= POINTS and (curves.roc[0], curves.roc[-1]) == ((0, 0), (1, 1))
    area = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in zip(curves.roc, curves.roc[1:], strict=False))
    assert area == pytest.approx(roc_auc_score(positive, scores), abs=0.003)
    for false, true in curves.roc:  # each point is a threshold's
        assert any(
            abs(((scores >= t) & ~positive).sum() / (~positive).sum() - false) < 1e-5
            and abs(((scores >= t) & positive).sum() / positive.sum() - true) < 1e-5
            for t in (np.inf, *scores)
        )


def test_bins_hold_every_token_once():
    scores, positive = drawn()
    curves = compute_curves(-scores, scores, positive)  # what is ranked and what is said may be on two scales
    assert (curves.positives, curves.negatives) == (positive.sum(), (~positive).sum())
    for i, bin_ in enumerate(curves.reliability):
        inside = (scores > i / BINS) & (scores <= (i + 1) / BINS) | ((i == 0) & (scores == 0))
        assert (bin_.hits, bin_.tokens) == (positive[inside].sum(), inside.sum())
        assert bin_.mean == pytest.approx(scores[inside].mean(), abs=1e-6)
        assert bin_.share.low < bin_.mean < bin_.share.high  # of true probabilities
    assert compute_curves(scores, scores, positive).roc != curves.roc


def test_empty_bins_are_left_out():
    scores = np.array([0.05, 0.05, 0.95, 1.0])
    curves = compute_curves(scores, scores, np.array([False, True, True, True]))
    assert curves.reliability == [Bin(0.05, 1, 2), Bin(0.975, 2, 2)]
    assert curves.roc == [(0, 0), (0, 0.333333), (0, 0.666667), (1, 1)]
    assert curves.reliability[0].share == pytest.approx((0.5, 0.0945, 0.9055), abs=1e-4)  # Wilson's of 1 in 2


def test_curves_come_back_from_json():
    scores, positive = drawn(300)
    curves = compute_curves(scores, scores, positive)
    text = json.dumps(curves.to_dict())
    assert Curves.from_dict(json.loads(text)) == curves and len(text) < 3000


ROC, BINS_ = [[0, 0], [0.2, 0.7], [1, 1]], [[0.1, 3, 30], [0.8, 40, 50]]


@pytest.mark.parametrize(
    ("roc", "reliability", "says"),
    [
        (None, BINS_, "roc: expected 1 to 50 lists"),
        ([], BINS_, "roc: expected 1 to 50 lists"),
        ([[0, 0], [0.5], [1, 1]], BINS_, "lists of 2 numbers"),
        ([[0, 0], [0.5, "<svg>"], [1, 1]], BINS_, "roc: expected a number from 0 to 1"),
        ([[0, 0], [0.5, 0.4], [0.4, 0.5], [1, 1]], BINS_, "rising rates"),
        ([[0, 0], [0.5, 0.5]], BINS_, "rising rates"),
        (ROC, BINS_ * 6, "reliability: expected 1 to 10 lists"),
        (ROC, [[0.1, 3]], "lists of 3 numbers"),
        (ROC, [[float("nan"), 3, 30]], "mean: expected a number"),
        (ROC, [[0.1, 31, 30]], "hits: expected a whole number from 0 to 30"),
        (ROC, [[0.1, 0, 0]], "tokens: expected a whole number of at least 1"),
        (ROC, [[0.1, 3, 10**400]], "tokens: expected a whole number"),
        (ROC, BINS_[::-1], "rising bins"),
        (ROC, [[0.1, 30, 30]], "tokens of both labels"),
    ],
)  # fmt: skip
def test_what_are_no_curves_is_refused_in_one_line(roc, reliability, says):
    assert len(refused(lambda: Curves.from_dict({"roc": roc, "reliability": reliability}), says)) < 400


def test_curves_are_an_object():
    refused(lambda: Curves.from_dict([1]), "curves: expected an object, got")
    assert Curves.from_dict({"roc": ROC, "reliability": BINS_}).negatives == 37
