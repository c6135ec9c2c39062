"""Names of Transformers that are private, or public but fragile, and that this package leans on: a new release fails here first.

One small test for each; the docstring says who needs it.
"""

import inspect

import pytest
import torch
from support import tiny
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, EncoderDecoderCache, QuantizedLayer
from transformers.generation import CandidateGenerator, candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_lossy_assist.models.facts import CACHE


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


# -- generate and custom_generate -----------------------------------------------------------------------------------------


def test_generates_positional_parameters():
    """An enabled `generate` hands positional arguments on by these names."""
    names = parameters(GenerationMixin.generate)
    assert names[:2] == ["self", "inputs"] and names[2] == "generation_config"
    for name in ("logits_processor", "stopping_criteria", "assistant_model", "streamer", "custom_generate", "kwargs"):
        assert name in names
    for name in ("tokenizer", "assistant_tokenizer", "prompt_lookup_num_tokens", "lossy_policy"):
        assert name not in names  # the runner reads it from the keyword arguments


def run_custom(model, **kwargs) -> dict:
    """Return the arguments that a callable of the runner's signature is called with."""
    got = {}

    def loop(
        model, input_ids, logits_processor, stopping_criteria, generation_config, inputs_tensor=None, **model_kwargs
    ):
        got.update(locals())
        return input_ids

    model.generate(custom_generate=loop, **kwargs)
    return got


def test_custom_generate_gets_everything_prepared():
    """runner: ids, processors, criteria, config, mask and cache, under these names; model first, the rest by keyword."""
    model, inputs = tiny.shared("llama"), tiny.prompts((5, 2))
    got = run_custom(model, **inputs, max_new_tokens=7, do_sample=True, temperature=0.5, num_return_sequences=2)
    assert got["model"] is model
    assert got["input_ids"].shape == (4, 5) and torch.equal(got["inputs_tensor"], inputs["input_ids"])
    assert isinstance(got["logits_processor"], LogitsProcessorList) and len(got["logits_processor"]) > 0
    kinds = {type(criterion) for criterion in got["stopping_criteria"]}
    assert kinds == {MaxLengthCriteria, EosTokenCriteria}
    assert got["generation_config"].max_length == 12 and got["generation_config"].do_sample is True
    assert torch.equal(got["model_kwargs"]["attention_mask"], inputs["attention_mask"].repeat_interleave(2, 0))
    assert isinstance(got["model_kwargs"][CACHE], DynamicCache)
    assert got["model_kwargs"][CACHE].get_seq_length() == 0


def test_custom_generate_gets_what_it_has_a_name_for_as_it_was_passed():
    """runner: the draft's settings, which would else be lost among the defaults that `generate` writes into the config."""
    got = []

    def loop(
        model, input_ids, logits_processor, stopping_criteria, generation_config, num_assistant_tokens=None, **others
    ):
        got.append((num_assistant_tokens, generation_config.num_assistant_tokens))
        return input_ids

    for settings in ({}, {"num_assistant_tokens": 20}):
        tiny.shared("llama").generate(**tiny.prompts((5,)), custom_generate=loop, max_new_tokens=2, **settings)
    assert got == [(None, 20), (20, 20)]
    assert GenerationConfig._get_default_generation_params()["num_assistant_tokens"] == 20


def test_custom_generate_drops_the_draft_and_the_streamer():
    """So the runner carries them itself. If this changes, they could be handed over plainly."""
    got = run_custom(
        tiny.shared("llama"), **tiny.prompts((5,)), max_new_tokens=2, assistant_model=tiny.shared("gpt2"),
        tokenizer="a tokenizer",
    )  # fmt: skip
    assert not {"assistant_model", "streamer", "tokenizer"} & got["model_kwargs"].keys()


def test_custom_generate_of_an_encoder_decoder():
    """runner: decoder ids of one token, the encoder's mask and output, an `EncoderDecoderCache`."""
    got = run_custom(tiny.shared("t5"), **tiny.prompts((5,)), max_new_tokens=2)
    assert got["input_ids"].tolist() == [[tiny.PAD]] and got["inputs_tensor"].shape == (1, 5)
    assert {"attention_mask", "encoder_outputs", CACHE} <= got["model_kwargs"].keys()
    cache = got["model_kwargs"][CACHE]
    assert isinstance(cache, EncoderDecoderCache) and all(
        hasattr(x, "crop") for x in cache.self_attention_cache.layers
    )


