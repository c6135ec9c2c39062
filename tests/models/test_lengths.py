"""Proves that what depends on a text's length in other ways than by rotary frequencies, and biases by places (ALiBi), are right in batches, or
refused by name.
"""

import copy
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from support import tiny
from support.many import alone_on_copy
from support.tiny import NEVER_EMITTED, assisted, prompts, some_eos

from hf_lossy_assist.models.probe import why_not_rows
from hf_lossy_assist.models.row_model import RowModel


STEP = 10  # tokens of one attention temperature; the texts go through five of them
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": STEP, "mscale": 1.0,
}  # fmt: skip


def llama4() -> Any:
    """Temperatures by the cache's length in every second layer, chunks of 8 tokens in the others."""
    shape = {"head_dim": 8, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 8}
    temperature = {"no_rope_layers": [1, 0], "floor_scale": STEP, "attn_scale": 2.0}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**tiny.DECODER | shape | temperature))


def ministral3() -> Any:
    """Temperatures by `position_ids`, which are each row's own."""
    yarn = YARN | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return transformers.Ministral3ForCausalLM(
        transformers.Ministral3Config(**tiny.DECODER | {"head_dim": 8, "rope_parameters": yarn})
    )


@cache
def build(name: str) -> Any:
    torch.manual_seed(0)
    model = {"llama4": llama4, "ministral3": ministral3}[name]().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if "experts" in path:  # made of what the memory held
                parameter.normal_(std=0.1)
            elif parameter.dim() > 1:
                parameter.mul_(3.0)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight * 6.0)
    return model


@pytest.mark.full
@pytest.mark.parametrize("name, kind, gamma", [("llama4", "often", 5), ("ministral3", "never", 2)])
def test_attention_temperature(name, kind, gamma):
    model = build(name)
    for lengths in ((9,), (9, 1, 20, 14)):
        inputs = prompts(lengths)
        pairs = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        wanted = [alone_on_copy(model, ids[mask.bool()]) for ids, mask in pairs]
        assert len(set(sum(wanted, []))) > 6, "texts this monotonous prove nothing"
        policy = {"stop": {"name": "constant", "gamma": gamma}}
        draft = tiny.draft_of(model, kind)
        out = assisted(model, inputs, draft, policy, max_new_tokens=len(wanted[0]), eos_token_id=NEVER_EMITTED)
        assert out.sequences[:, max(lengths) :].tolist() == wanted, lengths


@pytest.mark.full
@tiny.peft_warns
def test_an_adapter_that_is_put_in_between_two_calls_is_seen():
    """Temperatures are put on Llama 4's queries, which an adapter makes anew; what was found at the first call went past it."""
    texts = []
    for called in (False, True):
        model = copy.deepcopy(build("llama4")).double()
        draft, inputs = tiny.draft_of(model, "often"), prompts((9, 1, 14))
        if called:
            assisted(model, inputs, draft, max_new_tokens=2)
        adapted = tiny.lora(model, seed=3)
        settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": NEVER_EMITTED}
        texts.append(
            adapted.generate(**inputs, **settings, assistant_model=draft, lossy_policy="strict")
            if called
            else [alone_on_copy(adapted, ids[mask.bool()]) for ids, mask in zip(*inputs.values(), strict=True)]
        )
    assert texts[1][:, 14:].tolist() == [text[:20] for text in texts[0]]


