"""Proves what AutoJudge's rule accepts: by hand, by enumeration, and against strict acceptance.

Its baseline, the target's top k, has the tests of every rule; here with ties.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039), §3.3 and §4.1.
"""

import itertools
import math
from typing import Any

import pytest
import torch
from support.blocks import changed, decide, greedy_block, make_round, outcome, random_block, same
from support.distributions import Tables, V
from support.formulas import first_two
from support.heads import make_head

from hf_lossy_assist import HeadConfig, Judge, MLPHead, Strict, TopK, Verified


INF = math.inf


ECHO = make_head(1, 1.0)  # its logit is the one number it is given


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def judged(block: Verified, rule: Judge, logits: torch.Tensor) -> Verified:
    """The block as the engine hands it over: the head has been asked, and said `logits` (B, γ)."""
    return changed(block, head_accepts=rule.judge(logits[..., None]))


def test_judge_overrides_mismatches_alone():
    """P(important) < 0.3 lets a mismatch pass. Where strict accepts, the head's word does not count.

    drafted   target says   P(important)   accepted           then
    5 6 7     5 6 7 8       .9 .9 .9       3                  8: matches, however important
    5 6 7     5 9 7 8       .9 .2 .9       3, the 6 lossy     8: the 7 behind it goes on as strict acceptance has it
    5 6 7     5 9 7 8       .1 .4 .1       1                  9
    5 6 7     9 9 9 8       .2 .2 .2       3, all lossy       8
    5 6 7     9 9 9 8       .2 .9 .2       1 lossy            9: what would pass behind a rejection does not count
    5 6 7     9 6 9 8       .2 .9 .9       2, the 5 lossy     9
    5 6       9 6 7 8       .2 .9          2, the 5 lossy     7: the bonus, and the padding behind it is not accepted
    (none)    4             (none)         0                  4
    """
    says = [
        [5, 6, 7, 8], [5, 9, 7, 8], [5, 9, 7, 8], [9, 9, 9, 8], [9, 9, 9, 8], [9, 6, 9, 8], [9, 6, 7, 8],
        [4, 0, 0, 0],
    ]  # fmt: skip
    block = greedy_block([[5, 6, 7]] * 8, says, [3, 3, 3, 3, 3, 3, 2, 0])
    important = [[0.9] * 3, [0.9, 0.2, 0.9], [0.1, 0.4, 0.1], [0.2] * 3, [0.2, 0.9, 0.2], [0.2, 0.9, 0.9], [0.2, 0.9, 0.1],
                 [0.1] * 3]  # fmt: skip
    rule = Judge(ECHO, 0.3)
    block = judged(block, rule, torch.tensor(important).logit())
    verdict = decide(rule, block)
    assert verdict.accepted.tolist() == [3, 3, 1, 3, 1, 2, 2, 0]
    assert verdict.token.tolist() == [8, 8, 9, 8, 9, 9, 7, 4]
    assert verdict.lossy.long().tolist() == [
        [0, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0],
    ]  # fmt: skip
    assert verdict.unchecked is None
    block = changed(block, sent=torch.tensor([2, 1, 1, 2, 3, 1, 1, 0]))  # a filter dropped the rest
    verdict = decide(rule, block)
    assert verdict.accepted.tolist() == [2, 1, 1, 2, 1, 1, 1, 0]
    assert verdict.token.tolist() == [7, 9, 9, 9, 9, 6, 6, 4]


def test_nothing_was_drafted():
    """γ = 0: the head is not asked, and the round is a plain step of the target."""
    scores = torch.full((2, 1, 10), -INF)
    scores[0, 0, 3] = scores[1, 0, 8] = 0.0
    for rule, sampling in itertools.product((Judge(ECHO, 1.0), TopK(9)), (False, True)):
        block = make_round(torch.zeros(2, 0, dtype=torch.long), torch.zeros(2).long(), None, sampling, None, scores)
        verdict = decide(rule, block)
        assert verdict.accepted.tolist() == [0, 0] and verdict.token.tolist() == [3, 8]
    block = greedy_block([[5]], [[5, 6]], [1])
    with pytest.raises(AssertionError, match="has not been asked"):  # never quietly strict
        decide(Judge(ECHO, 0.5), block)


def test_the_threshold_is_strict_and_in_probabilities():
    """P = .5 is not below .5; thresholds are compared where a sigmoid in float32 would have rounded."""
    logits = torch.tensor([[-20.0, log_odds(0.1), 0.0, log_odds(0.9), 20.0, 200.0, -200.0]])
    ask = {t: Judge(ECHO, t).judge(logits[..., None]).tolist()[0] for t in (0, 0.0, 0.05, 0.5, 0.95, 1, 1.0)}
    assert ask[0] == ask[0.0] == [False] * 7
    assert ask[0.05] == [True, False, False, False, False, False, True]
    assert ask[0.5] == [True, True, False, False, False, False, True]
    assert ask[0.95] == [True, True, True, True, False, False, True]
    assert ask[1] == ask[1.0] == [True] * 7 and logits.sigmoid()[0, 4:6].tolist()[1] == 1.0
    assert Judge(ECHO, 0.5).judge(torch.full((2, 3, 1), math.nan)).any() == False  # noqa: E712  a broken head keeps nothing
    assert (
        Judge(ECHO, 5e-324).judge(logits[..., None]).sum() == 0
        and Judge(ECHO, 1 - 2**-53).judge(logits[..., None]).sum() == 6
    )
    mlp = MLPHead(HeadConfig(4, kind="mlp", width=3, polarity="important"))
    features = torch.randn(5, 6, 4, dtype=torch.bfloat16)
    assert torch.equal(Judge(mlp, 0.5).judge(features), mlp(features) < 0.5)


