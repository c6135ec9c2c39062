"""Grouped queries on a CPU: blocks on a cache of rows copy no keys and values, and their numbers stay the same."""

import contextvars

import pytest
import torch
from support import small
from transformers import MistralConfig, MistralForCausalLM
from transformers.integrations import sdpa_attention

from hf_lossy_assist.models.quirks import attention as few_heads
from hf_lossy_assist.models.row_model import RowModel


pytestmark = pytest.mark.skipif(
    few_heads._theirs is None or not few_heads._reads_few_heads(torch.float32),
    reason="this PyTorch or Transformers copies",
)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}


def blocks(model, rows=3):
    """Logits of a prompt and of two blocks of rows of different length, the second after a rollback."""
    ids = torch.randint(2, 50, (rows, 12), generator=torch.Generator().manual_seed(0))
    its = RowModel(model, rows, 40)
    its.feed(ids, [12 - b for b in range(rows)], keep=0)
    out = [its.feed(ids[:, :5], [5, 2, 4], keep=5)]
    its.rollback([13, 12, 11])
    out.append(its.feed(ids[:, :4], [4] * rows, keep=4))
    return out


@pytest.fixture
def copies(monkeypatch):
    """How often keys or values were copied for each head of queries."""
    seen, own = [], sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, n: seen.append(n) or own(states, n))
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("window", [None, 6])
def test_blocks_copy_nothing_and_say_the_same(window, dtype, copies, monkeypatch):
    torch.manual_seed(0)
    kind = MistralConfig(vocab_size=small.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=window, **SIZES)  # fmt: skip
    model = small.louder(MistralForCausalLM(kind).to(dtype).eval())
    ours = blocks(model)
    assert not copies
    monkeypatch.setattr(few_heads, "_chosen", few_heads._theirs)
    theirs = blocks(model)
    assert copies
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-10)


def test_other_forwards_choose_as_ever(copies):
    model = small.llama(**SIZES)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    blocks(model)
    model(torch.full((2, 6), 3), attention_mask=mask)
    assert copies
    assert sdpa_attention.use_gqa_in_sdpa is few_heads._theirs


def test_a_forward_of_another_thread_under_ours(copies):
    """Ours is under way in this context, theirs in one of its own."""
    model = small.llama(**SIZES)
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    other = contextvars.copy_context()

    def theirs(**_):
        assert sdpa_attention.use_gqa_in_sdpa is not few_heads._theirs
        other.run(model, torch.full((2, 6), 3), attention_mask=mask)
        return len(copies)

    assert few_heads._run_grouped(theirs) > 0


def test_models_with_a_head_of_keys_for_each_are_left_alone():
    model = small.llama(num_attention_heads=2, num_key_value_heads=2)
    assert few_heads.with_few_heads(model, model) is model
    eager = small.llama(**SIZES)
    eager.set_attn_implementation("eager")
    assert few_heads.with_few_heads(eager, eager) is eager
