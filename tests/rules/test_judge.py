"""Proves what AutoJudge's rule and its baseline, the target's top k, accept: by hand, by enumeration, and against strict acceptance.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039), §3.3 and §4.1.
"""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny
from support.blocks import changed, decide, greedy_block, make_round, outcome, random_block, same, sampling_block
from support.distributions import REJECT, Tables, V, first_two, goodness
from support.heads import make_head
from support.tiny import assisted, prompts

import hf_lossy_assist as hla
from hf_lossy_assist import AutoJudge, HeadConfig, Judge, MLPHead, Strict, TopK, Verified
from hf_lossy_assist.rules import draw


INF = math.inf


ECHO = make_head(1, 1.0)  # its logit is the one number it is given


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def judged(block: Verified, rule: Judge, logits: torch.Tensor) -> Verified:
    """The block as the engine hands it over: the head has been asked, and said `logits` (B, γ)."""
    return changed(block, head_accepts=rule.judge(logits[..., None]))


# -- by hand, greedy ------------------------------------------------------------------------------------------------------


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
        [5, 6, 7, 8],
        [5, 9, 7, 8],
        [5, 9, 7, 8],
        [9, 9, 9, 8],
        [9, 9, 9, 8],
        [9, 6, 9, 8],
        [9, 6, 7, 8],
        [4, 0, 0, 0],
    ]
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


@pytest.mark.parametrize("sampling", [False, True])
def test_nothing_was_drafted(sampling):
    """γ = 0: the head is not asked, and the round is a plain step of the target."""
    scores = torch.full((2, 1, 10), -INF)
    scores[0, 0, 3] = scores[1, 0, 8] = 0.0
    for rule in (Judge(ECHO, 1.0), TopK(9)):
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


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_certain_head_keeps_to_the_ends(threshold):
    """With 1 all is kept even from a head that is sure to be asked about important tokens (its sigmoid is 1.0 in float32)."""
    sure, unsure = make_head(1, bias=300.0), make_head(1, bias=-300.0)
    assert sure(torch.zeros(1)).item() == 1.0 and unsure(torch.zeros(1)).item() == 0.0
    for head in (sure, unsure):
        rule = Judge(head, threshold)
        block = judged(greedy_block([[5, 6, 7]] * 2, [[9, 9, 9, 8], [5, 9, 9, 8]], [3, 2]), rule, torch.zeros(2, 3))
        verdict = decide(rule, block)
        assert verdict.accepted.tolist() == ([3, 2] if threshold else [0, 1])
        assert verdict.token.tolist() == ([8, 9] if threshold else [9, 9])


def top_k_block(
    tokens: list[int], law: list[float], sampling: bool = False, q: torch.Tensor | None = None
) -> Verified:
    """One drafted token for each row, all rows with the same target law."""
    p = torch.tensor(law, dtype=torch.float64).expand(len(tokens), 2, len(law))
    return changed(sampling_block(p, q, torch.tensor(tokens)[:, None]), sampling=sampling)


def test_top_k_by_hand():
    """
    law (.1 .3 .3 .05 .25): in order 1 2 4 0 3, the tie of 1 and 2 goes to the lower id

    k = 0, 1: 1 alone (as strict)   2: 1 2   3: 1 2 4   4: 1 2 4 0   5 and more: all
    """
    order, law = [1, 2, 4, 0, 3], [0.1, 0.3, 0.3, 0.05, 0.25]
    for k in range(8):
        verdict = decide(TopK(k), top_k_block(list(range(5)), law))
        passed = {token for token, n in enumerate(verdict.accepted.tolist()) if n}
        assert passed == set(order[: max(k, 1)])
        assert {token for token, hit in enumerate(verdict.lossy[:, 0].tolist()) if hit} == passed - {1}
        assert all(token == 1 for token in verdict.token.tolist()), "the correction and the bonus are the target's"
    # Sampling: 1 among the k best, else min(1, p/q). k = 1 is not neutral there: 1 passes, though p/q = .5.
    q = torch.tensor([0.2, 0.6, 0.0, 0.1, 0.1], dtype=torch.float64).expand(5, 1, 5)
    for k, expected in (
        (0, [0.5, 0.5, None, 0.5, 1]),
        (1, [0.5, 1, None, 0.5, 1]),
        (2, [0.5, 1, 1, 0.5, 1]),
        (5, [1] * 5),
    ):
        a = TopK(k).probability(top_k_block(list(range(5)), law, True, q))[:, 0]
        for token, value in enumerate(expected):
            assert value is None or abs(float(a[token]) - value) < 1e-12, (k, token)


