"""Functions replaced while forwards run are restored by the last one, whatever happens in it; and what single quirks compute."""

import contextvars
import itertools
import threading
import types

import pytest
import tiny_models
import torch
from support import small
from transformers import MistralConfig, MistralForCausalLM
from transformers.integrations import sdpa_attention

from hf_lossy_assist.models import quirks
from hf_lossy_assist.models.patching import Forward, Patch, current, running
from hf_lossy_assist.models.quirks import patched_forward, patches_of
from hf_lossy_assist.models.row_model import RowModel


def plus_one(place) -> Patch:
    return Patch(place, "forward", lambda forward, original, x: original(x) + 1)


def places():
    """A method of the class, one that somebody has put on a module, a function of a file."""
    layer, changed, file = torch.nn.Identity(), torch.nn.Identity(), types.ModuleType("a_file")
    changed.forward, file.forward = lambda x: 10 * x, lambda x: 100 * x
    return [layer, changed, file]


def test_a_function_is_replaced_once_and_restored():
    for place, factor in zip(places(), (1, 10, 100), strict=True):
        before = dict(vars(place))
        with running(Forward(), [plus_one(place)]):
            assert place.forward(1) == factor + 1
            with running(Forward(), [plus_one(place)]):
                assert place.forward(1) == factor + 1
            assert place.forward(1) == factor + 1
            assert contextvars.Context().run(place.forward, 1) == factor, "in a forward of another thread"
            with running(Forward(), []):
                assert place.forward(1) == factor + 1, "a forward within another has its patches"
        assert vars(place) == before and place.forward(1) == factor and current() is None


def test_a_forward_without_the_patch_runs_the_function_itself():
    place = places()[2]

    def other():
        with running(Forward()):
            return place.forward(1)

    with running(Forward(), [plus_one(place)]):
        assert contextvars.Context().run(other) == 100


def test_an_error_leaves_nothing():
    """Also one while replacing: the third place has no such function."""
    for error, broken in ((ValueError, []), (KeyboardInterrupt, []), (AttributeError, [types.SimpleNamespace()])):
        layers = [torch.nn.Identity(), torch.nn.Identity()]
        with pytest.raises(error), running(Forward(), [plus_one(place) for place in [*layers, *broken]]):
            raise error
        assert not any("forward" in vars(layer) for layer in layers)
        with running(Forward(), [plus_one(layers[0])]):
            assert layers[0](1) == 2


@pytest.mark.parametrize("family", ["bloom", "qwen3_next"])
@torch.no_grad()
def test_a_family_is_whole_again_after_a_forward_that_fails(family):
    """ALiBi, a recurrence."""
    model = tiny_models.tiny_model(family, "causal", "eager", 0)
    patches = patches_of(model)
    before = [dict(vars(patch.owner)).get(patch.name) for patch in patches]
    rows = RowModel(model, 2, 20)
    rows.feed(torch.full((2, 3), 5), [3, 2], keep=0)
    with pytest.raises(IndexError):
        rows.feed(torch.full((2, 1), 10**6), [1, 1])
    assert patches and [dict(vars(patch.owner)).get(patch.name) for patch in patches] == before


def test_the_last_thread_restores():
    layer, begun, over, seen = torch.nn.Identity(), threading.Event(), threading.Event(), []

    def forward() -> None:
        with running(Forward(), [plus_one(layer)]):
            begun.set()
            assert over.wait(10)
            seen.append(layer(1))

    thread = threading.Thread(target=forward)
    with running(Forward(), [plus_one(layer)]):
        thread.start()
        assert begun.wait(10)
    assert layer(1) == 1 and "forward" in vars(layer)
    over.set()
    thread.join()
    assert seen == [2] and "forward" not in vars(layer)


reads_groups = pytest.mark.skipif(
    not hasattr(sdpa_attention, "use_gqa_in_sdpa") or not quirks.has_kernel_for_groups(torch.float32),
    reason="this PyTorch or Transformers copies",
)
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2}


