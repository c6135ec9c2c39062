"""Proves that `generate` runs AutoJudge: against a slow version of it with plain forwards, by what its head reads, and beside other parts of a policy.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039), §3.3.
"""

import itertools
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from support import small, tiny
from support.judge_rounds import (
    BOTH,
    EVEN,
    ONE,
    POSITIONS,
    RAGGED,
    SPECS,
    Recorder,
    case_id,
    check_features,
    constant_head,
    draft_of,
    find_eos,
    foreign,
    make_judge,
    record_rounds,
    slow,
)
from support.refusals import refused
from support.slow_loop import assert_same, texts
from support.tiny import NEVER_EMITTED, NEW, assisted, greedy, prompts
from transformers import StoppingCriteria

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, AutoJudge, Constant, FeatureSpec, HeadConfig, HeadStop, LinearHead
from hf_lossy_assist.artifacts.features import FeatureTap


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


@pytest.fixture
def rounds(monkeypatch):
    """Every round of the calls in a test."""
    return record_rounds(monkeypatch)


@pytest.mark.parametrize(
    ("threshold", "window", "spec"),
    [
        (0.5, 5, BOTH),
        pytest.param(0.5, 5, FeatureSpec("target", "predicting"), marks=pytest.mark.full),
        pytest.param(0.7, 32, FeatureSpec("draft", "token"), marks=pytest.mark.full),
    ],
    ids=case_id,
)
def test_greedy_is_the_papers_loop(threshold, window, spec):
    """Tokens and all statistics of each row of a ragged batch, with an end token and without, and of a row alone."""
    target, draft, inputs = tiny.shared("llama"), draft_of("llama"), prompts(RAGGED)
    head, lossy = make_judge("llama", "rarely", spec), 0
    for eos in (NEVER_EMITTED, find_eos(target, RAGGED)) if window == 5 and spec == BOTH else (NEVER_EMITTED,):
        ones = [inputs["input_ids"][b : b + 1, -n:] for b, n in enumerate(RAGGED)]
        expected = [slow(target, draft, head, threshold, one, eos, window) for one in ones]
        out = assisted(target, inputs, draft, AutoJudge(head, threshold, window), eos_token_id=eos, max_new_tokens=16)
        assert texts(out, max(RAGGED)) == [text for text, _ in expected]
        assert_same(out.speculation.rows, [stats for _, stats in expected])
        assert not out.speculation.lossless and out.speculation.num_unchecked_tokens == 0
        lossy += out.speculation.num_lossy_accepts
        one = {key: value[3:] for key, value in inputs.items()}
        alone = assisted(target, one, draft, AutoJudge(head, threshold, window), eos_token_id=eos, max_new_tokens=16)
        assert texts(alone, 14) == [expected[3][0]]
        assert_same(alone.speculation.rows, [expected[3][1]])
    assert lossy > 2


# -- what the head reads -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", BOTH),
        *(pytest.param("llama", SPECS[n], marks=pytest.mark.full) for n in (5, 0, 3)),
        pytest.param("gpt2", BOTH, marks=pytest.mark.full),
    ],
    ids=case_id,
)
def test_features_are_those_of_plain_forwards(name, spec, rounds):
    """Prompts of one length, whose first block brings them along, and ragged ones; rows that end at different times."""
    target, draft = tiny.shared(name), draft_of(name)
    stops = [Constant(6), SVIP(h=0.6, max_draft=8)] if name == "llama" else [Constant(6)]
    eos = find_eos(target, RAGGED)
    lossy, seen = 0, Counter()
    for lengths, stop in itertools.product((EVEN, RAGGED), stops):
        rounds.clear()
        head = Recorder(make_judge(name, "rarely", spec))
        out = assisted(target, prompts(lengths), draft, AutoJudge(head, 0.5, stop=stop), eos_token_id=eos)
        assert check_features(rounds, head, target, draft) >= 15
        seen += out.speculation.total().steps
        lossy += out.speculation.num_lossy_accepts
        if isinstance(stop, SVIP):
            assert any(n < r.tokens.shape[1] for r in rounds for n in r.drafted), "no row stopped before another"
    assert lossy > 0 and len({n for _, n in seen}) > 2, "rounds of one kind prove little"


