"""Staged speculation keeps the target's law: every draft and every verdict of the intermediate model, enumerated; and its caches
forget what was replaced."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch
from support import tiny
from support.blocks import draft_of
from support.sv_models import distance, laws

import hf_lossy_assist as hla
from hf_lossy_assist.batch.randomness import Randomness
from hf_lossy_assist.filters import base as staging
from hf_lossy_assist.round import Verdict


def outcomes(tokens, q, c):
    """Yield each outcome of strict acceptance of `tokens` by the laws c, by the formulas: (accepted, token, probability)."""
    alive = 1.0
    for i, x in enumerate(tokens):
        accept = min(1.0, float(c[i, x] / q[i, x]))
        residual = (c[i] - q[i]).clamp(min=0)
        if accept < 1:
            for y, share in enumerate((residual / residual.sum()).tolist()):
                yield i, y, alive * (1 - accept) * share
        alive *= accept
    for y, share in enumerate(c[len(tokens)].tolist()):
        yield len(tokens), y, alive * share


def output_law(q, c, p, monkeypatch):
    gamma, size = q.shape
    out = defaultdict(float)
    for drafted in itertools.product(range(size), repeat=gamma):
        chance = float(torch.stack([q[i, x] for i, x in enumerate(drafted)]).prod())
        for accepted, token, weight in outcomes(drafted, q, c):
            verdict = Verdict(torch.tensor([accepted]), torch.tensor([token]), torch.zeros(1, gamma, dtype=torch.bool))
            monkeypatch.setattr(staging, "accept", lambda rule, verified, randomness, verdict=verdict: verdict)
            draft = draft_of(torch.tensor([drafted]), torch.tensor([gamma]), q[None], True)
            selection = staging.Staged(None).select(draft, c[None], Randomness())
            count, tokens = int(selection.sent), selection.draft.tokens[0].tolist()
            # Then the target: strict acceptance of what is left, by its formula.
            for n, last, share in outcomes(tokens[:count], selection.draft.probs[0], p):
                out[(*tokens[:n], last)] += chance * weight * share
    return out


@pytest.mark.parametrize(("gamma", "size"), [(2, 3), pytest.param(3, 3, marks=pytest.mark.full)])
def test_the_distribution_is_the_targets(gamma, size, monkeypatch):
    random = np.random.default_rng(gamma + 10 * size)
    for _ in range(3):
        q, c, p = laws(random, gamma, size), laws(random, gamma + 1, size), laws(random, gamma + 1, size)
        out = output_law(q, c, p, monkeypatch)
        assert sum(out.values()) == pytest.approx(1.0, abs=1e-12)
        assert distance(out, p) < 1e-9


def test_a_refused_token_is_replaced_and_what_follows_it_is_left_out():
    """Greedy, V = 4: the companion says 1 2 3 0 where 1 0 3 was drafted."""
    c = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 0]]), 4).float()
    draft = draft_of(torch.tensor([[1, 0, 3]]), torch.tensor([3]), c[:, :3])
    selection = staging.Staged(None).select(draft, c, Randomness())
    assert selection.sent.tolist() == [2]
    assert selection.draft.tokens[:, :2].tolist() == [[1, 2]] and selection.replaced.tolist() == [1]
    assert draft.tokens.tolist() == [[1, 0, 3]], "the drafter's own tokens stay as they are"
    valid = selection.valid_prefix_lengths
    assert valid([10], [2]) == [9], "the replaced token was accepted: the draft has never seen it"
    assert valid([10], [1]) == [10], "it was not: the draft knows all that is left"


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", ("never", "always")), pytest.param("gemma3", ("rarely", "often"), marks=pytest.mark.full)],
)
def test_greedy_text_is_the_targets(name, kinds):
    target = tiny.shared(name)
    draft, companion = (tiny.draft_of(target, kind) for kind in kinds)
    for lengths in ((7,), (3, 9, 5)):
        inputs = tiny.prompts(lengths)
        policy = hla.LossyPolicy(stop=hla.Constant(4), filter=hla.Staged(companion))
        out = tiny.assisted(target, inputs, draft, policy)
        assert torch.equal(out.sequences, tiny.greedy(target, inputs))
        total = out.speculation.total()
        assert out.speculation.forwards["companion"] > 0
        if name == "llama":  # each round: the companion's correction, and the target's own token behind it
            assert total.num_accepted_draft_tokens == total.num_draft_tokens > 0


def test_filters_are_equal_where_their_companions_are():
    one, two = hla.Staged("one"), hla.Staged("two")
    assert one == hla.Staged("one") and hash(one) == hash(hla.Staged("one")) and one != two
    model = tiny.shared("llama")
    assert hla.Staged(model) == hla.Staged(model) != hla.Staged(tiny.noisy(model, 0.1))
    assert hla.LossyPolicy(filter=one) != hla.LossyPolicy(filter=two)
