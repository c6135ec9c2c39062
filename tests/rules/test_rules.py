"""Proves what a round accepts and which token follows, on blocks small enough to follow by hand.

In the pictures V = 4, and a law is written as its four probabilities.
"""

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch
from support.blocks import Everything, decide, greedy_block, make_round, sampling_block
from support.paper_rules import SyntheticForBenchmarks

from hf_lossy_assist import AcceptanceRule, Strict
from hf_lossy_assist.rules import draw


@dataclass(frozen=True)
class Nothing(AcceptanceRule):
    """Accepts no token on its own account: what is left is the union with strict acceptance."""

    lossless: ClassVar[bool] = False

    def matches(self, block):
        return torch.zeros_like(block.tokens, dtype=torch.bool)

    def probability(self, block):
        return torch.zeros(block.tokens.shape)


# The target's choices, drafted and sent tokens of each row; then accepted tokens, the token behind them, and lossy ones.
FULL = [5, 6, 7, 8]
GREEDY = {
    # The bonus behind all; a correction, and the 7 behind it does not count; a correction of the first.
    "the first mismatch": (Strict, [FULL, [5, 9, 7, 8], [4, 6, 7, 8]], [3, 3, 3], None, [3, 1, 0], [8, 9, 4], []),
    # What agrees by chance behind a row's draft is padding, and the token comes from the position behind the draft.
    "padding": (Strict, [FULL] * 3, [3, 1, 0], None, [3, 1, 0], [8, 6, 5], []),
    "padding under a rule that takes everything": (Everything, [FULL] * 3, [3, 1, 0], None, [3, 1, 0], [8, 6, 5], []),
    "tokens that a filter dropped": (Strict, [FULL] * 2, [3, 3], [2, 0], [2, 0], [7, 5], []),
    # Strict would have stopped at the 6. The 7 behind it agrees, so it is no lossy acceptance.
    "a lossy token is marked": (Everything, [[5, 9, 7, 8]], [3], None, [3], [8], [(0, 1)]),
    "a lossy rule is joined with strict": (Nothing, [[5, 6, 9, 8]], [3], None, [2], [9], []),
}


def test_greedy_by_hand():
    """Each row drafts 5 6 7."""
    for name, (rule, best, drafted, sent, accepted, token, lossy) in GREEDY.items():
        verdict = decide(rule(), greedy_block([[5, 6, 7]] * len(best), best, drafted, sent))
        assert verdict.accepted.tolist() == accepted and verdict.token.tolist() == token, name
        assert [tuple(place) for place in verdict.lossy.nonzero().tolist()] == lossy, name


def test_nothing_was_drafted():
    """γ = 0: the round is a plain step of the target."""
    greedy = greedy_block([[], []], [[3], [8]], [0, 0])
    verdict = decide(Strict(), greedy)
    assert verdict.accepted.tolist() == [0, 0] and verdict.token.tolist() == [3, 8]
    p = torch.tensor([[[0.0, 1.0, 0.0, 0.0]], [[0.0, 0.0, 0.0, 1.0]]])
    for q in (None, torch.zeros(2, 0, 4)):
        sampled = sampling_block(p, q, torch.zeros(2, 0, dtype=torch.long))
        verdict = decide(Strict(), sampled)
        assert verdict.accepted.tolist() == [0, 0] and verdict.token.tolist() == [1, 3]
        assert verdict.lossy.shape == (2, 0)


def test_impossible_and_sure_tokens():
    """Where p gives 0 the token is rejected and the correction avoids it; where p ≥ q it is accepted: no coin can say no."""
    p = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(2000, 2, 4)
    q = torch.tensor([0.5, 0.5, 0.0, 0.0]).expand(2000, 1, 4)
    rejected = decide(Strict(), sampling_block(p, q, torch.zeros(2000, 1, dtype=torch.long)))
    assert not rejected.accepted.any() and (rejected.token == 1).all()
    accepted = decide(Strict(), sampling_block(p, q, torch.ones(2000, 1, dtype=torch.long)))
    assert accepted.accepted.all() and (accepted.token == 1).all()


def test_draw_keeps_to_the_support():
    for shape in ((3,), (2, 5, 4)):
        law = torch.rand(*shape)
        law[..., 1] = 0.0
        for _ in range(200):
            assert (draw(law) != 1).all()


def test_an_unlikely_token_is_as_unlikely_under_any_default_dtype():
    """1e-4 is well below the steps of bfloat16's and float16's uniform numbers, whose zero would accept it. Tokens are certain in the draft."""
    rows, scores = 200_000, torch.zeros(200_000, 2, 2)
    scores[..., 1] = torch.tensor(1e-4).logit()
    ones = torch.ones(rows, dtype=torch.int64)
    for default, (rule, sampling) in itertools.product(
        (torch.bfloat16, torch.float16), ((Strict(), True), (SyntheticForBenchmarks(1e-4), False))
    ):
        torch.set_default_dtype(default)
        try:
            accepted = decide(rule, make_round(ones[:, None], ones, None, sampling, None, scores)).accepted.sum()
        finally:
            torch.set_default_dtype(torch.float32)
        assert 2 <= accepted <= 50, (default, rule)  # 20 expected; 1/256 of them would be 781, 1/2048 98
