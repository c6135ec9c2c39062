"""Proves AdaEDL's and DISCO's decisions by hand and by Transformers' own."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_curve
from support import tiny
from support.stops import answers, logits

from hf_lossy_assist import DISCO, SVIP, AdaEDL
from hf_lossy_assist.stops.confidence import cheapest


# -- AdaEDL ---------------------------------------------------------------------------------------------------------------

# H(.16, .84) = .16 · 1.8326 + .84 · .1744 = .4397 and H(.17, .83) = .4559 nats.
BELOW_045, ABOVE_045 = [0.16, 0.84], [0.17, 0.83]


def test_adaedl_stops_where_the_bound_is_below_lambda():
    """1 − √(.2·H) < .7  ⇔  H > .45; with another scale 1 − √(.4·H) < .7  ⇔  H > .225, and with scale 0 never."""
    assert answers(AdaEDL(0.7), BELOW_045, ABOVE_045) == [False, True]
    assert answers(AdaEDL(0.7).start(2), BELOW_045, ABOVE_045) == [False, True]
    assert answers(AdaEDL(0.7, scale=0.4), BELOW_045, [0.05, 0.95]) == [True, False]  # H(.05, .95) = .1985
    assert answers(AdaEDL(1.0, scale=0.0), ABOVE_045, [0.5, 0.5]) == [False, False]


def test_adaedl_is_svip_while_lambda_does_not_move():
    """1 − √(c·H) < λ  ⇔  √(c·H) > 1 − λ, SVIP's h."""
    torch.manual_seed(1)
    scores = (torch.randn(200, 12) * 2,)
    ours, expected = (
        stop.start(200)(torch.zeros(200, 1), scores)
        for stop in (AdaEDL(0.6, scale=0.15, epsilon=0.0), SVIP(h=0.4, c=0.15))
    )
    assert torch.equal(ours, expected) and 0 < ours.sum() < 200


def test_adaedl_moves_lambda_by_the_acceptance_rate():
    """r̄: .5·.9 + .5·.25 = .575, then .7875, .89375 and .946875; below .9 λ rises by .1 · .01, above it falls by as much."""
    stop = AdaEDL(0.6).start(2)
    expected = [(1, 0.601), (4, 0.602), (4, 0.603), (4, 0.602)]
    for accepted, threshold in expected:
        stop.observe([0], [4], [accepted])
        assert stop.thresholds[0] == pytest.approx(threshold, abs=1e-12)
    assert stop.thresholds[1] == 0.6, "another row's"
    stop.observe([0], [0], [0])
    assert stop.thresholds[0] == pytest.approx(0.602), "nothing was drafted, so nothing was learnt"
    scores = logits(ABOVE_045, ABOVE_045)
    stop.thresholds[:] = [0.9, 0.0]
    assert stop(torch.zeros(2, 1), scores, rows=[0, 1]).tolist() == [True, False]
    assert stop(torch.zeros(2, 1), scores, rows=[1, 0]).tolist() == [False, True]


def test_lambda_stays_between_0_and_1():
    stop = AdaEDL(0.9, epsilon=1.0, beta2=0.5).start(2)
    for _ in range(3):
        stop.observe([0, 1], [4, 4], [0, 4])
    assert stop.thresholds == [1.0, 0.0]


# -- DISCO ----------------------------------------------------------------------------------------------------------------


def test_disco_fits_the_cheapest_threshold():
    """Accepted .9, .8, .3; refused .5, .2: at .8 a third of the accepted is lost (1), at .3 half of the refused is let through (.5)."""
    q, accepted = [0.9, 0.5, 0.8, 0.2, 0.3], [True, False, True, False, True]
    assert cheapest(q, accepted, missed=3.0) == 0.3
    assert cheapest(q, accepted, missed=1.0) == 0.8  # 1/3 against 1/2
    assert cheapest(q, [True] * 5, 3.0) is None and cheapest(q, [False] * 5, 3.0) is None


verdicts = st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=2, max_size=30)


@given(verdicts, st.floats(0.1, 10))
def test_no_threshold_of_the_roc_curve_is_cheaper(tested, missed):
    q, accepted = (np.array(column) for column in zip(*tested, strict=True))
    found = cheapest(q, accepted, missed)
    if len(set(accepted.tolist())) < 2:
        assert found is None
        return
    let, detected, _ = roc_curve(accepted, q)
    cost = (q[~accepted] >= found).mean() + missed * (q[accepted] < found).mean()
    assert cost == pytest.approx((let + missed * (1 - detected))[1:].min())  # its first threshold would keep nothing


def test_disco_learns_of_each_row_alone():
    """Six tested tokens: accepted .9 .9 .9 .9, refused .6, accepted .9; of the row beside it only five."""
    stop = DISCO(0.4).start(2)
    high, low = [0.9, 0.1], [0.6, 0.4]
    for first, second, drafted, accepted in (
        ((high, high, high), (high, high, low), [3, 3], [3, 2]),
        ((high, low), (high, low), [2, 2], [1, 1]),
    ):
        stop.begin_round([0, 1])
        for a, b in zip(first, second, strict=True):
            assert answers(stop, a, b) == [False, False]
        assert stop.thresholds == [0.4, 0.4]
        stop.observe([0, 1], drafted, accepted)
    assert stop.thresholds == [0.4, 0.4], "five tokens of each row"
    stop.begin_round([0, 1])
    assert answers(stop, high, high) == [False, False]
    stop.observe([0, 1], [1, 0], [1, 0])
    assert stop.thresholds == [pytest.approx(0.9), 0.4]
    stop.begin_round([0, 1])
    assert answers(stop, low, low) == [True, False]


def test_disco_counts_no_token_behind_the_first_refused_one():
    stop = DISCO().start(1)
    stop.begin_round([0])
    for q in (0.9, 0.8, 0.7, 0.6):
        answers(stop, [q, 1 - q])
    stop.observe([0], [4], [1])
    assert [(round(q, 4), accepted) for q, accepted in stop.tested[0]] == [(0.9, True), (0.8, False)]


@pytest.mark.full(every=2)
@pytest.mark.parametrize("kind", ["often", "rarely"])
def test_disco_is_that_of_transformers(kind, monkeypatch):
    """Transformers' assisted greedy decoding with the same start drafts the same and ends at the same threshold."""
    model, draft = tiny.shared("llama"), copy.deepcopy(tiny.draft_of(tiny.shared("llama"), kind))
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
    ours, start = [], DISCO.start
    monkeypatch.setattr(DISCO, "start", lambda self, rows: ours.append(start(self, rows)) or ours[-1])
    out = tiny.assisted(model, tiny.prompts((9,)), tiny.draft_of(model, kind), DISCO(0.15), **settings)
    generators, get = [], model._get_candidate_generator
    monkeypatch.setattr(
        model, "_get_candidate_generator", lambda **given: generators.append(get(**given)) or generators[-1]
    )
    draft.generation_config.assistant_confidence_threshold = 0.15
    assert torch.equal(model.generate(**tiny.prompts((9,)), **settings, assistant_model=draft), out.sequences)
    threshold = generators[0].assistant_generation_config.assistant_confidence_threshold
    assert ours[0].thresholds[0] == pytest.approx(threshold, rel=1e-4) and threshold != 0.15
    assert [accepted for _, accepted in ours[0].tested[0]] == list(map(bool, generators[0].matches))
