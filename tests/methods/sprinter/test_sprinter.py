"""Proves that SPRINTER is its parts and runs the paper's loop: against a slow version of it with plain forwards, by hand, and by enumeration.

Zhong et al., "Speeding up Speculative Decoding via Sequential Approximate Verification" (huggingface.co/papers/2502.04557).
"""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from support import slow_loop, tiny
from support.distributions import Tables, V
from support.formulas import first_two
from support.heads import draft_of, head_for, sure
from support.refusals import refused
from support.slow_loop import assert_same, texts
from support.tiny import NEVER_EMITTED, NEW, assisted, greedy, prompts, some_eos
from transformers import StoppingCriteria, StoppingCriteriaList

import hf_lossy_assist as hla
from hf_lossy_assist import AllButLast, HeadConfig, HeadStop, LinearHead, LossyPolicy, as_policy
from hf_lossy_assist.drafters.model import AssistantRun


def Sprinter(head, threshold=0.5, max_draft=20, patience=1.0):  # patience 1: each row as it would be alone
    return hla.Sprinter(head, threshold, max_draft, patience)


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

RAGGED = (9, 1, 4, 14)
DRAFT = 0  # its place in SOURCES


# -- the paper's loop, slowly ---------------------------------------------------------------------------------------------

Doubt = Callable[[torch.Tensor, int, int], bool]  # (state that predicted the token, round, place in the draft)


def doubt_by(head: hla.Head, threshold: float) -> Doubt:
    def doubt(state: torch.Tensor, step: int, place: int) -> bool:
        value = float(head(state))
        assert abs(value - threshold) > 1e-5, "rounding could turn this choice: take another seed"
        return not value >= threshold

    return doubt


def paper(
    target: Any, draft: Any, doubt: Doubt, prompt: torch.Tensor, eos: int, cap: int = 20
) -> tuple[list[int], hla.RowStats]:
    """Algorithm 2 with q and p as points: keep all but the last; keep the last if it is the target's, and add the target's next
    token; else put the target's token in its place."""
    unchecked = 0

    def accept(drafted: list[int], choices: list[int], ids: torch.Tensor) -> int:
        nonlocal unchecked
        unchecked += max(len(drafted) - 1, 0)
        return len(drafted) - (drafted != [] and drafted[-1] != choices[len(drafted) - 1])

    text, stats = slow_loop.write(target, draft, prompt, eos, cap, NEW, accept, doubt)
    stats.num_unchecked_tokens = unchecked
    return text, stats


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "kind", "threshold", "cap"),
    [("llama", "often", 0.5, 20), ("llama", "rarely", 0.35, 3), ("gemma3", "often", 1.0, 20)],
)
def test_greedy_is_the_papers_loop(name, kind, threshold, cap):
    """Tokens and statistics; alone, and each row of a ragged batch (patience 1: no row depends on another)."""
    target, draft, inputs, end = tiny.shared(name), draft_of(name, kind), prompts(RAGGED), NEVER_EMITTED
    head, ones = head_for(draft), [inputs["input_ids"][b : b + 1, -n:] for b, n in enumerate(RAGGED)]
    for _ in range(2):
        expected = [paper(target, draft, doubt_by(head, threshold), one, end, cap) for one in ones]
        out = assisted(target, inputs, draft, Sprinter(head, threshold, cap), eos_token_id=end)
        assert texts(out, max(RAGGED)) == [text for text, _ in expected]
        assert_same(out.speculation.rows, [stats for _, stats in expected])
        alone = assisted(target, {"input_ids": ones[2]}, draft, Sprinter(head, threshold, cap), eos_token_id=end)
        assert texts(alone, RAGGED[2]) == [expected[2][0]]
        assert_same(alone.speculation.rows, [expected[2][1]])
        end = some_eos(torch.tensor([text for text, _ in expected]), 0) if end == NEVER_EMITTED else end


