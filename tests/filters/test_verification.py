"""SV keeps the target's law: by exact enumeration of drafts, coins and corrections with the real filter, one row and two; the paper's own form does not.

The choice of tokens that a round verifies is the paper's loop.
"""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.blocks import draft_of
from support.sv_models import bins, distance, laws

from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.artifacts.profile_tables import Bins, Latency
from hf_lossy_assist.artifacts.sv_profile import Profile
from hf_lossy_assist.batch.randomness import Randomness
from hf_lossy_assist.filters.sv import SVFilter, acceptance, choose, similarity


ME = ModelIdentity("me", None, "llama", 1, 1, 1)


def latency(seconds, batch):
    return Latency(np.array([batch]), np.arange(len(seconds))[None], np.array([seconds]), *np.zeros((3, 1)))


def profile(of, seconds, batch, gamma):
    return Profile(of, latency(seconds, batch), gamma, np.ones(1), ME, ME, ME, "", {}, "")


def output_law(filter_, q, c, p):
    """Return for each row the probability of every outcome of a round: the tokens it commits, as a tuple."""
    batch, gamma, size = q.shape
    out = [defaultdict(float) for _ in range(batch)]
    for drafts in itertools.product(range(size), repeat=batch * gamma):
        tokens = torch.tensor(drafts).view(batch, gamma)
        chance = float(q.gather(-1, tokens[..., None]).prod())
        draft = draft_of(tokens, torch.full((batch,), gamma), q, True)
        selection = filter_.select(draft, c, Randomness())
        counts, would_verify = selection.sent.tolist(), selection.would_verify
        ratio = (draft.at_tokens(p) / draft.at_tokens(q)).clamp(max=1.0)
        for b in range(batch):
            alive = 1.0
            for i in range(counts[b] + 1):
                rejected = i < counts[b]
                weight = alive * (1 - float(ratio[b, i])) if rejected else alive
                law = p[b, i]
                if i < gamma and (rejected or would_verify is not None):
                    either = torch.minimum(p[b, i], q[b, i])
                    v = torch.ones(size, dtype=torch.bool)
                    if would_verify is not None:
                        v = would_verify(torch.full((batch,), i))[b]
                    law = law - v * either
                if weight > 0 and float(law.sum()) > 0:
                    for x, share in enumerate((law / law.sum()).tolist()):
                        out[b][(*tokens[b, :i].tolist(), x)] += chance * weight * share
                if rejected:
                    alive *= float(ratio[b, i])
    return out


SHAPES = [(1, 2, 3), (2, 1, 3), *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((1, 3, 3), (2, 2, 2)))]


def cases(batch, gamma, size, count=4):
    random = np.random.default_rng(batch + 10 * gamma + 100 * size)
    for _ in range(count):
        steps = random.random(batch * gamma) * random.choice([0.02, 0.2, 0.6])
        seconds = 1.0 + np.cumsum([0.0, *steps])
        q, c, p = (
            laws(random, batch, gamma, size), laws(random, batch, gamma, size), laws(random, batch, gamma + 1, size),
        )  # fmt: skip
        yield profile(bins(random), seconds, batch, gamma), q, c, p


@pytest.mark.parametrize(("batch", "gamma", "size"), SHAPES)
def test_the_distribution_is_the_targets(batch, gamma, size):
    """In both exact forms, with the corrections counted or not; the paper's own form has another one."""
    far = 0.0
    for made, q, c, p in cases(batch, gamma, size):
        for exact, corrections in itertools.product(("full", "prefix", "off"), (True, False)):
            filter_ = SVFilter(made, None, exact, corrections, fallback=False)
            for b, out in enumerate(output_law(filter_, q, c, p)):
                assert sum(out.values()) == pytest.approx(1.0, abs=1e-12)
                if exact == "off":
                    far = max(far, distance(out, p[b]))
                else:
                    assert distance(out, p[b]) < 1e-9, (exact, corrections)
    assert far > 0.01


