"""Proves number by number that AutoJudge's head reads in `generate` what plain forwards say.

Garipov et al., "AutoJudge: Judge Decoding Without Manual Annotation" (huggingface.co/papers/2504.20039), §3.3.
"""

import itertools
from collections import Counter

import pytest
import torch
from support import small, tiny
from support.judge_rounds import (
    BOTH,
    EVEN,
    ONE,
    POSITIONS,
    RAGGED,
    Recorder,
    case_id,
    check_features,
    constant_head,
    draft_of,
    find_eos,
    foreign,
    make_judge,
    record_rounds,
)
from support.tiny import NEVER_EMITTED, assisted, greedy, prompts

from hf_lossy_assist import SVIP, AutoJudge, Constant, FeatureSpec, HeadConfig, LinearHead


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


@pytest.fixture
def rounds(monkeypatch):
    """Every round of the calls in a test."""
    return record_rounds(monkeypatch)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("llama", FeatureSpec("both", "token")),
        pytest.param("llama", FeatureSpec("both", "predicting"), marks=pytest.mark.full),
        pytest.param("llama", FeatureSpec("draft", "token"), marks=pytest.mark.full),
        pytest.param("llama", FeatureSpec("target", "predicting"), marks=pytest.mark.full),
        pytest.param("gpt2", FeatureSpec("both", "token"), marks=pytest.mark.full),
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


@pytest.mark.full
def test_features_of_a_hybrid(rounds):
    target, draft = tiny.shared("lfm2"), draft_of("lfm2")
    head = Recorder(make_judge("lfm2", "rarely", BOTH))
    assisted(target, prompts((14,)), draft, AutoJudge(head, 0.5, window=5), eos_token_id=NEVER_EMITTED)
    assert check_features(rounds, head, target, draft) >= 10


@pytest.mark.full
@pytest.mark.parametrize(
    ("position", "settings"),
    [("token", {"prompt_lookup_num_tokens": 3}), ("predicting", {"assistant_early_exit": 1})],
)
def test_features_with_transformers_candidate_generators(position, settings, rounds):
    """Early exit drafts with the target itself, whose forwards must not be taken for those that verify."""
    target = tiny.build("llama", seed=4)
    head = Recorder(make_judge("llama", "rarely", FeatureSpec("target", position)))
    out = assisted(
        target,
        prompts(ONE),
        None,
        AutoJudge(head, 0.5, window=4),
        max_new_tokens=60,
        eos_token_id=NEVER_EMITTED,
        **settings,
    )
    assert check_features(rounds, head, target, None) >= 10
    assert 0 < out.speculation.num_lossy_accepts


def test_features_with_another_tokenizer(rounds):
    target, settings = small.llama(), foreign()
    head = Recorder(constant_head(0.2, "target", threshold=0.5))
    out = assisted(target, small.one(), None, AutoJudge(head, window=4), **settings)
    assert check_features(rounds, head, target, None) > 0 and out.speculation.num_lossy_accepts > 0
    zero = assisted(target, small.one(), None, AutoJudge(head, 0, 4), **settings)
    assert torch.equal(zero.sequences, greedy(target, small.one()))
