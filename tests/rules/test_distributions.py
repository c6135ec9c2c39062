"""The probabilities that rules read are those of the plain formulas, worked out only where a rule can change anything."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support import formulas
from support.blocks import changed, decide, make_round, random_block
from support.rule_cases import CASES, GREEDY, SAMPLING

import hf_lossy_assist as hla
from hf_lossy_assist import Strict, tensors
from hf_lossy_assist.rules.distributions import Distributions
from hf_lossy_assist.rules.thresholds import ranks


SIZE = 3 * tensors.GROUP + 17  # more than one group, and a rest


def make_logits(name: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of target and draft, (12, SIZE) float32 each."""
    generator = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(12, SIZE, generator=generator) * 3 for _ in range(2))
    if name in ("bfloat16", "float16"):  # logits as such a model gives them: many are equal
        return p.to(getattr(torch, name)).float(), q.to(getattr(torch, name)).float()
    if name == "holes":
        p[:, ::3], q[:, ::2] = -math.inf, -math.inf
    if name == "equal":
        q = p.clone()
    if name == "one token":
        p[:] = -math.inf
        p[torch.arange(12), torch.arange(12) * 30] = torch.randn(12, generator=generator) * 20
    if name == "far":
        p, q = p * 60, q * 60  # most probabilities are 0 in float32
    if name == "flat":
        p[:] = 5.0
    return p, q


PLACES = ("plain", "bfloat16", "float16", "holes", "equal", "one token", "far", "flat")


def in_numpy(logits: torch.Tensor) -> np.ndarray:
    return logits.double().softmax(dim=-1).numpy()


@pytest.mark.parametrize("name", PLACES)
def test_entropy_and_top(name):
    logits, draft = make_logits(name)
    dists = Distributions(logits, draft.softmax(dim=-1))
    p = in_numpy(logits)
    entropy = np.array([formulas.entropy(row) for row in p])
    np.testing.assert_allclose(dists.entropy[:, 0], entropy, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dists.top[:, 0], p.max(axis=-1), rtol=1e-5)