@pytest.mark.full
@pytest.mark.parametrize("position", POSITIONS)
def test_features_of_an_inner_layer_and_of_models_of_different_size(position, rounds):
    """The draft's numbers come first; `layer=1, norm=False` is Transformers' `hidden_states[1]`."""
    target, draft = tiny.shared("llama"), tiny.build("gpt2", seed=3, n_embd=16)
    spec = FeatureSpec("both", position, 1, False)
    head = LinearHead(HeadConfig(48, polarity="important", features=spec, threshold=0.5)).eval()
    with torch.no_grad():
        head.linear.weight *= 0.1
    recorder = Recorder(head)
    assisted(target, prompts(RAGGED), draft, AutoJudge(recorder, window=5), eos_token_id=NEVER_EMITTED)
    assert check_features(rounds, recorder, target, draft) >= 10


def test_features_where_the_draft_is_the_target_itself(rounds):
    """Two taps on one model; and a prompt of one token, which has nothing to bring along."""
    target = tiny.shared("llama")
    for lengths in ((1,), EVEN):
        rounds.clear()
        head = Recorder(make_judge("llama", "always", BOTH))
        out = assisted(target, prompts(lengths), target, AutoJudge(head, 0.5, window=4), eos_token_id=NEVER_EMITTED)
        assert check_features(rounds, head, target, target) > 10 and out.speculation.num_lossy_accepts == 0


GENERATORS = [(SPECS[2], {"prompt_lookup_num_tokens": 3}), (SPECS[3], {"assistant_early_exit": 1})]


@pytest.mark.full
@pytest.mark.parametrize(("spec", "settings"), [(BOTH, {}), *GENERATORS])
def test_features_of_a_hybrid_and_with_transformers_candidate_generators(spec, settings, rounds):
    """Early exit drafts with the target itself, whose forwards must not be taken for those that verify."""
    target, draft, name = tiny.build("llama", seed=4), None, "llama"
    if not settings:
        target, draft, name = tiny.shared("lfm2"), draft_of("lfm2"), "lfm2"
    head = Recorder(make_judge(name, "rarely", spec))
    more = {"max_new_tokens": 60, "eos_token_id": NEVER_EMITTED} | settings
    out = assisted(target, prompts(ONE), draft, AutoJudge(head, 0.5, window=4), **more)
    assert check_features(rounds, head, target, draft) >= 10 and 0 < out.speculation.num_lossy_accepts


def test_features_with_another_tokenizer(rounds):
    target, settings = small.llama(), foreign()
    head = Recorder(constant_head(0.2, "target", threshold=0.5))
    out = assisted(target, small.one(), None, AutoJudge(head, window=4), **settings)
    assert check_features(rounds, head, target, None) > 0 and out.speculation.num_lossy_accepts > 0
    zero = assisted(target, small.one(), None, AutoJudge(head, 0, 4), **settings)
    assert torch.equal(zero.sequences, greedy(target, small.one()))