def test_top_k_at_every_position():
    """Each place has a law of its own, and the row goes on with strict acceptance behind a token that was kept."""
    block = greedy_block([[5, 6, 7]] * 2, [[5, 9, 7, 8], [5, 9, 9, 8]], [3, 3])
    block.logits[:, 1, 6] = 0.5  # second best there
    verdict = decide(TopK(2), block)
    assert verdict.accepted.tolist() == [3, 2] and verdict.token.tolist() == [8, 9]
    assert verdict.lossy.long().tolist() == [[0, 1, 0], [0, 1, 0]]


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(2, 3))
def test_neutral_values_of_top_k_are_strict_with_ties(seed, levels):
    """Scores of two or three levels, so that ties are everywhere: TopK(0), and in greedy decoding TopK(1), bit by bit."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, levels, (50, 4, 5), generator=generator).float()
    tokens, drafted = (
        torch.randint(0, 5, (50, 3), generator=generator),
        torch.randint(0, 4, (50,), generator=generator),
    )
    greedy = make_round(tokens, drafted, None, False, drafted, scores)
    for rule in (TopK(0), TopK(1)):
        assert same(outcome(rule, greedy), outcome(Strict(), greedy))
    for q in (None, torch.rand(50, 3, 5, generator=generator).softmax(-1)):
        sampled = make_round(tokens, drafted, q, True, drafted, scores)
        assert same(outcome(TopK(0), sampled, seed), outcome(Strict(), sampled, seed))
        everything = outcome(TopK(5), sampled, seed)
        assert torch.equal(everything.accepted, drafted), "all V tokens are among the V best"


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.booleans(), st.booleans())
def test_threshold_zero_is_strict_and_one_keeps_all(seed, certain, greedy):
    block = random_block(seed)
    block = changed(block, sampling=not greedy, probs=None if certain else block.q)
    logits = torch.randn(block.tokens.shape) * 30
    zero, one = Judge(ECHO, 0), Judge(ECHO, 1)
    assert same(outcome(zero, judged(block, zero, logits), seed), outcome(Strict(), block, seed))
    everything = outcome(one, judged(block, one, logits), seed)
    assert torch.equal(everything.accepted, block.drafted)


@pytest.mark.full
@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_looser_accepts_a_superset(seed, t, u, greedy):
    """Same coins: a larger threshold or k only lengthens what is accepted, and only what strict rejects is called lossy."""
    block = changed(random_block(seed), sampling=not greedy)
    logits = torch.randn(block.tokens.shape) * 3
    strict = outcome(Strict(), block, seed)
    inside = torch.arange(4) < block.drafted[:, None]
    torch.manual_seed(seed)
    coins = torch.rand(block.tokens.shape)
    ok = Strict().matches(block) if greedy else coins < Strict().probability(block)
    ladders = [[Judge(ECHO, x) for x in (0, min(t, u), max(t, u), 1)], [TopK(k) for k in (0, 1, 2, 4, 6)]]
    for ladder in ladders:
        before = strict.accepted
        for rule in ladder:
            if isinstance(rule, Judge):
                block = judged(block, rule, logits)
            verdict = outcome(rule, block, seed)
            assert (verdict.accepted >= before).all() and (verdict.accepted <= block.drafted).all()
            accepted = torch.arange(4) < verdict.accepted[:, None]
            assert torch.equal(verdict.lossy, accepted & inside & ~ok)
            # The token after it stopped is one that neither strict acceptance nor the rule lets pass.
            stopped = (verdict.accepted < block.drafted).nonzero().squeeze(-1)
            at = verdict.accepted[stopped]
            assert not ok[stopped, at].any()
            if isinstance(rule, Judge):
                assert not block.head_accepts[stopped, at].any()
            before = verdict.accepted


# -- the law --------------------------------------------------------------------------------------------------------------

UNIMPORTANT = (1, 3)  # token ids that the enumerated head lets pass


class ByToken(Judge):
    """`Judge`, whose head is shown each token as a one-hot vector: it lets the `UNIMPORTANT` ones pass."""

    def probability(self, verified):
        accepts = self.judge(torch.nn.functional.one_hot(verified.tokens, V))
        return super().probability(changed(verified, head_accepts=accepts))


def by_token(threshold: float = 0.5) -> ByToken:
    logits = [-1.0 if token in UNIMPORTANT else 1.0 for token in range(V)]
    return ByToken(make_head(V, logits), threshold)


def top_tokens(p: torch.Tensor, k: int) -> set[int]:
    return set(sorted(range(V), key=lambda x: (-float(p[x]), x))[:k])


def passing(rule: Any, p: torch.Tensor) -> set[int]:
    """Tokens with a = 1, from the docstrings and not from the code."""
    if isinstance(rule, TopK):
        return top_tokens(p, rule.k)
    return {0: set(), 0.5: set(UNIMPORTANT), 1: set(range(V))}[rule.threshold]


def one_token(rule: Any, p: torch.Tensor, q: torch.Tensor, certain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the formula's values for one place: (probability that x is the draft and kept, probability that x is the correction)."""
    free, accepted, corrected = passing(rule, p), torch.zeros(V).double(), torch.zeros(V).double()
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