def test_the_example_of_two_tokens():
    """p = (.9, .1), q = (.5, .5), and a companion for which only token 0 is worth verifying: (.95, .05) in the paper's form."""
    given = [[0.9, 0.1], [0.5, 0.5]], [[0.5, 0.5]], [[1.0, 0.0]]
    p, q, c = (torch.tensor([laws], dtype=torch.float64) for laws in given)
    half, counts = np.array([0.5]), np.ones((1, 2), dtype=np.int64)
    only = Bins(np.zeros(0), half[None], np.array([[0.0, 1.0]]), half, counts)
    made = profile(only, [1.0, 1.1], 1, 1)
    law = {}
    for exact in ("full", "prefix", "off"):
        (out,) = output_law(SVFilter(made, None, exact, fallback=False), q, c, p)
        law[exact] = [sum(chance for tokens, chance in out.items() if tokens[0] == x) for x in (0, 1)]
    assert law["off"] == pytest.approx([0.95, 0.05], abs=1e-12)
    assert law["full"] == pytest.approx([0.9, 0.1], abs=1e-12) == law["prefix"]


def test_s_and_a():
    q, c = torch.tensor([[[0.5, 0.3, 0.2]]]), torch.tensor([[[0.25, 0.25, 0.5]]])
    for x, a in ((0, 0.5), (1, 0.25 / 0.3), (2, 1.0)):
        draft = draft_of(torch.tensor([[x]]), torch.tensor([1]), q, True)
        assert similarity(draft, c).item() == pytest.approx(0.7)
        assert acceptance(draft, c).item() == pytest.approx(a)


LEVELS = (0.0, 0.1, 0.25, 0.5, 0.7, 0.9, 1.0)  # few, so that rows and tokens often tie


def grown(accept, seconds, sure):
    """Section 5 of the paper as it is written: add the token that adds most, from whichever row, while goodput rises."""
    counts, reach, total, sent = [0] * len(accept), [1.0] * len(accept), sure, 0
    while True:
        open_rows = [b for b, row in enumerate(accept) if counts[b] < len(row)]
        if not open_rows:
            return counts
        gains = {b: reach[b] * accept[b][counts[b]] for b in open_rows}
        best = max(open_rows, key=lambda b: (gains[b], -b))
        if not (total + gains[best]) / seconds[sent + 1] > total / seconds[sent]:
            return counts
        total, sent, reach[best] = total + gains[best], sent + 1, gains[best]
        counts[best] += 1


@st.composite
def weighed_rounds(draw):
    batch, gamma = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    accept = draw(st.lists(st.sampled_from(LEVELS), min_size=batch * gamma, max_size=batch * gamma))
    steps = draw(st.lists(st.sampled_from((0.0, 0.01, 0.1, 0.3)), min_size=batch * gamma, max_size=batch * gamma))
    sure = draw(st.sampled_from((0.0, float(batch), batch - 0.5)))
    return np.array(accept).reshape(batch, gamma), 1.0 + np.cumsum([0.0, *steps]), sure


@pytest.mark.full
@given(weighed_rounds())
def test_the_choice_is_the_papers_loop(case):
    accept, seconds, sure = case
    assert choose(accept, seconds, sure).counts.tolist() == grown(accept.tolist(), seconds, sure)


@given(weighed_rounds(), st.randoms(use_true_random=False))
def test_what_would_have_been_verified(case, random):
    accept, seconds, sure = case
    batch, gamma = accept.shape
    at = np.array([random.randrange(gamma) for _ in range(batch)])
    would = choose(accept, seconds, sure).would_verify(at, np.tile(LEVELS, (batch, 1)))
    for b in range(batch):
        for k, level in enumerate(LEVELS):
            other = accept.copy()
            other[b, at[b]] = level
            assert would[b, k] == (grown(other.tolist(), seconds, sure)[b] > at[b])


def test_hand_made_rounds():
    flat, steep = np.ones(7), 1.0 + np.arange(7.0)
    accept = np.array([[0.9, 0.9, 0.1], [0.5, 1.0, 1.0]])
    assert choose(accept, flat, 2.0).counts.tolist() == [3, 3]  # verifying costs nothing
    assert choose(accept, steep, 2.0).counts.tolist() == [0, 0]  # each token costs as much as a whole round
    assert choose(accept, 1.0 + 0.3 * np.arange(7.0), 2.0).counts.tolist() == [2, 0]
    assert choose(accept, steep, 0.0).counts.tolist() == [2, 0]  # the paper's form: something is always verified
    assert choose(np.zeros((2, 3)), flat, 2.0).counts.tolist() == [0, 0]


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_that_drafted_nothing(batch):
    assert choose(np.zeros((batch, 0)), np.ones(1), float(batch)).counts.tolist() == [0] * batch