def blocks(model, rows=3):
    """Logits of a prompt and of two blocks of rows of different length, the second after a rollback."""
    ids = torch.randint(2, 50, (rows, 12), generator=torch.Generator().manual_seed(0))
    batch = RowModel(model, rows, 40)
    batch.feed(ids, [12 - b for b in range(rows)], keep=0)
    out = [batch.feed(ids[:, :5], [5, 2, 4], keep=5)]
    batch.rollback([13, 12, 11])
    out.append(batch.feed(ids[:, :4], [4] * rows, keep=4))
    return out


@pytest.fixture
def copies(monkeypatch):
    """How often keys or values were copied for each head of queries."""
    seen, repeat = [], sdpa_attention.repeat_kv
    monkeypatch.setattr(sdpa_attention, "repeat_kv", lambda states, n: seen.append(n) or repeat(states, n))
    return seen


@reads_groups
@pytest.mark.parametrize("window, dtype", [(None, torch.float64), (6, torch.float32)])
def test_blocks_copy_nothing_and_say_the_same(window, dtype, copies, monkeypatch):
    torch.manual_seed(0)
    kind = MistralConfig(vocab_size=small.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, sliding_window=window, **SIZES)  # fmt: skip
    model = small.louder(MistralForCausalLM(kind).to(dtype).eval())
    without = blocks(model)
    assert not copies
    monkeypatch.setattr(quirks, "has_kernel_for_groups", lambda dtype: False)
    for a, b in zip(without, blocks(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 1e-10)
    assert copies


@reads_groups
def test_few_tokens_attend_with_the_heads_of_a_group_together(monkeypatch):
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda query, *args, **kwargs: seen.append(query.shape) or attend(query, *args, **kwargs),
    )
    for dtype, tokens in itertools.product((torch.float32, torch.bfloat16), (1, 3, quirks.FEW, quirks.FEW + 1)):
        query, key, value = torch.randn(3, 8, tokens, 16), torch.randn(3, 2, 9, 16), torch.randn(3, 2, 9, 16)
        mask = torch.rand(3, 1, tokens, 9) > 0.3
        mask[..., 0] = True
        given, how = [x.to(dtype) for x in (query, key, value)], {"attn_mask": mask, "enable_gqa": True, "scale": 0.3}
        expected = attend(*given, **how)
        seen.clear()
        with running(Forward(), patches_of(small.llama(**SIZES))):
            out = torch.nn.functional.scaled_dot_product_attention(*given, **how)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-2)
        assert seen == [(3, 2, 4 * tokens, 16) if tokens <= quirks.FEW else (3, 8, tokens, 16)], (dtype, tokens)


@reads_groups
def test_a_causal_token_with_grouped_heads_sees_what_it_saw():
    given = [torch.randn(2, heads, tokens, 16) for heads, tokens in ((8, 1), (2, 5), (2, 5))]
    expected = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    with running(Forward(), patches_of(small.llama(**SIZES))):
        for causal in ((None, 0.0, True), ()):
            out = torch.nn.functional.scaled_dot_product_attention(
                *given, *causal, enable_gqa=True, **{} if causal else {"is_causal": True}
            )
            torch.testing.assert_close(out, expected)


@reads_groups
def test_other_forwards_choose_as_ever(copies):
    """Also one of another thread, while ours is under way in this context."""
    model, before = small.llama(**SIZES), sdpa_attention.use_gqa_in_sdpa
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :2] = 0
    blocks(model)
    assert not copies and sdpa_attention.use_gqa_in_sdpa is before
    with running(Forward(), patches_of(model)):
        assert sdpa_attention.use_gqa_in_sdpa is not before
        contextvars.Context().run(model, torch.full((2, 6), 3), attention_mask=mask)
        assert len(copies) > 0


def test_models_with_a_head_of_keys_for_each_are_left_alone():
    eager = small.llama(**SIZES)
    eager.set_attn_implementation("eager")
    for model in (eager, small.llama(num_attention_heads=2, num_key_value_heads=2)):
        assert patches_of(model) == [] and patched_forward(model) is model