@pytest.mark.full
def test_an_end_token_inside_a_draft():
    """The draft ends with it, even where the head has no doubt, and it is the verified one: the target may refuse it."""
    target, draft, inputs = tiny.shared("llama"), draft_of("llama", "rarely"), prompts((9,))
    accepted, refusals, settings = 0, 0, {"max_new_tokens": 20, "do_sample": False, "eos_token_id": NEVER_EMITTED}
    for eos in set(draft.generate(**inputs, **settings)[0, 9:].tolist()):  # what the first round drafts
        text, stats = paper(target, draft, lambda *_: False, inputs["input_ids"], eos)
        out = assisted(target, inputs, draft, Sprinter(sure(0.5), 0.0), eos_token_id=eos)
        assert texts(out, 9) == [text]
        assert_same(out.speculation.rows, [stats])
        accepted += text[-1] == eos and stats.token_sources[-1] == DRAFT
        refusals += any(count < sent < 20 for sent, count in stats.steps)
    assert accepted > 0 and refusals > 0


def test_a_head_of_nan_doubts_everything():
    """V ≥ τ is what lets a draft go on (Algorithm 2), and NaN is not: a broken head must not accept all."""
    target, draft = tiny.shared("llama"), draft_of("llama")
    out = assisted(target, prompts(RAGGED), draft, Sprinter(sure(math.nan)), eos_token_id=NEVER_EMITTED)
    assert torch.equal(out.sequences, greedy(target, prompts(RAGGED), eos_token_id=NEVER_EMITTED))
    assert out.speculation.num_unchecked_tokens == 0


# -- patience -------------------------------------------------------------------------------------------------------------


class Scripted(LinearHead):
    """Doubts row r at its `plan[r]`-th token, whatever it is shown."""

    def __init__(self, plan: list[int]):
        super().__init__(HeadConfig(32))
        self.plan, self.rows, self.place = plan, [], 0

    def logit(self, features):
        self.place += 1
        return torch.tensor([-5.0 if self.place >= self.plan[row] else 5.0 for row in self.rows])


@pytest.fixture
def rounds(monkeypatch):
    """Record each round of a call with a `Scripted` head: the rows, their limits, and what they drafted."""
    propose, out = AssistantRun.propose, []

    def spy(self, rows, limits, randomness):
        self.stop.settings.head.rows, self.stop.settings.head.place = list(rows.row_id_list), 0
        draft = propose(self, rows, limits, randomness)
        out.append((list(rows.row_id_list), list(limits), draft.lengths.tolist()))
        return draft

    monkeypatch.setattr(AssistantRun, "propose", spy)
    return out


@pytest.mark.parametrize(
    ("plan", "patience"), [([2, 7, 1, 5, 3], 0.6), ([9, 2, 9, 9, 9], 0.2), ([3, 2], 0.0)], ids=str
)
def test_patience_ends_the_round(plan, patience, rounds):
    """The round ends with the token at which that share of the drafting rows has stopped (one row at least); each row is the
    paper's loop all the same, with the drafts that it was left."""
    target, draft, lengths = tiny.shared("llama"), draft_of("llama", "rarely"), (9, 1, 4, 14, 6)[: len(plan)]
    inputs = prompts(lengths)
    out = assisted(target, inputs, draft, Sprinter(Scripted(plan), 0.5, 8, patience), eos_token_id=NEVER_EMITTED)
    drafts = {row: [] for row in range(len(plan))}
    for rows, limits, drafted in rounds:
        ends = [min(plan[row], limit) for row, limit in zip(rows, limits, strict=True)]
        drafting = sorted(end for end in ends if end > 0)
        last = drafting[max(math.ceil(Fraction(str(patience)) * len(drafting)), 1) - 1] if drafting else 0
        assert drafted == [min(end, last) for end in ends], (ends, patience)
        for row, n in zip(rows, drafted, strict=True):
            drafts[row].append(n)
    for row, (text, stats) in enumerate(zip(texts(out, max(lengths)), out.speculation.rows, strict=True)):
        one = inputs["input_ids"][row : row + 1, -lengths[row] :]
        planned = lambda _, step, place, row=row: place + 1 >= drafts[row][step]  # noqa: E731
        expected = paper(target, draft, planned, one, NEVER_EMITTED)
        assert text == expected[0]
        assert_same([stats], [expected[1]])


