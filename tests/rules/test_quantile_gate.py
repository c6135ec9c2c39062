"""Proves what the quantile gate accepts: by hand, its neutral setting against strict acceptance, and where its threshold comes from."""

import pytest
import torch
from support import tiny
from support.blocks import changed, decide, greedy_block, outcome, random_block, same

import hf_lossy_assist as hla
from hf_lossy_assist.rules.head_rules import prefix_scores


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


def test_scores_by_hand():
    """Directions 0°, 0°, 90°, 90°: cosines 1, 0, 1, so means 1, 1/2, 2/3; lengths do not count."""
    states = torch.tensor([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0], [0.0, 0.1]]])
    expected = torch.tensor([[-torch.inf, 1.0, 0.5, 2 / 3]])
    torch.testing.assert_close(prefix_scores(states), expected)
    assert hla.QuantileGate(0.6).judge(states).tolist() == [[False, True, False, True]]


def test_the_longest_prefix_that_passes_is_accepted_whole():
    """
    drafted   target says   passes at    sent   accepted          then
    5 6 7     9 9 9 8       2nd          3      2, both lossy     9
    5 6 7     9 9 9 8       3rd          3      3                 8
    5 6 7     9 9 9 8       3rd          2      0: never sent     9
    5 6 7     5 9 9 8       none         3      1, by strict      9
    5 6 7     5 9 7 8       2nd          3      3: then strict    8
    """
    says = [[9, 9, 9, 8], [9, 9, 9, 8], [9, 9, 9, 8], [5, 9, 9, 8], [5, 9, 7, 8]]
    block = greedy_block([[5, 6, 7]] * 5, says, [3] * 5, [3, 3, 2, 3, 3])
    passes = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0], [0, 1, 0]]).bool()
    verdict = decide(hla.QuantileGate(0.5), changed(block, head_accepts=passes))
    assert verdict.accepted.tolist() == [2, 3, 0, 1, 3] and verdict.token.tolist() == [9, 8, 9, 9, 8]
    assert verdict.lossy.long().tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0]]


@pytest.mark.parametrize("sampling", [False, True])
def test_threshold_1_is_strict_acceptance(sampling):
    block = changed(random_block(0), sampling=sampling)
    states = torch.ones(*block.tokens.shape, 3)  # all alike: a cosine of 1, which is not above 1
    gate = hla.QuantileGate(1.0)
    block = changed(block, head_accepts=gate.judge(states))
    assert same(outcome(gate, block), outcome(hla.Strict(), block))


@pytest.mark.parametrize("threshold", [1.0, -1.0])
def test_in_a_call(threshold):
    target = tiny.shared("llama")
    draft, inputs = tiny.draft_of(target, "rarely"), tiny.prompts((9, 4))
    settings = {"eos_token_id": tiny.NEVER_EMITTED, "num_assistant_tokens": 4}
    out = tiny.assisted(target, inputs, draft, hla.QuantileGate(threshold), **settings)
    if threshold == 1.0:
        assert torch.equal(out.sequences, tiny.assisted(target, inputs, draft, **settings).sequences)
    else:
        assert out.speculation.draft_acceptance_rate == 1 and out.speculation.num_lossy_accepts > 0


def test_a_threshold_from_texts_without_labels():
    target = tiny.shared("llama")
    texts = [row for row in tiny.greedy(target, tiny.prompts((9, 9, 9)), max_new_tokens=24)]
    gates = [hla.QuantileGate.calibrated(target, texts, share, length=4).threshold for share in (0.0, 0.5, 1.0)]
    assert -1 <= gates[0] < gates[1] < gates[2] <= 1
    with torch.no_grad():
        states = target(texts[0][None], output_hidden_states=True).hidden_states[-1]
    alone = hla.QuantileGate.calibrated(target, texts[:1], 0.0, length=100).threshold
    assert alone == pytest.approx(float(prefix_scores(states)[0, -1]), abs=1e-6)
    with pytest.raises(
        ValueError, match=r"^QuantileGate.calibrated: expected texts of at least two tokens, got none$"
    ):
        hla.QuantileGate.calibrated(target, [torch.tensor([5])], 0.5)
