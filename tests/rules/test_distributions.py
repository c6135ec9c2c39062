"""The probabilities that rules read are those of the plain formulas, worked out only where a rule can change anything."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from support import formulas
from support.blocks import changed, decide, make_round, outcome, random_block, same
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


def test_what_a_rule_reads_is_the_plain_formula():
    """Entropy, the highest probability, a token's gap to it in logarithms, and its rank in a stable sort."""
    for name in PLACES:
        logits, draft = make_logits(name)
        p = in_numpy(logits)
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        best, worst = logits.argmax(-1, keepdim=True), logits.argmin(-1, keepdim=True)
        for tokens in (torch.arange(12)[:, None] * 30, torch.randint(SIZE, (12, 1)), best, worst):
            dists = Distributions(logits, draft.softmax(dim=-1), tokens)
            entropy = np.array([formulas.entropy(row) for row in p])
            np.testing.assert_allclose(dists.entropy[:, 0], entropy, rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_allclose(dists.top[:, 0], p.max(axis=-1), rtol=1e-5, err_msg=name)
            log_p = logits.double().log_softmax(dim=-1)
            gap = log_p.amax(-1, keepdim=True) - log_p.gather(-1, tokens)
            torch.testing.assert_close(dists.gap.double(), gap, rtol=1e-5, atol=1e-4, msg=name)
            assert ranks(dists)[:, 0].tolist() == (order == tokens).float().argmax(dim=-1).tolist(), name


def test_probabilities_of_tokens_and_of_places(monkeypatch):
    """The same numbers as those of `p`, bit by bit."""
    for part in (1, 1 << 20):
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


def test_a_formula_is_evaluated_where_strict_acceptance_rejects_and_in_a_graph_for_all(monkeypatch):
    for mode, kind in itertools.product((GREEDY, SAMPLING), (Listening, Alone)):
        rule, block = kind(), block_in(mode)
        torch.manual_seed(0)
        verdict = decide(rule, block)
        open_ = block.is_sent
        if rule.accepts_all_strict:
            open_ = open_ & ~Strict().accepts(block, verdict.coins)
        assert 0 < sum(rule.sizes) == int(open_.sum()) < block.tokens.numel(), (mode, rule)
        rule.sizes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
            decide(rule, block_in(mode))
        assert rule.sizes == [block.tokens.numel()], (mode, rule)


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


def test_some_places_or_all_the_verdict_is_the_same(monkeypatch):
    """As in a graph, and on devices where looking costs more than it saves. No rule keeps p, (B, γ + 1, V)."""
    for mode, rule in ((mode, rule) for case in CASES.values() for mode in case.modes for rule in case.ladder):
        verdicts = []
        for graph in (False, True):
            block = changed(block_in(mode), planned=4)  # a fresh one
            with monkeypatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda graph=graph: graph)
                verdicts.append(outcome(rule, block))
            assert "p" not in vars(block) or graph, (mode, rule)
        assert same(*verdicts), (mode, rule)


def test_over_a_vocabulary_of_several_groups(monkeypatch):
    """Ties and all, some rows at a time or all at once."""
    block = random_block(0, 40, 4, SIZE)
    logits = (block.logits * 4).round() / 4
    near = (logits[:, :4] + torch.randn(40, 4, SIZE) / 2).softmax(dim=-1)
    for sampling, rule in itertools.product((False, True), (*CASES["top_k"].ladder, *CASES["typical"].ladder)):
        verdicts = []
        for part in (1, 1 << 20):
            monkeypatch.setattr(tensors, "PART", part)
            verdicts.append(outcome(rule, make_round(near.argmax(-1), block.drafted, near, sampling, None, logits)))
        assert same(*verdicts), (sampling, rule)