@pytest.mark.parametrize("name", PLACES)
def test_ranks_are_places_of_a_stable_sort(name):
    logits, draft = make_logits(name)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    for tokens in (torch.randint(SIZE, (12, 1)), logits.argmax(-1, keepdim=True), logits.argmin(-1, keepdim=True)):
        expected = (order == tokens).float().argmax(dim=-1)
        assert ranks(Distributions(logits, draft.softmax(-1), tokens))[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("name", PLACES)
def test_the_gap_is_the_difference_of_logarithms(name):
    logits, draft = make_logits(name)
    tokens = torch.arange(12)[:, None] * 30
    found = Distributions(logits, draft.softmax(-1), tokens).gap
    p = logits.double().log_softmax(dim=-1)
    torch.testing.assert_close(found.double(), p.amax(-1, keepdim=True) - p.gather(-1, tokens), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("part", [1, 1 << 20])
def test_probabilities_of_tokens_and_of_places(part, monkeypatch):
    """The same numbers as those of `p`, bit by bit."""
    monkeypatch.setattr(tensors, "PART", part)
    block = random_block(0, 30, 4, SIZE)
    at = torch.randint(0, 5, (30,))
    assert torch.equal(block.p_at(at), block.p[torch.arange(30), at])
    assert torch.equal(block.p_at_tokens, block.at_tokens(block.p))


def test_places_are_those_that_their_numbers_say():
    block = random_block(0, 9, 4, SIZE)
    places = torch.tensor([0, 3, 4, 17, 35])
    for sampling in (True, False):
        block = changed(block, sampling=sampling)
        some, whole = Distributions.of(block, places), Distributions.of(block)
        for name in ("logits", "p", "q", "px", "qx", "tokens", "top", "entropy", "strict"):
            assert torch.equal(getattr(some, name), getattr(whole, name).flatten(0, 1)[places]), name


# -- who is asked about what ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listening(hla.Pointwise):
    """Accepts every other token, and writes down how many it was asked about."""

    sizes: list[int] = field(default_factory=list)
    accepts_all_strict: ClassVar[bool] = True

    def keeps(self, dists: Any) -> torch.Tensor:
        self.sizes.append(dists.px.numel())
        return dists.tokens % 2 == 0


@dataclass(frozen=True)
class Alone(Listening):
    accepts_all_strict: ClassVar[bool] = False


def block_in(mode: str, rows: int = 60) -> Any:
    block = random_block(3, rows, 4, 6)
    if mode == SAMPLING:
        return block
    half = torch.rand(rows, 4) < 0.5
    return changed(block, sampling=False, tokens=torch.where(half, block.argmax[:, :4], block.tokens))


@pytest.mark.parametrize("mode", [GREEDY, SAMPLING])
def test_a_formula_is_evaluated_where_strict_acceptance_rejects(mode):
    block = block_in(mode)
    for rule in (Listening(), Alone()):
        torch.manual_seed(0)
        verdict = decide(rule, block)
        open_ = block.is_sent
        if rule.accepts_all_strict:
            open_ = open_ & ~Strict().accepts(block, verdict.coins)
        assert 0 < sum(rule.sizes) == int(open_.sum()) < block.tokens.numel()


@pytest.mark.parametrize("mode", [GREEDY, SAMPLING])
def test_in_a_graph_it_is_evaluated_for_all(mode, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    rule, block = Listening(), block_in(mode)
    decide(rule, block)
    assert rule.sizes == [block.tokens.numel()]


def test_a_custom_function_sees_all_at_once():
    shapes = []
    block = block_in(GREEDY)
    decide(hla.OwnRule(lambda dists: shapes.append(dists.px.shape) or dists.px > 0.5), block)
    assert shapes == [(60, 4, 1)]


def test_where_nothing_is_rejected_no_formula_is_evaluated():
    block = random_block(0, 5, 3, 6)
    block = changed(block, sampling=False, tokens=block.argmax[:, :3], lengths=torch.full((5,), 3))
    rule = Listening()
    assert decide(rule, changed(block, sent=torch.full((5,), 3))).accepted.tolist() == [3] * 5 and rule.sizes == []


def test_a_limited_rule_asks_once_a_round():
    block, rule = block_in(GREEDY), Listening()
    run = hla.Limited(rule, per_request=2).start([torch.zeros(0, dtype=torch.int64)] * 60)
    for rounds in (1, 2, 3):
        decide(run, block)  # the same block twice: what the first one used up counts
        assert len(rule.sizes) == rounds


RULE_MODES = [(name, mode) for name, case in CASES.items() for mode in case.modes]


@pytest.mark.parametrize(("name", "mode"), RULE_MODES)
def test_no_rule_keeps_all_probabilities(name, mode):
    """(B, γ + 1, V) numbers more than the logits themselves."""
    for rule in CASES[name].ladder:
        block = changed(block_in(mode), planned=4)  # a fresh one
        decide(rule, block)
        assert "p" not in vars(block)


@pytest.mark.full(every=2)
@pytest.mark.parametrize(("name", "mode"), RULE_MODES)
def test_some_places_or_all_the_verdict_is_the_same(name, mode, monkeypatch):
    """As in a graph, and on devices where looking costs more than it saves."""
    for rule in CASES[name].ladder:
        verdicts = []
        for graph in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda graph=graph: graph)
                torch.manual_seed(1)
                verdicts.append(decide(rule, changed(block_in(mode), planned=4)))
        one, other = verdicts
        assert torch.equal(one.accepted, other.accepted) and torch.equal(one.lossy, other.lossy)
        assert torch.equal(one.token, other.token)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLING])
@pytest.mark.parametrize("name", ["top_k", "typical"])
def test_over_a_vocabulary_of_several_groups(name, mode, monkeypatch):
    """Ties and all, some rows at a time or all at once."""
    block = random_block(0, 40, 4, SIZE)
    logits = (block.logits * 4).round() / 4
    near = (logits[:, :4] + torch.randn(40, 4, SIZE) / 2).softmax(dim=-1)
    tokens = near.argmax(dim=-1)
    for rule in CASES[name].ladder:
        verdicts = []
        for part in (1, 1 << 20):
            monkeypatch.setattr(tensors, "PART", part)
            fresh = make_round(tokens, block.drafted, near, mode == SAMPLING, None, logits)
            torch.manual_seed(1)
            verdicts.append(decide(rule, fresh))
        for what in ("accepted", "token", "lossy"):
            assert torch.equal(getattr(verdicts[0], what), getattr(verdicts[1], what))