def test_pad_token_tensor():
    """runner: what fills short rows."""
    got = run_custom(tiny.shared("llama"), **tiny.prompts((5,)), max_new_tokens=2)
    assert int(got["generation_config"]._pad_token_tensor) == tiny.PAD
    model = tiny.build("llama", pad_token_id=None, eos_token_id=None)
    got = run_custom(model, **tiny.prompts((5,)), max_new_tokens=2)
    assert got["generation_config"]._pad_token_tensor is None


def test_eos_criteria_hold_their_ids():
    """sequences: a row ends at these, checked without a call."""
    got = run_custom(tiny.shared("llama"), **tiny.prompts((5,)), max_new_tokens=2, eos_token_id=[4, 9], max_time=5.0)
    criteria = {type(criterion): criterion for criterion in got["stopping_criteria"]}
    assert criteria[EosTokenCriteria].eos_token_id.tolist() == [4, 9]
    assert criteria[MaxTimeCriteria](torch.zeros(1, 3, dtype=torch.long), None).tolist() == [False]


def test_generation_config_knows_the_draft_settings():
    """runner: read from the draft's generation config when neither call nor policy says anything."""
    config = GenerationConfig().to_dict()
    for name in (
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "prompt_lookup_num_tokens",
        "assistant_early_exit",
        "assistant_ensemble_weight",
        "stop_strings",
    ):
        assert name in config
    assert "lossy_policy" not in config  # Transformers has no setting of this name of its own


# -- caches ---------------------------------------------------------------------------------------------------------------


def test_cache_takes_ready_layers():
    """cache: `RowCache` hands its own layers to `Cache`."""
    assert "layers" in parameters(Cache.__init__)
    assert not hasattr(Cache(layers=[DynamicLayer()]), "lengths")


def test_what_a_cache_layer_must_have():
    """cache: `RowLayer` implements every abstract method, under either name of the last one."""
    wanted = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length"}
    abstract = set(CacheLayerMixin.__abstractmethods__)
    assert wanted <= abstract <= wanted | {"get_max_length", "get_max_cache_shape"}
    assert parameters(CacheLayerMixin.update)[:3] == ["self", "key_states", "value_states"]
    assert parameters(CacheLayerMixin.get_mask_sizes)[:2] == ["self", "query_length"]
    layer = DynamicLayer()
    assert layer.keys is None and layer.values is None and layer.is_initialized is False


def test_a_callers_cache_is_marked():
    """runner: so the one that was passed is filled, even if it is empty yet."""
    seen, cache = [], DynamicCache(config=tiny.shared("llama").config)

    def method(model, input_ids, **kwargs):
        seen.append(getattr(kwargs[CACHE], "_is_user_defined", False))
        return input_ids

    for given in ({}, {CACHE: cache}):
        tiny.shared("llama").generate(**tiny.prompts((5,)), **given, custom_generate=method, max_new_tokens=2)
    assert seen == [False, True]


def test_a_quantised_layer_has_the_crop_of_a_plain_one():
    """passed_cache: which does not cut what is quantised, so such caches are refused by this word in the class's name."""
    assert issubclass(QuantizedLayer, DynamicLayer) and QuantizedLayer.crop is DynamicLayer.crop


def test_inputs_that_prepare_inputs_grows_or_drops():
    """growing, token_types: cut to the length of the forward; inputs, images: not handed on behind the first forward."""
    ids, model = torch.arange(4, 14)[None], tiny.shared("gpt2")
    given = {"token_type_ids": torch.arange(10)[None], "pixel_values": torch.zeros(1)}
    out = model.prepare_inputs_for_generation(ids, next_sequence_length=3, is_first_iteration=False, **given)
    assert out["token_type_ids"].tolist() == [[7, 8, 9]] and "pixel_values" not in out
    assert "pixel_values" in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL


def test_layers_that_keep_the_prompt_whatever_their_window():
    """cropping: a prompt comes in two forwards, so such a layer is told how long it is."""
    layers = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    kind = layers.UnlimitedOcrDynamicReferenceSlidingWindowLayer
    assert parameters(kind.set_prefill_length) == ["self", "prefill_length"]


# -- forwards -------------------------------------------------------------------------------------------------------------


