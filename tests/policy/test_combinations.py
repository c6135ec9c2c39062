"""Proves that any combination of rules, stops and filters survives its JSON form, generates, and stops where it should."""

import itertools
import json
import math
import warnings
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support import tiny
from support.profiles import draft, profile, target
from support.rule_cases import CASES

import hf_lossy_assist as hla
from hf_lossy_assist import LossyPolicy
from hf_lossy_assist.rules import RULES


INF = math.inf
unit, counts = st.floats(0, 1), st.integers(1, 6)
ids = st.integers(0, tiny.VOCABULARY - 1)


@cache
def folder(tmp):
    """Heads, a profile and a companion, saved so that a policy can name them."""
    kinds = {
        "verifier": {}, "specdec": {"features": hla.FeatureSpec(position="token")},
        "judge": {"polarity": "important", "features": hla.FeatureSpec(model="target", position="token")},
    }  # fmt: skip
    for name, config in kinds.items():
        torch.manual_seed(1)
        hla.LinearHead(hla.HeadConfig(draft().config.hidden_size, **config)).save_pretrained(tmp / name)
    companion = tiny.noisy(target(), 0.05, seed=2)
    companion.save_pretrained(tmp / "companion")
    profile(companion=hla.ModelIdentity.of(type(companion).from_pretrained(tmp / "companion"))).save_pretrained(
        tmp / "profile"
    )
    return tmp


def stops(tmp, gamma=4):
    verifier, specdec = (hla.Head.from_pretrained(tmp / name) for name in ("verifier", "specdec"))
    leaves = st.one_of(
        st.builds(hla.Constant, st.integers(1, gamma)),
        st.builds(hla.Heuristic, st.just(1), st.integers(1, gamma)),
        st.builds(hla.Confidence, unit, st.integers(1, gamma)),
        st.builds(hla.SVIP, h=st.one_of(unit, st.just(INF)), max_draft=st.integers(1, gamma)),
        st.builds(lambda t, n: hla.HeadStop(verifier, t, n), st.floats(0, 1), st.integers(1, gamma)),
        st.builds(lambda t, n: hla.SpecDecPP(specdec, t, n), unit, st.integers(1, gamma)),
        st.builds(lambda a, b: hla.BatchSchedule({1: a, 3: b}), st.integers(1, gamma), st.integers(0, gamma)),
        st.builds(hla.JointGoodput, h=unit, step=unit, token=unit, max_draft=st.integers(1, gamma)),
    )
    several = lambda inner: st.lists(inner, min_size=1, max_size=3).map(tuple)  # noqa: E731
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.builds(hla.AnyOf, several(inner)), st.builds(hla.AllOf, several(inner)),
            st.builds(hla.AtLeast, inner, st.integers(1, gamma)), st.builds(hla.Fallback, inner, unit, counts, counts, counts),
        ),
        max_leaves=4,
    )  # fmt: skip


PLAIN = {  # of greedy decoding and sampling alike, and some of one of them
    "strict": st.just(hla.Strict()), "top_k": st.builds(hla.TopK, st.integers(0, 9)), "typical": st.builds(hla.Typical, unit, unit),
    "lenience": st.builds(hla.Lenience, st.floats(0.01, 1)), "all_but_last": st.just(hla.AllButLast()), "relaxed_top_k": st.builds(hla.RelaxedTopK, counts, unit),
    "top_k_tolerance": st.builds(hla.TopKTolerance, counts, st.floats(0, 5)),
    "entropy_verify": st.builds(hla.EntropyVerify, st.floats(0, 2), st.floats(0.1, 1)),
    "thresholds": st.builds(hla.Thresholds, unit, st.floats(0.1, 1)),
}  # fmt: skip

NESTED = {"judge", "limited", "union", "block_verification"}
PLAIN |= {n: st.sampled_from(CASES[n].ladder) for n in RULES if n in CASES and n not in NESTED | set(PLAIN)}


