"""Pairs whose agreement is set by construction: the benchmarks' stand-ins for trained models do what they say."""

import argparse

import device
import gpu
import pytest
import synthetic
import torch
from engine import arms_for, one_repeat

import hf_lossy_assist as hla


TINY = synthetic.Synthetic(
    "tiny", synthetic.Size("qwen3", 128, 64, 2, 4, 2, 32), synthetic.Size("qwen2", 96, 64, 1, 2, 1, 48),
    vocabulary=1000,
)  # fmt: skip
NEW = 120


@pytest.mark.full
@pytest.mark.parametrize(
    ("agreement", "dtype"),
    [(0.8, torch.float32), *(pytest.param(x, torch.bfloat16, marks=pytest.mark.nightly) for x in (0.0, 0.5, 1.0))],
)
def test_the_draft_agrees_as_often_as_it_was_made_to(agreement, dtype):
    target, draft = synthetic.models(TINY, agreement, dtype)
    ids = torch.tensor(synthetic.prompts(TINY, 8, 6))
    settings = {"max_new_tokens": NEW, "do_sample": False}
    given = settings | {"assistant_model": draft, "lossy_policy": "strict", "num_assistant_tokens": 1}
    out = hla.enable(target).generate(ids, return_dict_in_generate=True, **given)
    alone = type(target).generate(target, ids, **settings)
    assert torch.equal(out.sequences, alone)
    # No short cycle, in which a draft is always right or never.
    assert all(len(set(row)) == NEW for row in alone[:, 6:].tolist())
    drafted = out.speculation.summary()["num_draft_tokens"]
    error = (agreement * (1 - agreement) / drafted) ** 0.5
    assert drafted > 400 and abs(out.speculation.draft_acceptance_rate - agreement) <= 4 * error


def test_a_stop_that_looks_sees_where_the_draft_is_unsure():
    """SVIP drafts longer where the draft is right, and is right more often than a constant draft of the same cost."""
    target, draft = synthetic.models(TINY, 0.8, hesitates=1.0)
    logits = draft(torch.arange(TINY.vocabulary)[None]).logits[0].softmax(dim=-1)
    right = logits.argmax(dim=-1) == target(torch.arange(TINY.vocabulary)[None]).logits[0].argmax(dim=-1)
    top = logits.max(dim=-1).values
    assert right.float().mean() == pytest.approx(0.8, abs=0.002)
    assert top[right].min() > 0.9 and top[~right].max() < 0.9


def test_what_a_forward_reads():
    target, _ = synthetic.models(TINY, 0.5)
    matrices = [p for name, p in target.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    norms = [p for p in target.parameters() if p.dim() == 1]
    assert device.count_weight_bytes(target) == sum(p.numel() * 4 for p in [*matrices, *norms])
    # Tokens, k and v, layers, heads, width, bytes.
    assert device.count_cache_bytes(target, 10) == 10 * 2 * 2 * 2 * 32 * 4
    both = synthetic.bytes_needed(TINY, torch.float32)
    assert both == pytest.approx(sum(p.nbytes for m in synthetic.models(TINY, 0.5) for p in m.parameters()), rel=0.01)


def test_what_an_arm_had_to_read():
    """The bytes behind the limit of a table: those of each forward that the arm ran."""
    target, draft = synthetic.models(TINY, 1.0)
    pair = gpu.Pair("", hla.enable(target), draft, synthetic.tokenizer, synthetic.prompts(TINY, 2, 6), set())
    args = argparse.Namespace(device="cpu", gamma=3, batch_sizes=[1], max_new_tokens=12)
    arms = {arm.name: arm for arm in arms_for(pair.target, pair.draft, args)}
    one_repeat(
        [arms[name] for name in ("target", "assisted γ=3", "strict γ=3")], pair.tokenizer, pair.prompts, args,
        pair.ends,
    )  # fmt: skip
    of = [device.count_weight_bytes(model) + device.count_cache_bytes(model, 9) for model in (target, draft)]
    assert gpu.count_bytes(arms["target"], pair, 9) == 24 * of[0]
    assert gpu.count_bytes(arms["strict γ=3"], pair, 9) == 2 * (3 * of[0] + 9 * of[1])  # 4 tokens a round
    assert gpu.count_bytes(arms["assisted γ=3"], pair, 9) is None
    assert arms["strict γ=3"].texts == arms["target"].texts
