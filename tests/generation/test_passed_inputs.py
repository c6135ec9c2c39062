"""Caches, positions and other inputs that a caller passes beside the prompt: used as they are meant, or refused by name in one line."""

import inspect

import pytest
import torch
import transformers
from support import tiny
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    ErnieConfig,
    ErnieForCausalLM,
    GenerationMixin,
    MambaConfig,
    StaticCache,
)
from transformers.cache_utils import QuantizedLayer, StaticLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hf_lossy_assist as hla
from hf_lossy_assist.generation.input_checks import TEXT_INPUTS, refuse_extra_inputs
from hf_lossy_assist.models.compat import CACHE, cache_of


CROPS_STATIC = hasattr(StaticLayer, "crop")  # since Transformers 5.24


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


def windows():
    return StaticCache(tiny.shared("mistral").config, max_cache_len=40)


TWO = torch.arange(4, 13).repeat(2, 1)
SMALL = "has room for 11 tokens, and this text may come to 13" if CROPS_STATIC else "StaticCache cannot be"
OTHER = "is laid out in bfloat16 and the target computes in float" if CROPS_STATIC else "StaticCache cannot be"
CACHES = {
    "quantised": (lambda: filled(Cache(layers=[Kept(), Kept()])), {}, "Kepts cannot be rolled back"),
    "of states alone": (lambda: DynamicCache(config=MambaConfig(num_hidden_layers=2)), {}, "recurrent states alone cannot be rolled back, as a cache must be here: leave it out$"),
    "static with a window": (lambda: filled(windows(), tiny.shared("mistral")), {}, r"Static\w+ cannot be"),
    "static with a window, a batch": (windows, {"input_ids": TWO}, r"Static\w+ cannot be"),
    "static and too small": (lambda: filled(StaticCache(tiny.shared("llama").config, max_cache_len=11)), {}, SMALL),
    "static, laid out in another precision": (lambda: filled(StaticCache(tiny.shared("llama").config, max_cache_len=40), tiny.build("llama").bfloat16()), {}, OTHER),
    "of two rows": (lambda: filled(DynamicCache(), rows=2), {}, "holds 2 rows, input_ids has 1"),
    "of a deeper model": (lambda: filled(DynamicCache(), tiny.build("llama", num_hidden_layers=3)), {}, "3 layers.* has 2"),
    "of the whole text": (lambda: filled(DynamicCache()), {"input_ids": torch.arange(4, 9)[None]}, "holds 5 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("cache, settings, line", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("runner", [False, True], ids=["enabled", "runner"])
def test_a_cache_that_cannot_serve_is_refused_by_what_it_is(cache, settings, line, runner):
    own = {
        "custom_generate": hla.Runner("strict", tiny.shared("llama")),
        "lossy_policy": None,
        "assistant_model": None,
    }
    with pytest.raises(ValueError, match=rf"^{CACHE}[^\n]*{line}[^\n]*$"):
        call(**{CACHE: cache()}, **settings, **own if runner else {})


@pytest.mark.skipif(not CROPS_STATIC, reason="this Transformers cannot crop a static cache")
@pytest.mark.parametrize("held", [0, 5])
@pytest.mark.parametrize("policy", ["strict", "svip"])
def test_a_static_cache_serves_where_it_can_be_cropped(held, policy):
    """With room for each token but the last, which is never written, so that no draft may reach beyond it."""
    ids, new = torch.arange(4, 13)[None], 24
    alone = tiny.shared("llama").generate(ids, max_new_tokens=new, do_sample=False, eos_token_id=tiny.NEVER_EMITTED)
    cache = StaticCache(tiny.shared("llama").config, max_cache_len=ids.shape[1] + new - 1)
    out = call(
        **{CACHE: filled(cache) if held else cache}, max_new_tokens=new, lossy_policy=policy, eos_token_id=tiny.NEVER_EMITTED,
        assistant_model=tiny.draft_of(tiny.shared("llama"), "often"), return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, alone) and cache_of(out) is cache
    assert 0.1 < out.speculation.draft_acceptance_rate < 0.95 and cache.get_seq_length() == ids.shape[1] + new - 1


def test_an_encoder_decoder_keeps_two_caches():
    model, draft, ids = hla.enable(tiny.build("t5")), tiny.build("t5", seed=1), torch.arange(4, 13)[None]
    settings = {"max_new_tokens": 8, "do_sample": False}
    alone = tiny.shared("t5").generate(ids, **settings)
    two = EncoderDecoderCache(DynamicCache(), DynamicCache())
    settings |= {"assistant_model": draft, "lossy_policy": "strict"}
    assert torch.equal(model.generate(ids, **{CACHE: two}, **settings), alone)
    with pytest.raises(ValueError, match=rf"^{CACHE}[^\n]*EncoderDecoderCache[^\n]*got a DynamicCache$"):
        model.generate(ids, **{CACHE: DynamicCache()}, **settings)


def test_an_input_with_an_entry_for_each_token_is_refused_where_nobody_says_how_it_goes_on():
    """ERNIE's task types on Transformers' own cache; on rows every input that is not text is refused anyway."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = ErnieConfig(**tiny.COMMON | sizes, is_decoder=True, use_task_id=True)
    model = hla.enable(ErnieForCausalLM(config).eval())
    given = {"task_type_ids": torch.ones(1, 9, dtype=torch.long), "input_ids": torch.arange(4, 13)[None]}
    for cache in ({}, {CACHE: DynamicCache(config=model.config)}):
        with pytest.raises(ValueError, match=r"^lossy_policy[^\n]*task_type_ids[^\n]*$"):
            model.generate(**given, **cache, assistant_model=model, lossy_policy="strict", max_new_tokens=3)


def test_encoder_outputs_serve_the_target_and_a_draft_needs_the_input_too():
    model, prompt = tiny.shared("t5"), torch.arange(4, 14)[None]
    with torch.no_grad():
        encoded = {"encoder_outputs": model.get_encoder()(prompt)}
    expected = tiny.greedy(model, {"input_ids": prompt})
    draft = tiny.draft_of(model, "often")
    assert torch.equal(tiny.assisted(model, encoded, None, prompt_lookup_num_tokens=3).sequences, expected)
    assert torch.equal(tiny.assisted(model, {"input_ids": prompt} | encoded, draft).sequences, expected)
    with pytest.raises(ValueError, match=r"^encoder_outputs[^\n]*pass input_ids=[^\n]*$"):
        tiny.assisted(model, encoded, draft)


@pytest.mark.parametrize("pads", [0, 3])
def test_positions_that_the_mask_does_not_imply_are_refused_and_its_own_are_not(pads):
    """`generate` works them out for every call; by the runner itself a caller's own come through as well."""
    mask = torch.tensor([[0] * pads + [1] * (9 - pads)])
    own = (mask.cumsum(dim=1) - 1).clamp(min=0)
    runner = {
        "custom_generate": hla.Runner("strict", tiny.shared("llama")),
        "lossy_policy": None,
        "assistant_model": None,
    }
    expected = call(attention_mask=mask, **runner)
    assert torch.equal(call(attention_mask=mask, position_ids=own, **runner), expected)
    for given in (own + 7, own.flip(1)):
        with pytest.raises(ValueError, match=r"^lossy_policy works positions out[^\n]*position_ids[^\n]*$"):
            call(attention_mask=mask, position_ids=given, **runner)
    with pytest.raises(ValueError, match=r"^lossy_policy works positions out[^\n]*position_ids[^\n]*$"):
        call(attention_mask=mask, position_ids=own)


# What `RowModel.feed` gives a model itself, and what no forward of a text depends on.
FED = {
    "input_ids",
    "attention_mask",
    "position_ids",
    CACHE,
    "use_cache",
    "logits_to_keep",
    "token_type_ids",
}
OF_THE_CALL = {
    "self",
    "kwargs",
    "model_kwargs",
    "labels",
    "inputs_embeds",
    "is_first_iteration",
    "next_sequence_length",
}


def inputs_of_every_causal_model():
    names = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        kind = getattr(transformers, name if isinstance(name, str) else name[0])
        if issubclass(kind, GenerationMixin):
            for method in (kind.forward, kind.prepare_inputs_for_generation):
                names |= dict.fromkeys(inspect.signature(method).parameters, kind.__name__)
    return names


@pytest.mark.full
def test_every_input_of_every_causal_model_is_fed_or_refused_by_name():
    names = inputs_of_every_causal_model()
    assert len(names) > 50 and names.keys() >= FED
    assert TEXT_INPUTS == FED - {"input_ids"}
    for name in names.keys() - FED - OF_THE_CALL:
        with pytest.raises(ValueError, match=rf"^lossy_policy handles text alone[^\n]*{name}[^\n]*$"):
            refuse_extra_inputs({name: torch.zeros(1)})
        refuse_extra_inputs({name: None})
