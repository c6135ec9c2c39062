"""EAGLE-3 drafts what a network without caches drafts, and the text is the target's whatever it drafts."""

import pytest
import torch
from support import eagle, small

import hf_lossy_assist as hla


FLAGS = {
    "plain": {}, "norm before the residual": {"norm_before_residual": True}, "norm before fc": {"norm_before_fc": True},
    "a norm for each": {"fc_norm": True}, "3.1": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"layers": 2}, "whole vocabulary": {"kept": None}, "qwen3": {"kind": "qwen3"}, "two states": {"target_layers": (2, 1)},
    "the target's embeddings": {"own_embeddings": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


@pytest.mark.full(every=8)
@pytest.mark.nightly(every=2)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("inputs", [small.one(), small.ragged(), small.ragged((0, 0))], ids=["one", "ragged", "even"])
@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
def test_a_chain_is_the_networks_own_without_caches(target, monkeypatch, flags, inputs):
    """Also behind drafts of which some tokens were accepted: their places are the target's states'."""
    drafter, seen = eagle.drafter(target, **flags), eagle.watched(monkeypatch)
    policy = hla.LossyPolicy(hla.TopK(55), hla.Constant(4))
    out = target.generate(
        **inputs,
        drafter=drafter,
        lossy_policy=policy,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
    )
    accepted = {kept for row in out.speculation.rows for _, kept in row.steps}
    assert len(accepted) > 2, "some rounds accept a part"
    drafted = 0
    for texts, draft, limits, _ in seen:
        for b, text in enumerate(texts[: len(draft.tokens)]):
            count = int(draft.lengths[b])
            if limits[b] and count:
                logits, tokens = eagle.chain(target, drafter.network, text, count)
                assert draft.tokens[b, :count].tolist() == tokens.tolist()
                torch.testing.assert_close(
                    draft.validity[b, :count].double(), logits.max(dim=-1).values, rtol=1e-5, atol=1e-5
                )
                drafted += count
    assert drafted > 12


@pytest.mark.full(every=2)
@pytest.mark.parametrize("inputs", [small.one(), small.ragged((0, 3, 5, 1))], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "stop", [hla.Constant(4), hla.Constant(1), hla.SVIP(), hla.Heuristic(3), hla.DISCO()], ids=str
)
def test_greedy_is_the_target_alone(target, stop, inputs):
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(**inputs, **settings)
    assert target.generate(**inputs, drafter=eagle.drafter(target), lossy_policy=stop, **settings).equal(expected)


def test_as_assistant_model(target):
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(**small.one(), **settings)
    out = target.generate(**small.one(), assistant_model=eagle.drafter(target), lossy_policy="strict", **settings)
    assert out.equal(expected)