def rules(tmp):
    judge = st.builds(hla.Judge, st.just(hla.Head.from_pretrained(tmp / "judge")), unit)
    plain = st.one_of(*PLAIN.values())

    def limited(inner):
        return st.builds(
            hla.Limited, inner, st.none() | counts, st.none() | st.tuples(ids, ids).filter(lambda x: x[0] != x[1]),
            st.lists(ids, max_size=4).map(tuple),
        )  # fmt: skip

    def union(inner):
        return st.lists(inner, min_size=1, max_size=3).filter(_one_kind).map(lambda each: hla.Union(tuple(each)))

    nested = st.recursive(plain | judge, lambda inner: limited(inner) | union(inner), max_leaves=4)
    return nested | st.just(hla.BlockVerification())


def _one_kind(rules):
    shared = [mode for mode in ("greedy", "sampling") if all(mode in rule.modes for rule in rules)]
    return bool(shared) and sum(rule.features is not None for rule in rules) < 2


def filters(tmp):
    companion, made = str(tmp / "companion"), hla.Profile.from_pretrained(tmp / "profile")
    settings = itertools.product(["full", "prefix", "off"], [False, True], [False, True])
    each = [hla.SVFilter(made, companion, *setting) for setting in settings]  # each loads its companion once
    return st.just(hla.VerifyAll()) | st.just(hla.Staged(companion)) | st.sampled_from(each)


@cache
def policies(tmp):
    def fit(rule, stop, filter):
        weighs = filter.joint and filter.lossless and stop is not None and stop.joint
        return not weighs and not (isinstance(rule, hla.BlockVerification) and filter.depends_on_token)

    parts = st.tuples(rules(tmp), st.none() | stops(tmp), filters(tmp)).filter(lambda x: fit(*x))
    return parts.map(lambda x: LossyPolicy(*x))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("saved"))


@pytest.mark.full
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_json_round_trip(saved, data):
    policy = data.draw(policies(saved))
    text = json.dumps(policy.to_dict())
    back = LossyPolicy.from_dict(json.loads(text))
    assert json.dumps(back.to_dict()) == text and back.rule == policy.rule and back.stop == policy.stop
    assert back.lossless == policy.lossless and back.filter == policy.filter and back == policy
    assert hla.as_policy(text) == policy and hla.as_policy(str(policy)) == policy


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))  # of 250 each
@settings(
    max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
@given(data=st.data())
def test_a_thousand_combinations_generate_and_stop(saved, part, data):
    """At an end token, and at the longest text; where the policy is lossless and decoding greedy, with the target's own text."""
    policy = data.draw(policies(saved))
    modes = policy.rule.modes
    sampling = modes == ("sampling",) or (len(modes) == 2 and data.draw(st.booleans()))
    lengths = data.draw(st.sampled_from([(5,), (3, 6), (4, 1, 7, 2)]))
    new = data.draw(st.integers(1, 10))
    inputs, ends = (
        tiny.prompts(lengths),
        data.draw(st.sampled_from([tiny.EOS, [3, 7, 11, 20, 31, 40, 52], tiny.NEVER_EMITTED])),
    )
    more = {"max_new_tokens": new, "eos_token_id": ends}
    if policy.stop is None:
        more["num_assistant_tokens"] = 4
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(policy is lossy|may differ|other sampling settings)")
        out = tiny.assisted(target(), inputs, draft(), policy, do_sample=sampling, top_k=0, **more)
    ended = ends if isinstance(ends, list) else [ends]
    for row, stats in zip(out.sequences[:, max(lengths) :].tolist(), out.speculation.rows, strict=True):
        text = row[: stats.num_new_tokens]
        assert 1 <= len(text) <= new
        assert not any(token in ended for token in text[:-1]), "it went on behind an end token"
        assert len(text) == new or text[-1] in ended, "it stopped too early"
        assert all(token == tiny.PAD for token in row[stats.num_new_tokens :])
    if not sampling and policy.lossless:
        assert torch.equal(out.sequences, tiny.greedy(target(), inputs, **more))


def test_no_rule_is_left_out():
    """A rule that is not in these strategies would never be combined."""
    assert set(PLAIN) | NESTED == set(RULES)