@pytest.mark.parametrize("certain", [False, True], ids=["drawn", "certain"])
def test_distribution_by_enumeration(certain):
    """γ = 1: the target's. γ = 2: the first token is from q, the one behind it exactly from p. γ = 3: both are from q."""
    for seed in range(2):
        tables = Tables(seed, 4)
        p, q = tables.p, tables.q
        expected = {
            1: torch.stack([p[()][x] * p[x,] for x in range(V)]),
            2: torch.stack([q[()][x] * p[x,] for x in range(V)]),
            3: torch.stack([q[()][x] * q[x,] for x in range(V)]),
        }
        for gamma, law in expected.items():
            torch.testing.assert_close(first_two(AllButLast(), tables, gamma, certain), law, atol=1e-12, rtol=0)


class EndsWith(StoppingCriteria):
    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


def test_unseen_tokens_are_counted():
    """Accepted without those that were the last of their round; what a criterion cut off in the middle does not count."""
    target, draft, calls = tiny.shared("llama"), draft_of("llama"), []
    policy = Sprinter(head_for(draft), 0.4)
    for criteria in (StoppingCriteriaList(), StoppingCriteriaList([EndsWith(*range(4, 40))])):
        settings = {"stopping_criteria": criteria, "eos_token_id": NEVER_EMITTED}
        out = assisted(target, prompts(RAGGED), draft, policy, **settings)
        calls.append(out.speculation)
        for row in out.speculation.rows:
            assert row.num_unchecked_tokens == sum(min(n, max(sent - 1, 0)) * c for (sent, n), c in row.steps.items())
            assert row.num_lossy_accepts <= row.num_unchecked_tokens <= row.num_accepted_draft_tokens
    assert any(accepted < sent - 1 for sent, accepted in calls[1].total().steps), "no draft was cut off in its middle"
    merged = hla.SpeculationStats.merge(calls)
    assert merged.num_unchecked_tokens == sum(call.num_unchecked_tokens for call in calls) > 0
    first = calls[0]
    form = json.loads(json.dumps(first.to_dict(rows=True)))
    assert form["num_unchecked_tokens"] == first.num_unchecked_tokens == first.total().num_unchecked_tokens
    assert [row["num_unchecked_tokens"] for row in form["rows"]] == [row.num_unchecked_tokens for row in first.rows]
    assert form["lossless"] is False and form["forwards"]["head"] == form["forwards"]["draft"]
    share = f"{first.num_unchecked_tokens} ({first.num_unchecked_tokens / first.num_new_tokens:.1%} of the new tokens)"
    assert f"never checked by the target │ {share}" in " ".join(str(first).split())
    strict = assisted(target, prompts(RAGGED), draft).speculation
    assert "never checked" not in str(strict) and strict.to_dict()["num_unchecked_tokens"] == 0


# -- its forms ------------------------------------------------------------------------------------------------------------


def test_the_parts():
    head = sure(0.5)
    policy = hla.Sprinter(head)
    assert policy == LossyPolicy(AllButLast(), HeadStop(head, 0.5, 20, 0.0)) == as_policy(head) and not policy.lossless
    assert hash(policy) == hash(as_policy(head)) and hla.Sprinter(sure(0.5)) == policy != Sprinter(sure(0.4))
    assert policy.heads() == {"stop_head": head} and policy != Sprinter(head, 0.6)
    for settings, error in (
        ({"threshold": -0.1}, ValueError), ({"threshold": math.nan}, ValueError), ({"threshold": "0.5"}, TypeError),
        ({"max_draft": 0}, ValueError), ({"max_draft": 2.0}, TypeError), ({"patience": 1.5}, ValueError),
    ):  # fmt: skip
        refused(lambda settings=settings: Sprinter(head, **settings), f"HeadStop.{next(iter(settings))}", error)
    refused(lambda: Sprinter("org/head"), "expected Head, got", TypeError)
    specs = {"features": hla.FeatureSpec("target")}, {"features": hla.FeatureSpec(position="token")}
    for config in ({"polarity": "important"}, *specs):
        head = LinearHead(HeadConfig(32, **config))
        refused(lambda head=head: Sprinter(head), r"P\(acceptable\).*this head computes")
    refused(policy.to_dict, "never saved has no JSON form: head.save_pretrained")
    refused(lambda: as_policy("sprinter"), "the method sprinter takes head, ")
    refused(lambda: as_policy({"stop": "head"}), "the stop head takes head, ")
    assert as_policy({"rule": "all_but_last"}) == LossyPolicy(AllButLast())