def test_a_certain_head_keeps_to_the_ends():
    """With 1 all is kept even from a head that is sure to be asked about important tokens (its sigmoid is 1.0 in float32)."""
    sure, unsure = make_head(1, bias=300.0), make_head(1, bias=-300.0)
    assert sure(torch.zeros(1)).item() == 1.0 and unsure(torch.zeros(1)).item() == 0.0
    for head, threshold in itertools.product((sure, unsure), (0.0, 1.0)):
        rule = Judge(head, threshold)
        block = judged(greedy_block([[5, 6, 7]] * 2, [[9, 9, 9, 8], [5, 9, 9, 8]], [3, 2]), rule, torch.zeros(2, 3))
        verdict = decide(rule, block)
        assert verdict.accepted.tolist() == ([3, 2] if threshold else [0, 1])
        assert verdict.token.tolist() == ([8, 9] if threshold else [9, 9])


def test_larger_thresholds_accept_more_from_strict_acceptance_to_all():
    """Same coins: a larger threshold only lengthens what is accepted, and only what strict rejects is called lossy."""
    thresholds = (0, 0.1, 0.5, 0.7, 1)
    for seed, greedy, certain in itertools.product(range(6), (False, True), (False, True)):
        block = random_block(seed)
        block = changed(block, sampling=not greedy, probs=None if certain else block.q)
        logits = torch.randn(block.tokens.shape) * (3 if seed else 30)
        strict, verdicts = outcome(Strict(), block, seed), []
        torch.manual_seed(seed)
        coins = torch.rand(block.tokens.shape)
        ok = Strict().matches(block) if greedy else coins < Strict().probability(block)
        for rule in (Judge(ECHO, threshold) for threshold in thresholds):
            given = judged(block, rule, logits)
            verdict = outcome(rule, given, seed)
            verdicts.append(verdict)
            accepted = torch.arange(4) < verdict.accepted[:, None]
            assert torch.equal(verdict.lossy, accepted & ~ok)
            # The token after it stopped is one that neither strict acceptance nor the rule lets pass.
            stopped = (verdict.accepted < block.drafted).nonzero().squeeze(-1)
            at = verdict.accepted[stopped]
            assert not ok[stopped, at].any() and not given.head_accepts[stopped, at].any()
        assert (torch.stack([verdict.accepted for verdict in verdicts]).diff(dim=0) >= 0).all()
        assert same(verdicts[0], strict) and torch.equal(verdicts[-1].accepted, block.drafted)


UNIMPORTANT = (1, 3)  # token ids that the enumerated head lets pass


class ByToken(Judge):
    """`Judge`, whose head is shown each token as a one-hot vector: it lets the `UNIMPORTANT` ones pass."""

    def probability(self, verified):
        accepts = self.judge(torch.nn.functional.one_hot(verified.tokens, V))
        return super().probability(changed(verified, head_accepts=accepts))


def by_token(threshold: float = 0.5) -> ByToken:
    logits = [-1.0 if token in UNIMPORTANT else 1.0 for token in range(V)]
    return ByToken(make_head(V, logits), threshold)


PASSING = {0: set(), 0.5: set(UNIMPORTANT), 1: set(range(V))}  # tokens with a = 1, by the threshold


def one_token(rule: Any, p: torch.Tensor, q: torch.Tensor, certain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the formula's values for one place: (probability that x is the draft and kept, probability that x is the correction)."""
    free, accepted, corrected = PASSING[rule.threshold], torch.zeros(V).double(), torch.zeros(V).double()
    for x in range(V):
        if q[x] == 0:
            continue
        a = 1.0 if x in free else min(1.0, float(p[x]) if certain else float(p[x] / q[x]))
        accepted[x] = q[x] * a
        r = p.clone() if certain else (p - q).clamp(min=0)
        if certain:
            r[x] = 0.0
        if a < 1:
            corrected += q[x] * (1 - a) * r / r.sum()
    return accepted, corrected


def test_the_distribution_by_enumeration():
    """q·a + (1 − Σ q·a)·r at each place behind its prefix, and p where the round's bonus token stands, in float64."""
    for threshold, certain in itertools.product(PASSING, (False, True)):
        rule, lossy = by_token(threshold), []
        for seed, gamma in ((1, 1), (11, 2), (0, 3)):
            tables = Tables(seed, gamma + 1)
            expected, strict = torch.zeros(V, V).double(), torch.zeros(V, V).double()
            accepted, corrected = one_token(rule, tables.p[()], tables.q[()], certain)
            for x in range(V):
                behind = sum(one_token(rule, tables.p[x,], tables.q[x,], certain))
                expected[x] = accepted[x] * (tables.p[x,] if gamma == 1 else behind) + corrected[x] * behind
                strict[x] = tables.p[()][x] * tables.p[x,]
            assert abs(float(expected.sum()) - 1) < 1e-12
            torch.testing.assert_close(first_two(rule, tables, gamma, certain), expected, atol=1e-12, rtol=0)
            lossy.append(float((expected - strict).abs().max()))
        assert max(lossy) > 1e-2 if threshold else max(lossy) < 1e-12, "it must be told from strict acceptance"
