"""Caches, positions and other inputs that a caller passes beside the prompt: used as they are meant, or refused by name in one line."""

import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from support import small, tiny
from support.tiny import cache_of
from transformers import ErnieConfig, ErnieForCausalLM, GenerationMixin, MambaConfig
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, QuantizedLayer, StaticCache
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

import hf_lossy_assist as hla
from hf_lossy_assist.models.facts import CACHE, CACHE_NAMES, passed_as


class Kept(QuantizedLayer):
    """A quantised layer whose quantisation loses nothing, so that only its `crop` is at fault."""

    def _quantize(self, tensor, axis):
        return tensor.clone()

    def _dequantize(self, tensor):
        return tensor


def filled(cache, model=None, rows=1):
    with torch.no_grad():
        (model or tiny.shared("llama"))(torch.arange(4, 9).repeat(rows, 1), **{CACHE: cache})
    return cache


def call(**settings):
    model = hla.enable(tiny.build("llama"))
    given = {"input_ids": torch.arange(4, 13)[None], "lossy_policy": "strict", "max_new_tokens": 4, "do_sample": False}
    return model.generate(**given | {"assistant_model": model} | settings)


def offloaded():
    cache = filled(DynamicCache())
    cache.offloading = True
    return cache


BY_RUNNER = {"lossy_policy": None, "assistant_model": None}
BY_RUNNER |= {"custom_generate": hla.Runner("strict", tiny.shared("llama"))}
CACHES = {
    "quantised": (lambda: filled(Cache(layers=[Kept(), Kept()])), {}, r"a Cache cannot be copied into rows \(it has Kept\): leave it out$"),
    "of states alone": (lambda: DynamicCache(config=MambaConfig(num_hidden_layers=2)), {}, r"\(it counts no tokens\)"),
    "static": (lambda: filled(StaticCache(tiny.shared("llama").config, max_cache_len=40)), {}, r"\(it has StaticLayer\)"),
    "offloaded": (offloaded, {}, r"\(it is offloaded\)"),
    "of an encoder-decoder": (lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()), {}, "only a decoder's"),
    "of two rows": (lambda: filled(DynamicCache(), rows=2), {}, "holds 2 rows, input_ids has 1"),
    "of a deeper model": (lambda: filled(DynamicCache(), tiny.build("llama", num_hidden_layers=3)), {}, "it has other layers than the target"),
    "of the whole text": (lambda: filled(DynamicCache()), {"input_ids": torch.arange(4, 9)[None]}, "holds 5 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("runner", [False, True], ids=["enabled", "runner"])
def test_a_cache_that_cannot_serve_is_refused_by_what_it_is(runner):
    for cache, settings, line in CACHES.values():
        with pytest.raises(ValueError, match=rf"^{CACHE}[^\n]*{line}[^\n]*$"):
            call(**{CACHE: cache()}, **settings, **BY_RUNNER if runner else {})


def test_an_encoder_decoder_goes_on_from_no_cache():
    model, ids = hla.enable(tiny.build("t5")), torch.arange(4, 13)[None]
    two = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with pytest.raises(ValueError, match=rf"{CACHE}=… is for rows: leave it out, or lossy_policy$"):
        model.generate(ids, **{CACHE: two}, assistant_model=tiny.shared("t5"), lossy_policy="strict", max_new_tokens=4)


def test_an_input_with_an_entry_for_each_token_is_refused_where_nobody_says_how_it_goes_on():
    """ERNIE's task types."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ErnieConfig(**tiny.COMMON | sizes, is_decoder=True, use_task_id=True)
    model = hla.enable(ErnieForCausalLM(config).eval())
    given = {"task_type_ids": torch.ones(1, 9, dtype=torch.long), "input_ids": torch.arange(4, 13)[None]}
    for cache in ({}, {CACHE: DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"^lossy_policy[^\n]*task_type_ids[^\n]*$"):
            model.generate(**given, **cache, assistant_model=model, lossy_policy="strict", max_new_tokens=3)


def test_encoder_outputs_serve_beside_the_ids_that_a_draft_reads():
    model, prompt = tiny.shared("t5"), torch.arange(4, 14)[None]
    with torch.no_grad():
        encoded = {"encoder_outputs": model.get_encoder()(prompt)}
    draft = tiny.draft_of(model, "often")
    out = tiny.assisted(model, {"input_ids": prompt} | encoded, draft)
    assert torch.equal(out.sequences, tiny.greedy(model, {"input_ids": prompt}))
    assert out.speculation.draft_acceptance_rate > 0.3
    with pytest.raises(ValueError, match="encoder_outputs=… is for rows: leave it out"):
        tiny.assisted(model, encoded, draft)


@pytest.mark.parametrize("pads", [0, 3])
def test_positions_are_refused_unless_the_mask_implies_them(pads):
    """By the runner itself, too."""
    mask = torch.tensor([[0] * pads + [1] * (9 - pads)])
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = call(attention_mask=mask, **BY_RUNNER)
    for way in (BY_RUNNER, {}):
        assert torch.equal(call(attention_mask=mask, position_ids=positions, **way), expected)
        for given in (positions + 7, positions.flip(1)):
            with pytest.raises(ValueError, match=r"^lossy_policy works positions out[^\n]*position_ids[^\n]*$"):
                call(attention_mask=mask, position_ids=given, **way)


IDS = torch.arange(4, 13)[None]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
OLD = "past_key_values"


def test_the_name_is_what_models_layers_and_outputs_call_it():
    takers = [LlamaAttention, LlamaDecoderLayer, Qwen3Attention, Qwen3DecoderLayer]
    takers = [kind.forward for kind in takers] + [type(tiny.shared(name)).forward for name in tiny.ARCHITECTURES]
    for taker in (*takers, GenerationMixin.prepare_inputs_for_generation):
        assert CACHE in inspect.signature(taker).parameters, taker
    assert CACHE in {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    assert CACHE in tiny.shared("llama")(IDS)
    for path in Path(hla.__file__).parent.rglob("*.py"):
        if path.name != "facts.py":
            assert not re.search("past_key_values|cache_params", path.read_text(encoding="utf-8")), path


def called(call):
    """Return the result of `call`, and its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = call()
    return out, [(warning.category, str(warning.message)) for warning in seen]


def ours(**given):
    drafting = {"assistant_model": tiny.draft_of(tiny.shared("llama"), "often"), "lossy_policy": "strict"}
    return hla.enable(tiny.build("llama")).generate(IDS, **GREEDY | drafting | given, return_dict_in_generate=True)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_taken_by_each_name_and_with_transformers_warnings(name, beside):
    """Its alias is dropped beside the name, whatever is in it."""
    expected_cache, passed_cache, other = DynamicCache(), DynamicCache(), {name: DynamicCache()} if beside else {}
    first = CACHE if beside else name
    alone, expected = called(lambda: tiny.shared("llama").generate(IDS, **GREEDY, **other | {first: expected_cache}))
    out, warned = called(lambda: ours(**other | {first: passed_cache}))
    assert torch.equal(out.sequences, alone) and cache_of(out) is passed_cache is out[CACHE]
    assert passed_cache.get_seq_length() == expected_cache.get_seq_length() == IDS.shape[1] + 11
    assert [kind for kind, _ in warned] == [kind for kind, _ in expected] and (beside or warned == expected)
    assert len(expected) == (name != CACHE)
    assert passed_as({}) is None and passed_as({name: 1, CACHE: 2}) == CACHE and passed_as({name: 1}) == name
    assert name == CACHE or passed_as({name: 1, CACHE: None}) is None


@pytest.mark.skipif(CACHE != OLD, reason="this Transformers calls it so")
def test_the_name_of_newer_ones_is_refused_with_that_of_this_one():
    with pytest.raises(TypeError, match="takes no argument 'cache'; did you mean 'past_key_values'"):
        ours(cache=DynamicCache())


def written(model, cache):
    return hla.enable(model).generate(
        **small.one(), max_new_tokens=12, do_sample=False, **{CACHE: cache}, assistant_model=model, lossy_policy="strict"
    )  # fmt: skip


def test_a_window_that_the_target_has_not_got():
    for model, has in ((small.llama(), r"all: pass DynamicCache\(config=model.config\)$"), (tiny.build("mistral", sliding_window=12), "12")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{CACHE} keeps 8 tokens in layer 0, the target {has}"):
            written(model, DynamicCache(config=tiny.shared("mistral").config))


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_its_cache_and_one_without_a_config_serve(name):
    """And hold the text afterwards, from which Transformers goes on."""
    model = tiny.shared(name)
    expected = model.generate(**small.one(), max_new_tokens=12, do_sample=False)
    for cache in (DynamicCache(config=model.config), DynamicCache()):
        kinds, text, settings = [type(layer) for layer in cache.layers], expected, {"do_sample": False}
        assert torch.equal(written(model, cache), text)
        for policy in ("strict", None):
            ours = {"lossy_policy": policy, "assistant_model": model if policy else None}
            given = {"input_ids": text, "attention_mask": torch.ones_like(text), "max_new_tokens": 8, **settings}
            assert cache.get_seq_length() == text.shape[1] - 1
            assert not kinds or [type(layer) for layer in cache.layers] == kinds
            text = model.generate(**given)
            assert torch.equal(hla.enable(model).generate(**given, **{CACHE: cache}, **ours), text)
        hla.disable(model)


def test_token_types_that_a_text_model_reads_are_refused():
    """GPT-2 adds the embedding of each token's type, also of type 0."""
    model = hla.enable(tiny.build("gpt2"))
    inputs = tiny.prompts((9,))
    given = inputs | {"assistant_model": model, "lossy_policy": "strict", "max_new_tokens": 4}
    for kind in (0, 1):
        types = torch.full_like(inputs["input_ids"], kind)
        with pytest.raises(ValueError, match="^token_type_ids: GPT2LMHeadModel reads them[^\n]*lossy_policy out$"):
            model.generate(**given, token_type_ids=types)
