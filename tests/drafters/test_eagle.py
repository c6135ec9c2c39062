"""EAGLE drafts what its networks draft without caches, in every family of targets. Stops, filters and heads work beside it as beside a draft model."""

from functools import cache

import numpy as np
import pytest
import torch
from support import eagle, heads, small, tiny
from support.rule_cases import BOTH, GREEDY, SAMPLING
from support.sv_models import bins, steep
from support.tiny import NEVER_EMITTED
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import CAUSAL, AttentionWindow
from hf_lossy_assist.models.facts import CACHE
from hf_lossy_assist.registry import list_entries


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


NETWORKS = {
    "plain": {}, "norm before the residual": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "a norm for each": {"fc_norm": True}, "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"layers": 2}, "qwen3": {"kind": "qwen3"}, "whole vocabulary": {"draft_vocabulary": None}, "two states": {"target_layers": (2, 1)},
    "the target's embeddings": {"has_embeddings": False},
    "windows": {"layers": 2, "sights": (AttentionWindow(3, causal=True), CAUSAL)}, "a window of one": {"sights": (AttentionWindow(0, causal=True),)},
}  # fmt: skip


@pytest.mark.parametrize(
    ("made", "inputs"),
    [
        pytest.param(
            made, (small.ragged(), small.one(), small.ragged((0, 0)))[n % 3], marks=[pytest.mark.full] * (n > 1)
        )
        for n, made in enumerate(NETWORKS.values())
    ],
    ids=NETWORKS,
)
def test_a_chain_is_that_of_the_network_without_caches(target, monkeypatch, made, inputs):
    """Also behind drafts of which some tokens were accepted: their places are the target's states'."""
    net = eagle.network(target, **made)
    drafter, seen = hla.Eagle3Drafter(net), eagle.watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(4))
    settings = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}
    out = target.generate(**inputs, drafter=drafter, lossy_policy=policy, **settings)
    assert len({count for row in out.speculation.rows for _, count in row.steps}) > 2, "some rounds accept a part"
    drafted = 0
    for texts, draft, limits, _ in seen:
        for b, text in enumerate(texts[: len(draft.tokens)]):
            count = int(draft.lengths[b])
            if limits[b] and count:
                logits, tokens = eagle.chain(target, net, text, count)
                assert draft.tokens[b, :count].tolist() == tokens.tolist()
                best = logits.max(dim=-1).values
                torch.testing.assert_close(draft.validity[b, :count].double(), best, rtol=1e-5, atol=1e-5)
                drafted += count
    assert drafted > 12


@pytest.mark.parametrize("tail", [3, pytest.param(1, marks=pytest.mark.full)])
def test_turns_of_a_chat(target, monkeypatch, tail):
    """The second turn goes on from the cache of the first, of which the drafter has seen nothing: to it the text begins there."""
    drafter, inputs = eagle.trained(target, small.one(), rounds=15), small.one()
    settings = {"max_new_tokens": 10, "do_sample": False}
    texts, seen = [], eagle.watched(monkeypatch)
    for given in ({}, {"assistant_model": drafter, "lossy_policy": "strict"}):
        cache = DynamicCache(config=target.config)
        first = target.generate(**inputs, **{CACHE: cache}, **settings, **given)
        more = torch.cat([first, torch.tensor([[5, 6, 7][:tail]])], dim=1)
        seen.clear()
        texts.append(target.generate(more, attention_mask=torch.ones_like(more), **{CACHE: cache}, **settings, **given))  # fmt: skip
    assert texts[0].equal(texts[1])
    drafted = [(each.texts[0], each.draft, each.begins[0]) for each in seen if int(each.draft.lengths[0])]
    assert drafted and all(begin > 9 for *_, begin in drafted)
    for text, draft, begin in drafted:
        tokens = eagle.chain(target, drafter.network, text, int(draft.lengths[0]), begin)[1]
        assert draft.tokens[0, : len(tokens)].tolist() == tokens.tolist()


def test_many_texts_that_begin_alike(target):
    """A draft model reads a common beginning once; here each prompt is read, for its states."""
    shared = small.one(50)["input_ids"][0].tolist()
    prompts = [[*shared, 5, 6], [*shared, 7], [9, 10, 11]]
    settings = {"max_new_tokens": 8, "do_sample": False}
    expected = [target.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    found = list(hla.generate_many(target, prompts, assistant_model=eagle.drafter(target), max_rows=2, **settings))
    assert [text.token_ids for text in sorted(found, key=lambda text: text.index)] == expected
    assert all(text.speculation.num_draft_tokens > 0 for text in found)


PROMPTS = (9, 1, 4, 14)


@cache
def trained_drafter():
    return eagle.trained(hla.enable(tiny.shared("llama")), tiny.prompts(PROMPTS), tiny.NEW, draft_vocabulary=70)


def write(policy, mode, **more):
    settings = {"eos_token_id": NEVER_EMITTED, "max_new_tokens": 12} | more
    if mode == SAMPLING:
        settings |= {"do_sample": True, "temperature": 1.5, "top_k": 0}
    drafts = trained_drafter()  # which draws random numbers where it is made
    torch.manual_seed(3)
    return tiny.assisted(tiny.shared("llama"), tiny.prompts(PROMPTS), drafts, policy, **settings)


@pytest.mark.full
def test_every_stop():
    """Each that can be made of its defaults, and one that holds others."""
    stops = [entry.make() for entry in list_entries("stop") if not entry.required]
    expected = write("strict", GREEDY).sequences
    for stop in (*stops, hla.AnyOf([hla.SVIP(), hla.Heuristic(3)])):
        assert write(stop, GREEDY).sequences.equal(expected), stop
        assert write(stop, SAMPLING).sequences.shape == expected.shape


@pytest.mark.parametrize("mode", BOTH)
def test_sv_with_a_companion(mode):
    """A draft model as the companion of an EAGLE-3 draft, as in SV's Figure 7."""
    target, companion = tiny.shared("llama"), tiny.draft_of(tiny.shared("llama"), "often")
    made = steep(target, trained_drafter(), companion, bins(np.random.default_rng(0)), batch=4)
    out = write(hla.SpeculativeVerification(made, companion, 4), mode)
    if mode == GREEDY:
        assert out.sequences.equal(write("strict", GREEDY).sequences)
    total = out.speculation.total()
    assert total.num_dropped_tokens > 0 and out.speculation.forwards["companion"] > 0
    other = steep(target, tiny.draft_of(target, "rarely"), companion, bins(np.random.default_rng(0)), batch=4)
    with pytest.raises(ValueError, match="was made for the draft") as error:
        write(hla.SpeculativeVerification(other, companion, 4), mode)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mode", BOTH)
def test_sprinter_with_a_head_on_the_drafters_states(mode):
    spec = heads.linear()
    assert write(hla.HeadStop(spec, 0.4, 4), GREEDY).sequences.equal(write("strict", GREEDY).sequences)
    total = write(hla.LossyPolicy(hla.AllButLast(), hla.HeadStop(spec, 0.4, 4)), mode).speculation.total()
    assert total.num_unchecked_tokens > 0