def test_threshold_one_keeps_all():
    """Even where the head's sigmoid rounds to 1; and a head that always passes is the same as that."""
    target, draft = tiny.shared("llama"), draft_of("llama")
    outs = []
    for value, threshold in ((1.0, 1), (0.0, 1), (1e-9, 1e-6)):
        torch.manual_seed(3)
        policy = AutoJudge(constant_head(value), threshold, 7)
        out = assisted(target, prompts(RAGGED), draft, policy, do_sample=True, eos_token_id=NEVER_EMITTED)
        total = out.speculation.total()
        assert total.num_accepted_draft_tokens == total.num_draft_tokens > 0 and total.num_lossy_accepts > 0
        outs.append(out)
    assert all(torch.equal(outs[0].sequences, out.sequences) for out in outs[1:])


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "stop"), [*((spec, Constant(5)) for spec in SPECS[:4]), (BOTH, SVIP(h=0.6))], ids=case_id
)
def test_forwards(spec, stop, rounds):
    """One draft forward a token, one more a round where the draft's state at the token is read, and nothing else costs one."""
    target, draft = tiny.shared("llama"), draft_of("llama")
    for lengths in (ONE, RAGGED):
        rounds.clear()
        policy = AutoJudge(make_judge("llama", "rarely", spec), 0.5, stop=stop)
        out = assisted(target, prompts(lengths), draft, policy, eos_token_id=NEVER_EMITTED)
        drafts = [r.tokens.shape[1] for r in rounds if r.tokens.shape[1]]
        more = len(drafts) if spec.position == "token" and spec.reads("draft") else 0
        forwards = out.speculation.forwards
        assert forwards["draft"] == sum(drafts) + more and forwards["target"] == len(rounds)
        assert len(drafts) <= forwards["head"] <= len(rounds) and out.speculation.seconds["head"] > 0
        assert forwards.get("prefill", 0) == (2 if lengths == RAGGED else 0)
        assert set(forwards) <= {"draft", "target", "head", "prefill"}


def test_only_what_strict_rejects_is_lossy():
    """A perfect draft needs no judge, and no head is asked where nothing was drafted."""
    target, head = tiny.shared("llama"), Recorder(constant_head(0.1))
    for kind in ("always", "rarely"):
        draft = draft_of("llama", kind)
        out = assisted(target, prompts(RAGGED), draft, AutoJudge(head, 0.5, 6), eos_token_id=NEVER_EMITTED)
        assert (out.speculation.num_lossy_accepts == 0) == (kind == "always")
    head.shown.clear()
    out = assisted(target, prompts(ONE), draft_of("llama"), AutoJudge(head, 0.5), max_new_tokens=1)
    assert out.speculation.forwards.get("head", 0) == len(head.shown) == 0