@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3", marks=pytest.mark.full)])
def test_windows_of_models_that_need_not_have_one(name):
    """The other tested models with windows, and chunks, are built with short ones in all tests (`tiny.WINDOW`, `llama4`)."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "max_window_layers": 1}
    model = tiny.build(name, use_sliding_window=True, sliding_window=tiny.WINDOW, **kinds)
    for lengths in ((14,), (9, 1, 4, 14)):
        expected = tiny.greedy(model, prompts(lengths), eos_token_id=NEVER_EMITTED)
        out = assisted(model, prompts(lengths), tiny.draft_of(model, "often"), eos_token_id=NEVER_EMITTED)
        assert torch.equal(out.sequences, expected), lengths
    wide = tiny.build(name, use_sliding_window=True, sliding_window=200, **kinds)
    assert not torch.equal(tiny.greedy(wide, prompts(lengths), eos_token_id=NEVER_EMITTED), expected)


@torch.no_grad()
def test_rows_in_several_steps_of_temperature():
    """Rows that lie three steps apart, blocks that cross a step: the logits of each row alone; no hook is left behind."""
    model, held = build("llama4"), [33, 2, 18]
    texts = torch.randint(4, tiny.VOCABULARY, (3, 40))
    rows = RowModel(model, 3, 64)
    rows.feed(texts[:, :33], held, keep=0)
    blocks = torch.stack([text[n : n + 5] for text, n in zip(texts, held, strict=True)])
    got = rows.feed(blocks, [5] * 3)
    for row, text, n in zip(got, texts, held, strict=True):
        torch.testing.assert_close(row, model(text[None, : n + 5]).logits[0, n:], atol=1e-3, rtol=1e-4)
    assert not any(module._forward_hooks for module in model.modules())


def test_targets_that_depend_on_the_length_are_refused():
    tiny_bird = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    bird = transformers.BigBirdConfig(**tiny_bird | {"intermediate_size": 64, "is_decoder": True, "block_size": 4})
    sparse = transformers.BigBirdForCausalLM(bird).eval()
    shape = {name: value for name, value in tiny.DECODER.items() if name not in ("intermediate_size", "pad_token_id")}
    moshi = transformers.MoshiForCausalLM(
        transformers.MoshiConfig(**shape | {"ffn_dim": 64, "sliding_window": 8, "head_dim": 8})
    ).eval()
    doge = tiny_models.tiny_model("doge", "causal", "eager")
    for model, line in (
        (doge, "DogeForCausalLM .* keeps 8 tokens in view by a top-k"),
        (moshi, "MoshiForCausalLM .* has a sliding window of 8 in its cache and none in its attention mask"),
    ):
        with pytest.raises(ValueError, match=f"^{line}[^\n]*: leave lossy_policy out$"):
            assisted(model, prompts((9,)), copy.deepcopy(model))
        assert why_not_rows(model) is not None
    assert "by the prompt's length (block_sparse)" in why_not_rows(sparse)


RAGGED = (9, 1, 4, 14)
NEVER = {"eos_token_id": tiny.NEVER_EMITTED, "use_cache": True}
COUNTING = ["bart", "roformer", "gpt_neo", "inkling_text"]  # places by the cache's length
ALIBI = ["bloom", "mpt", "falcon+alibi"]
SEEDS = {"mpt": 1}  # whose texts vary and decide by more than rounding


@cache
def model_of(name, **changes):
    attention = "sdpa" if name == "falcon+alibi" else "eager"
    model = tiny_models.tiny_model(name, "causal", attention, SEEDS.get(name, 0), **changes)
    # Their softmax in float32 makes −inf of a mask in float64, and NaN of a padding token's row.
    return model if name in ("bloom", "mpt") else model.double()


@cache
def draft_of(name, kind):
    return tiny.draft_of(model_of(name), kind)


@cache
def reference(name, eos):
    return tiny.greedy(model_of(name), tiny.prompts(RAGGED), **NEVER | {"eos_token_id": eos})


def constant(gamma):
    return {"stop": {"name": "constant", "gamma": gamma}}


@pytest.mark.full
@pytest.mark.parametrize("name", ALIBI)
def test_ragged_batches_write_the_text_of_generate(name):
    model, inputs, whole = model_of(name), tiny.prompts(RAGGED), reference(name, tiny.NEVER_EMITTED)
    assert why_not_rows(model) is None
    assert len(set(whole[:, max(RAGGED) :].flatten().tolist())) > 8, "texts this monotonous prove nothing"
    end = some_eos(whole, max(RAGGED))
    ended = reference(name, end)
    assert len({int((row != tiny.PAD).sum()) for row in ended[:, max(RAGGED) :]}) > 1, "no row ends before the others"
    rates = []
    for kind, gammas in (("often", (1, 4, 9, 12)), ("rarely", (6,)), ("never", (2, 5))):
        for gamma in gammas:
            eos, wanted = ((tiny.NEVER_EMITTED, whole), (end, ended))[gamma % 2]
            given = NEVER | {"eos_token_id": eos}
            out = tiny.assisted(model, inputs, draft_of(name, kind), constant(gamma), **given)
            assert torch.equal(out.sequences, wanted), (kind, gamma)
            rates.append(out.speculation.draft_acceptance_rate)
    assert 0.1 < rates[1] < 1.0 and rates[-1] == 0.0


def test_places_by_the_length_of_the_cache_have_no_rows():
    for name in COUNTING:
        assert why_not_rows(tiny_models.tiny_model(name, "causal", "eager")) is not None


def masked(*rows):
    mask = torch.tensor([[int(c == "x") for c in row] for row in rows])
    ids = torch.randint(4, 90, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", ["bloom", pytest.param("falcon+alibi", marks=pytest.mark.full)])
def test_holes(name):
    """Biases by the cache's length count hidden tokens between others."""
    model, draft = model_of(name), draft_of(name, "often")
    one, several = masked("xx.x..xxxx"), masked("xxx.xx.xxx", "...xxxxxxx", "..x.x...xx")
    for inputs in (one, several):
        if name == "bloom" and inputs is several:
            with pytest.raises(ValueError, match="attention_mask hides tokens between others"):
                tiny.assisted(model, inputs, draft, **NEVER)
            continue
        wanted = tiny.greedy(model, inputs, **NEVER)
        assert torch.equal(tiny.assisted(model, inputs, draft, constant(4), **NEVER).sequences, wanted)
