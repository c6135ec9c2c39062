"""Proves what AutoJudge's rule accepts: by hand, by enumeration, and against strict acceptance; its JSON form and its folder; what it refuses.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039), §3.3 and §4.1.
"""

import copy
import itertools
import json
import math
import pickle
import shutil
from typing import Any

import pytest
import torch
from support.blocks import changed, decide, greedy_block, outcome, random_block, same
from support.distributions import Tables, V
from support.formulas import first_two
from support.heads import make_head
from support.refusals import names, refused

import hf_lossy_assist as hla
from hf_lossy_assist import HeadConfig, Judge, MLPHead, Strict, Verified


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


def test_a_head_that_was_not_asked_is_an_error():
    """Never quietly strict. With γ = 0 there is nothing to ask it."""
    refused(lambda: decide(Judge(ECHO, 0.5), greedy_block([[5]], [[5, 6]], [1])), "has not been asked", AssertionError)
    assert decide(Judge(ECHO, 1.0), greedy_block([[], []], [[3], [8]], [0, 0])).token.tolist() == [3, 8]


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
    for threshold, count in ((5e-324, 0), (1 - 2**-53, 6)):
        assert Judge(ECHO, threshold).judge(logits[..., None]).sum() == count
    mlp = MLPHead(HeadConfig(4, kind="mlp", width=3, polarity="important"))
    features = torch.randn(5, 6, 4, dtype=torch.bfloat16)
    assert torch.equal(Judge(mlp, 0.5).judge(features), mlp(features) < 0.5)


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


@pytest.mark.full
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


def test_the_parts():
    head = make_head()
    policy = hla.AutoJudge(head, 0.3)
    assert policy == hla.LossyPolicy(hla.Judge(head, 0.3), hla.Constant(32)) and not policy.lossless
    assert hash(policy) == hash(hla.LossyPolicy(hla.Judge(head, 0.3), hla.Constant(32)))
    assert hla.AutoJudge(head, 0.3, 7).stop == hla.Constant(7)
    assert hla.AutoJudge(head, 0.3, stop=hla.SVIP()).stop == hla.SVIP()
    assert hla.AutoJudge(make_head(), 0.3) == policy and hla.AutoJudge(head, 1) == hla.AutoJudge(head, 1.0)
    others = (
        hla.AutoJudge(head, 0.4), hla.AutoJudge(make_head(bias=1.0), 0.3), hla.AutoJudge(head, 0.3, 8),
        hla.LossyPolicy(),
    )  # fmt: skip
    assert all(policy != other for other in others)
    assert policy.heads() == {"rule_head": head} and policy.rule.features == head.config.features
    assert not hla.AutoJudge(head, 0).lossless, "the class says it, not the value"
    thresholded = make_head(threshold=0.25)
    assert hla.AutoJudge(thresholded) == hla.AutoJudge(thresholded, 0.25) == hla.as_policy(thresholded)
    assert hla.AutoJudge(thresholded).rule.threshold == 0.25 and hla.Judge(thresholded, 0).threshold == 0
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and again.rule.head is not head
    assert copy.deepcopy(policy) is policy and copy.deepcopy(policy.rule) is policy.rule  # frozen, so a copy can share
    plain = hla.LinearHead(hla.HeadConfig(32))
    assert hla.as_policy(plain) == hla.Sprinter(plain)
    for rule in (hla.Judge(head, 0.3), hla.TopK(3)):
        assert hla.as_policy(rule) == hla.LossyPolicy(rule)


def test_judges_that_read_other_states_differ():
    predicting = make_head(features=hla.FeatureSpec("target", "predicting"))
    assert hla.Judge(make_head(), 0.3) != hla.Judge(predicting, 0.3)