RULES = {
    "judge": lambda: by_token(), "judge 0": lambda: by_token(0), "judge 1": lambda: by_token(1),
    "top 0": lambda: TopK(0), "top 1": lambda: TopK(1), "top 2": lambda: TopK(2), "top all": lambda: TopK(V),
}  # fmt: skip


@pytest.mark.full(every=2)
@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
@pytest.mark.parametrize("name", RULES)
def test_law_by_enumeration(name, certain):
    """L = q·a + (1 − Σ q·a)·r at each place behind its prefix, and p where the round's bonus token stands, in float64."""
    rule, lossless = RULES[name](), name in ("judge 0", "top 0")
    lossy = []
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
    if name != "top 1":  # seldom q > p for the one token: `test_decide_draws_by_that_law` has such tables
        assert max(lossy) < 1e-12 if lossless else max(lossy) > 1e-2, (
            "the law must tell this rule from strict acceptance"
        )


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_decide_draws_by_that_law(certain):
    """The same with real coins: 100 000 rows of one block through `decide`."""
    rows, tables = 100_000, Tables(11, 2)
    p, q = tables.p[()], tables.q[()]
    tokens = draw(q.float().expand(rows, 1, V))
    block = sampling_block(p.float().expand(rows, 2, V), None if certain else q.float().expand(rows, 1, V), tokens)
    for name in ("judge", "judge 0", "judge 1", "top 1", "top 2"):
        rule = RULES[name]()
        law = sum(one_token(rule, p, q, certain))
        verdict = decide(rule, block)
        counts = torch.bincount(torch.where(verdict.accepted > 0, tokens[:, 0], verdict.token), minlength=V)
        assert goodness(counts, law) > REJECT
        if name != "judge 0":
            assert goodness(counts, p) < REJECT, "the samples cannot tell it from the target"
        free = torch.tensor([token in passing(rule, p) for token in range(V)])
        assert (verdict.accepted[free[tokens[:, 0]]] == 1).all(), "a = 1: no coin can say no"


# -- in the engine --------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_it_says_once_that_it_is_lossy(monkeypatch, tmp_path):
    monkeypatch.setattr("hf_lossy_assist.generation.model_checks._warned", set())
    target, draft, head = tiny.shared("llama"), tiny.draft_of(tiny.shared("llama"), "rarely"), make_head()
    head.save_pretrained(tmp_path / "judge")
    for policy, words in ((AutoJudge(head, 0.4), "judge.*0.4"), (AutoJudge(head, 0), "judge"), (hla.TopK(2), "top_k")):
        with pytest.warns(UserWarning, match=f"{words}.*policy is lossy") as caught:
            assisted(target, prompts((9,)), draft, policy)
        assert len(caught) == 1 and "\n" not in str(caught[0].message)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assisted(target, prompts((9,)), draft, policy)