def test_attention_is_looked_up_by_the_configs_name_at_every_forward():
    """packing: under another name with the same functions the output is the same, and the function is really called."""
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] and ALL_ATTENTION_FUNCTIONS["sdpa"]
    calls = []

    def attention(module, query, key, value, mask, **kwargs):
        calls.append((query.shape[2], key.shape[2]))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("contract", attention)
    AttentionMaskInterface.register("contract", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for name in set(tiny.BATCHED) - {"gemma2"}:  # that one is eager
        model = tiny.build(name, seed=1)
        assert model.config._attn_implementation == "sdpa"
        calls.clear()
        with torch.no_grad():
            plain = model(torch.arange(4, 9)[None]).logits
            model.config._attn_implementation = "contract"
            assert torch.equal(model(torch.arange(4, 9)[None]).logits, plain)
            model.config._attn_implementation = "sdpa"
            model(torch.arange(4, 9)[None])
        assert calls == [(5, 5)] * model.config.num_hidden_layers, name


def test_prepare_cache_for_generation():
    """runner: the cache of a draft that has no row cache."""
    names = ["self", "generation_config", "model_kwargs", "generation_mode", "batch_size", "max_cache_length"]
    assert parameters(GenerationMixin._prepare_cache_for_generation) == names
    kwargs = {}
    tiny.shared("lfm2")._prepare_cache_for_generation(GenerationConfig(), kwargs, None, 1, 20)
    assert isinstance(kwargs[CACHE], DynamicCache)


# -- candidate generators -------------------------------------------------------------------------------------------------


def test_get_candidate_generator():
    """runner calls it, drafting replaces it on the instance: by these keywords in either case."""
    names = [
        "self", "generation_config", "input_ids", "inputs_tensor", "logits_processor", "model_kwargs",
        "assistant_model", "target_tokenizer", "assistant_tokenizer",
    ]  # fmt: skip
    assert parameters(GenerationMixin._get_candidate_generator) == names


def test_assisted_decoding_asks_the_instance(monkeypatch):
    """transformers_loop: the context puts `_get_candidate_generator` on one model."""

    class Asked(Exception):
        pass

    def ask(**kwargs):
        raise Asked(sorted(kwargs))

    model = tiny.build("llama")
    monkeypatch.setattr(model, "_get_candidate_generator", ask, raising=True)
    with pytest.raises(Asked, match="assistant_model"):
        model.generate(**tiny.prompts((5,)), assistant_model=tiny.shared("llama"), max_new_tokens=3)


def test_candidate_generator_methods():
    """transformers_loop: what a generator is asked and told."""
    assert parameters(CandidateGenerator.get_candidates)[:2] == ["self", "input_ids"]
    assert parameters(CandidateGenerator.update_candidate_strategy) == ["self", "input_ids", "scores", "num_matches"]


def test_assisted_candidate_generator():
    """transformers_loop: a round's draft by the generator's own steps, with a criterion for the draft's `generate`."""
    names = [
        "self", "input_ids", "assistant_model", "generation_config", "model_kwargs", "inputs_tensor", "logits_processor",
    ]  # fmt: skip
    assert parameters(AssistedCandidateGenerator.__init__) == names
    names = ["self", "input_ids", "min_new_tokens", "max_new_tokens"]
    assert parameters(AssistedCandidateGenerator._prepare_generation_args) == names
    assert parameters(AssistedCandidateGenerator._calculate_new_tokens) == ["self", "input_ids"]
    assert parameters(AssistedCandidateGenerator._update_past_and_masks)[:2] == ["self", "input_ids"]
    assert parameters(AssistedCandidateGenerator._generate_candidates) == ["self", "generation_args"]
    for prepare in (candidate_generator._prepare_attention_mask, candidate_generator._prepare_position_ids):
        assert parameters(prepare) == ["model_kwargs", "new_length", "is_encoder_decoder"]
    assert parameters(candidate_generator._prepare_token_type_ids) == ["model_kwargs", "new_length"]
    model = tiny.shared("llama")
    made = AssistedCandidateGenerator(torch.arange(4, 9)[None], model, model.generation_config, {})
    assert "stopping_criteria" not in made._prepare_generation_args(torch.arange(4, 9)[None], 0, 3)
    for attribute in ("num_assistant_tokens", "assistant_generation_config", "generation_config", "logits_processor"):
        assert hasattr(made, attribute)
    for config in (made.assistant_generation_config, made.generation_config):
        assert hasattr(config, "assistant_confidence_threshold") and hasattr(config, "num_assistant_tokens_schedule")


# -- PyTorch --------------------------------------------------------------------------------------------------------------


def test_dispatch_keys_tell_how_a_tensor_was_made():
    """signature: a graph made for tensors of one kind is not run on those of another."""
    with torch.inference_mode():
        inference = torch.ones(2)
    made = (torch.ones(2), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse(), inference)
    keys = [torch._C._dispatch_keys(tensor).raw_repr() for tensor in made]
    assert len(set(keys)) == len(keys) and keys[0] == torch._C._dispatch_keys(torch.zeros(3)).raw_repr()
