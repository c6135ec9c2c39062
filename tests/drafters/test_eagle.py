"""EAGLE drafts what its networks draft without caches, in every family of targets, and the text is the target's whatever it drafts."""

import pytest
import torch
from support import eagle, small
from transformers import DynamicCache

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import CAUSAL, AttentionWindow
from hf_lossy_assist.models.facts import CACHE


NETWORKS = {
    "plain": {}, "norm before the residual": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "a norm for each": {"fc_norm": True}, "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"layers": 2}, "whole vocabulary": {"draft_vocabulary": None}, "qwen3": {"kind": "qwen3"}, "two states": {"target_layers": (2, 1)},
    "the target's embeddings": {"has_embeddings": False},
    "windows": {"layers": 2, "sights": (AttentionWindow(3, causal=True), CAUSAL)}, "a window of one": {"sights": (AttentionWindow(0, causal=True),)},
}  # fmt: skip


@pytest.mark.full(every=24)
@pytest.mark.nightly(every=8)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged(), small.ragged((0, 0))], ids=["one", "ragged", "even"])
@pytest.mark.parametrize("made", NETWORKS.values(), ids=NETWORKS)
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
    strict = target.generate(**inputs, assistant_model=drafter, lossy_policy="strict", **settings)
    assert strict.sequences.equal(target.generate(**inputs, **settings).sequences)


@pytest.mark.full
def test_statistics_stop_strings_and_streams(target):
    drafter, inputs = eagle.trained(target, small.ragged(), rounds=40), small.ragged()
    settings = {"max_new_tokens": 20, "do_sample": False}
    given = settings | {"assistant_model": drafter, "lossy_policy": "strict"}
    expected = target.generate(**inputs, **settings)
    out = target.generate(**inputs, return_dict_in_generate=True, **given)
    assert out.sequences.equal(expected)
    report = out.speculation
    assert [row.num_new_tokens for row in report.rows] == [20, 20, 20]
    assert all(accepted <= drafted for row in report.rows for drafted, accepted in row.steps)
    assert 0 < report.draft_acceptance_rate <= 1 and report.forwards["target"] < 20
    tokenizer = small.tokenizer()
    stopped = {"stop_strings": [tokenizer.decode(expected[0, -8])], "tokenizer": tokenizer}
    assert target.generate(**inputs, **given, **stopped).equal(target.generate(**inputs, **settings, **stopped))


@pytest.mark.full(every=2)
@pytest.mark.parametrize("tail", [1, 3])
def test_turns_of_a_chat(target, monkeypatch, tail):
    """The second turn goes on from the cache of the first, of which the drafter has seen nothing: to it the text begins there."""
    drafter, inputs = eagle.trained(target, small.one(), rounds=40), small.one()
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