def test_json(tmp_path):
    fresh = hla.AutoJudge(make_head(), 0.3)
    refused(fresh.to_dict, "never saved has no JSON form: head.save_pretrained")
    assert "LinearHead" in str(fresh) and "0.3" in str(fresh)
    make_head(threshold=0.25).save_pretrained(tmp_path / "head")
    loaded = hla.Head.from_pretrained(tmp_path / "head")
    policy, place = hla.AutoJudge(loaded, 0.3, 7), str(tmp_path / "head")
    assert policy.to_dict() == {
        "rule": {"name": "judge", "head": place, "threshold": 0.3}, "stop": {"name": "constant", "gamma": 7},
    }  # fmt: skip
    for form in (policy.to_dict(), json.dumps(policy.to_dict()), str(policy)):
        assert hla.as_policy(form) == policy
    spec = {"rule": {"name": "judge", "head": place}}
    assert hla.LossyPolicy.from_dict(spec).rule == hla.Judge(loaded, 0.25), "no threshold: the head's own"
    assert hla.as_policy({"rule": {"name": "judge", "head": loaded, "threshold": 1}}).rule == hla.Judge(loaded, 1)
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": 5}}), "expected Head, got 5", TypeError)
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": str(tmp_path / "no")}}), "neither a folder here")
    refused(lambda: hla.as_policy({"rule": {"name": "judge", "head": place, "threshold": 2}}), "Judge.threshold.*2")


def test_a_policys_folder(tmp_path):
    """Both heads have folders of their own inside it, so that it can be moved; stops/test_combined.py loads heads inside heads."""
    policy = hla.AutoJudge(
        make_head(weight=torch.randn(32), threshold=0.25),
        0.4,
        stop=hla.HeadStop(hla.LinearHead(hla.HeadConfig(32)).eval(), 0.6, 9),
    )
    policy.save_pretrained(tmp_path / "made")
    assert policy.rule.head.source == str(tmp_path / "made" / "rule_head")
    shutil.move(tmp_path / "made", folder := tmp_path / "moved")
    spec = json.loads((folder / "policy.json").read_text())
    assert spec["rule"] == {"name": "judge", "head": "rule_head", "threshold": 0.4}
    assert spec["stop"]["head"] == "stop_head" and names(folder) == {
        "policy.json",
        "README.md",
        "rule_head",
        "stop_head",
    }
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "**Lossy**" in card and '"judge"' in card and hla.as_policy(folder) == policy


def test_a_folder_with_a_head_alone(tmp_path):
    """Its config names the method that it is for."""
    make_head(threshold=0.25).save_pretrained(tmp_path / "important")
    hla.LinearHead(hla.HeadConfig(32)).save_pretrained(tmp_path / "acceptable")
    make_head().save_pretrained(tmp_path / "without")
    for form in (tmp_path / "important", str(tmp_path / "important")):
        for policy in (hla.as_policy(form), hla.LossyPolicy.from_pretrained(form)):
            assert policy.rule.threshold == 0.25 and policy.stop == hla.Constant(32)
    assert hla.as_policy(tmp_path / "acceptable") == hla.Sprinter(hla.Head.from_pretrained(tmp_path / "acceptable"))
    refused(lambda: hla.as_policy(tmp_path / "without"), "names no threshold")


def test_wrong_heads_and_values_are_refused():
    head = make_head()
    for make in (hla.Judge, hla.AutoJudge):
        doubt = hla.LinearHead(hla.HeadConfig(32))
        refused(lambda make=make, h=doubt: make(h, 0.5), r"P\(acceptable\).*Sprinter.*fit autojudge")
        refused(lambda make=make: make("org/head", 0.5), "Judge.head: expected Head, got 'org/head'", TypeError)
        refused(lambda make=make: make(head), "names no threshold")
        companion = make_head(features=hla.FeatureSpec("companion"))
        refused(lambda make=make, h=companion: make(h, 0.5), "companion")
    refused(lambda: hla.AutoJudge(head, 0.5, 0), "Constant.gamma: .*whole number of at least 1.*0")
    refused(lambda: hla.AutoJudge(head, 0.5, 8, hla.SVIP()), "window and stop")
    refused(lambda: hla.AutoJudge(head, 0.5, stop="svip"), "LossyPolicy.stop.*DraftStop.*'svip'", TypeError)
    refused(lambda: hla.Sprinter(head), r"P\(acceptable\).*P\(important\)")
    refused(lambda: hla.HeadStop(head), r"P\(important\)")
    refused(lambda: hla.as_policy(hla.AutoJudge), "got <function autojudge", TypeError)
    refused(lambda: hla.demo.head("autojuge"), "unknown method 'autojuge'. Did you mean 'autojudge'")
    refused(lambda: hla.demo.head(None), "demo.head: unknown method")
    assert hla.demo.head().config.polarity == hla.demo.head("sprinter").config.polarity == "acceptable"