@dataclass(frozen=True)
class Half(hla.VerifyFilter):
    """Sends half of what was drafted."""

    def select(self, draft, companion, randomness):
        return hla.Selection(draft, (draft.lengths + 1) // 2)


@pytest.mark.full
def test_with_other_stops_and_filters(rounds):
    """SVIP, SPRINTER's head as the stop, a rule alone, a filter: features stay right, and each part does its own."""
    target, draft, spec = tiny.shared("llama"), draft_of("llama"), BOTH
    doubt = LinearHead(HeadConfig(32)).eval()
    with torch.no_grad():
        doubt.linear.weight *= 2.0
    policies = {
        "rule alone": lambda head: hla.LossyPolicy(hla.Judge(head, 0.5)),
        "head": lambda head: head,
        "svip": lambda head: AutoJudge(head, 0.5, stop=SVIP()),
        "head stop": lambda head: AutoJudge(head, 0.5, stop=HeadStop(doubt, 0.5, 9)),
        "impatient": lambda head: AutoJudge(head, 0.5, stop=HeadStop(doubt, 0.5, 9, 0.0)),
        "filter": lambda head: hla.LossyPolicy(hla.Judge(head, 0.5), Constant(6), Half()),
    }
    for name, make in policies.items():
        rounds.clear()
        head = Recorder(make_judge("llama", "rarely", spec))
        out = assisted(target, prompts(RAGGED), draft, make(head), eos_token_id=NEVER_EMITTED)
        assert check_features(rounds, head, target, draft) >= 10, name
        longest = max(sent for sent, _ in out.speculation.total().steps)
        assert longest == {"rule alone": 5, "head": NEW - 1, "filter": 3}.get(name, longest)
        if "stop" in name:
            assert longest <= 9 and out.speculation.forwards["head"] > out.speculation.forwards["target"]
    settings = {"num_assistant_tokens": 4, "eos_token_id": NEVER_EMITTED}
    out = assisted(target, prompts(ONE), draft, AutoJudge(head, 0.5), **settings)
    assert max(sent for sent, _ in out.speculation.total().steps) == 4, "the call's own setting wins"


# -- refusals, and what a call leaves behind ------------------------------------------------------------------------------


def hooks(*models: Any) -> int:
    """Taps left on them. Transformers leaves hooks of its own, for `output_hidden_states`."""
    hooks = [hook for model in models for module in model.modules() for hook in module._forward_hooks.values()]
    return sum(isinstance(getattr(hook, "__self__", None), FeatureTap) for hook in hooks)


def test_a_head_that_reads_the_draft_needs_one():
    target = tiny.shared("llama")
    for model in ("draft", "both"):
        policy = AutoJudge(constant_head(0.5, model), 0.5)
        for settings, words in (
            (
                {"prompt_lookup_num_tokens": 3},
                "reads the.*draft.*target alone.*PromptLookup has none for it: pass an assis",
            ),
            ({}, "something to draft with"),
        ):
            refused(partial(assisted, target, prompts(ONE), None, policy, **settings), words)
        call = partial(assisted, small.llama(), small.one(), None, policy, **foreign())
        refused(call, "target alone.*target's tokenizer")
    assert hooks(target) == 0


def test_heads_of_other_models_are_refused():
    target, draft = tiny.shared("llama"), draft_of("llama")
    ours, other = map(hla.ModelIdentity.of, (target, tiny.build("llama", seed=3, num_hidden_layers=1)))
    deep = LinearHead(HeadConfig(32, polarity="important", features=FeatureSpec("target", layer=5, norm=False)))
    for words, head in (
        ("made for the target.*num_layers 1 there, 2 here", constant_head(0.5, target=other)),
        ("made for the draft.*num_layers 1 there, 2 here", constant_head(0.5, target=ours, draft=other)),
        ("layer 5 .* 2 blocks", deep),
        ("tokenizer of hash 000000", constant_head(0.5, tokenizer_hash="0" * 64)),
    ):
        policy = AutoJudge(head, 0.5)
        refused(lambda: assisted(target, prompts(ONE), draft, policy, tokenizer=small.tokenizer()), words)  # noqa: B023
    refused(lambda: assisted(target, prompts(ONE), draft, constant_head(0.5)), "names no threshold")
    assert hooks(target, draft) == 0
    fitting = AutoJudge(constant_head(0.5, target=ours, draft=ours), 0.5)
    assert assisted(target, prompts(ONE), draft, fitting).sequences.shape


def test_a_head_of_the_target_alone_goes_with_any_draft():
    """Its config records the draft that its labels were mined with, as `fit` writes it."""
    target, settings = small.llama(), foreign()
    other = tiny.build("llama", seed=3, num_hidden_layers=1)
    head = constant_head(0.2, "target", target=hla.ModelIdentity.of(target), draft=hla.ModelIdentity.of(other))
    with pytest.warns(UserWarning, match="the head's draft and this draft may differ: num_layers 1 there, 2 here"):
        out = assisted(target, small.one(), None, AutoJudge(head, 0.5, 4), **settings)
    assert out.sequences.shape == (1, 9 + NEW)


class Broken(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise RuntimeError("broken criterion")


@pytest.mark.full
@pytest.mark.parametrize(("spec", "sampled"), [(BOTH, False), (FeatureSpec("target"), True)], ids=case_id)
def test_nothing_stays_behind(spec, sampled):
    """No hook on either model, after a call and after one that raised; and heads can be trained on."""
    target, draft = tiny.build("llama"), tiny.noisy(tiny.shared("llama"), 0.3)
    head, doubt = make_judge("llama", "rarely", spec), LinearHead(HeadConfig(32))
    policy = AutoJudge(head, 0.5, stop=HeadStop(doubt, 0.5, 6))
    assisted(target, prompts(RAGGED), draft, policy, do_sample=sampled)
    assert hooks(target, draft) == 0
    with pytest.raises(RuntimeError, match="broken criterion"):
        assisted(target, prompts(RAGGED), draft, policy, stopping_criteria=[Broken()])
    assert hooks(target, draft) == 0
    for module in (head, doubt):
        assert not any(p.is_inference() for p in module.parameters())
        module.zero_grad()
        module(torch.randn(4, module.config.hidden_size)).sum().backward()
        assert module.linear.weight.grad.abs().sum() > 0
        module.zero_grad(set_to_none=True)
