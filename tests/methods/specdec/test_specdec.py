"""Proves that the SpecDec++ stop runs the paper's loop: against a slow version of it with plain forwards, and by hand.

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths" (huggingface.co/papers/2405.19715).
"""

import math
from functools import cache
from typing import Any

import pytest
import torch
from support import slow_loop, tiny
from support.heads import draft_of, head_for
from support.refusals import refused

from hf_lossy_assist import FeatureSpec, HeadConfig, HeadStop, LinearHead, LossyPolicy, SpecDecPP, as_policy


TOKEN = FeatureSpec(position="token")


@cache
def confident_head(draft: Any) -> LinearHead:
    """A random head on the state that encodes a token; most of what it says is above a half, so that products last a while."""
    head = LinearHead(HeadConfig(draft.config.hidden_size, features=TOKEN, method="specdec")).eval()
    head.load_state_dict(head_for(draft).state_dict())
    with torch.no_grad():
        head.linear.bias += 4.0
    return head


def ruler() -> LinearHead:
    """A head on one number, x → sigmoid(x)."""
    head = LinearHead(HeadConfig(1, features=TOKEN)).eval()
    with torch.no_grad():
        head.linear.weight.fill_(1.0)
        head.linear.bias.zero_()
    return head


def answers(run, *probabilities: float) -> list[bool]:
    """Return the answers of a run whose head computes these, one for each row."""
    states = torch.tensor([[math.log(p / (1 - p))] for p in probabilities])
    return run(torch.zeros(len(probabilities), 1), (torch.zeros(len(probabilities), 4),), features=states).tolist()


def test_the_product_by_hand():
    """h = .7: .8, .8 · .5 = .4, .4 · .7 = .28: 1 − .28 > .7. The first state encodes the text's last token and is not counted."""
    stop = SpecDecPP(ruler(), 0.7).start(2)
    for _ in range(2):  # a round leaves nothing to the next
        assert stop.begin_round([0, 1]) == [20, 20]
        assert answers(stop, 0.01, 0.01) == [False, False]
        assert answers(stop, 0.8, 0.2) == [False, True]
        assert answers(stop, 0.5, 0.9) == [False, True]
        assert answers(stop, 0.7, 0.9) == [True, True]


def test_extremes():
    """A state that is no number stops, too."""
    stops = [SpecDecPP(ruler(), threshold).start(1) for threshold in (1.0, 0.0, 0.7)]
    for stop in stops:
        stop.begin_round([0])
        assert answers(stop, 0.5) == [False]
    never, always, broken = stops
    assert answers(never, 1e-6) == [False] and answers(never, 1e-6) == [False] and answers(never, 1e-30) == [False]
    assert answers(always, 0.999) == [True]
    assert broken(torch.zeros(1, 1), (torch.zeros(1, 4),), features=torch.tensor([[math.nan]])).tolist() == [True]


@pytest.mark.parametrize(("kind", "threshold"), [("often", 0.5), pytest.param("rarely", 0.8, marks=pytest.mark.full)])
def test_the_papers_loop(kind, threshold):
    """Greedy Algorithm 1 with forwards over the whole text."""
    target, draft, inputs, alive = tiny.shared("llama"), draft_of("llama", kind), tiny.prompts((9,)), []
    stop = SpecDecPP(confident_head(draft), threshold)

    def doubt(state, step, place):
        alive[place:] = [alive[place - 1] * float(stop.head(state)) if place else 1.0]
        return 1 - alive[place] > threshold

    def accept(drafted, choices, ids):
        return next((i for i, token in enumerate(drafted) if token != choices[i]), len(drafted))

    prompt = inputs["input_ids"]
    text, stats = slow_loop.write(target, draft, prompt, tiny.NEVER_EMITTED, stop.max_draft, tiny.NEW, accept, doubt)
    out = tiny.assisted(target, inputs, draft, stop, eos_token_id=tiny.NEVER_EMITTED)
    assert slow_loop.texts(out, 9) == [text] and len({length for length, _ in stats.steps}) > 2
    slow_loop.assert_same(out.speculation.rows, [stats])
    forwards = out.speculation.forwards
    assert forwards["draft"] == forwards["head"] == out.speculation.total().num_draft_tokens, "none more for the head"


def test_as_a_policy(tmp_path):
    head = confident_head(draft_of("llama"))
    policy = LossyPolicy(stop=SpecDecPP(head, 0.6, 9))
    policy.save_pretrained(tmp_path / "policy")
    assert policy.lossless and "**Lossless**" in (tmp_path / "policy" / "README.md").read_text()
    assert LossyPolicy.from_pretrained(tmp_path / "policy") == policy
    assert head.source == str(tmp_path / "policy" / "stop_head")
    assert policy != LossyPolicy(stop=SpecDecPP(head, 0.6, 8)) and policy.to_dict()["stop"]["name"] == "specdec"
    assert as_policy(head) == LossyPolicy.from_pretrained(tmp_path / "policy" / "stop_head")
    assert as_policy(head) == LossyPolicy(stop=SpecDecPP(head))
    assert SpecDecPP(head).with_longest(5) == SpecDecPP(head, max_draft=5)


def test_refused_in_one_line():
    run, scores = SpecDecPP(ruler()).start(1), (torch.zeros(1, 4),)
    for make, words, error in (
        (lambda: SpecDecPP("folder"), "SpecDecPP.head: expected Head", TypeError),
        (lambda: SpecDecPP(head_for(draft_of("llama"))), "that encodes a token; .*predicts the token", ValueError),
        (lambda: HeadStop(ruler()), "that predicts a token; .*at the token itself", ValueError),
        (lambda: SpecDecPP(LinearHead(HeadConfig(1, features=TOKEN, polarity="important"))), "important", ValueError),
        (lambda: SpecDecPP(ruler(), 1.5), "SpecDecPP.threshold", ValueError),
        (lambda: SpecDecPP(ruler(), max_draft=0), "SpecDecPP.max_draft", ValueError),
        (lambda: run(torch.zeros(1, 1), scores), "lossy_policy=…", ValueError),
    ):
        refused(make, words, error)
