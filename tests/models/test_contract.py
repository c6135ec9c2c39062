"""Names of Transformers that are private, or public but fragile, and that this package leans on: a new release fails here first.

What a wrong value of them does to texts is shown elsewhere; the comments say who needs them.
"""

import inspect

import pytest
import torch
import transformers
from support import tiny
from transformers import Cache, DynamicCache, GenerationConfig, GenerationMixin
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, EncoderDecoderCache, QuantizedLayer
from transformers.generation import CandidateGenerator, candidate_generator
from transformers.generation.candidate_generator import AssistedCandidateGenerator as Assisted
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_lossy_assist.models.facts import CACHE


# By function: the names of its parameters, which it is called with or which it is replaced by.
BEGINNINGS = (
    # An enabled `generate` hands positional arguments on by these names.
    (GenerationMixin.generate, "self inputs generation_config"),
    # cache: `RowCache` hands its own layers to `Cache`, and `RowLayer` is one of them.
    (CacheLayerMixin.update, "self key_states value_states"), (CacheLayerMixin.get_mask_sizes, "self query_length"),
    # transformers_loop: what a generator is asked and told, and a round's draft by its own steps.
    (CandidateGenerator.get_candidates, "self input_ids"), (Assisted._update_past_and_masks, "self input_ids"),
)  # fmt: skip
ALL = (
    # runner: the cache of a draft that has no row cache.
    (GenerationMixin._prepare_cache_for_generation, "self generation_config model_kwargs generation_mode batch_size max_cache_length"),
    # runner calls it, drafting replaces it on the instance: by these keywords in either case.
    (GenerationMixin._get_candidate_generator, "self generation_config input_ids inputs_tensor logits_processor model_kwargs "
                                               "assistant_model target_tokenizer assistant_tokenizer"),
    (CandidateGenerator.update_candidate_strategy, "self input_ids scores num_matches"),
    (Assisted.__init__, "self input_ids assistant_model generation_config model_kwargs inputs_tensor logits_processor"),
    (Assisted._prepare_generation_args, "self input_ids min_new_tokens max_new_tokens"),
    (Assisted._calculate_new_tokens, "self input_ids"), (Assisted._generate_candidates, "self generation_args"),
    (candidate_generator._prepare_attention_mask, "model_kwargs new_length is_encoder_decoder"),
    (candidate_generator._prepare_position_ids, "model_kwargs new_length is_encoder_decoder"),
    (candidate_generator._prepare_token_type_ids, "model_kwargs new_length"),
)  # fmt: skip


def parameters(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_parameters():
    for function, names in BEGINNINGS:
        assert parameters(function)[: len(names.split())] == names.split(), function
    for function, names in ALL:
        assert parameters(function) == names.split(), function
    assert "layers" in parameters(Cache.__init__)
    # The runner reads these from the keyword arguments, and Transformers has no setting called lossy_policy.
    ours = {"tokenizer", "assistant_tokenizer", "prompt_lookup_num_tokens", "lossy_policy"}
    assert not ours & set(parameters(GenerationMixin.generate))
    known = GenerationConfig().to_dict()
    assert "lossy_policy" not in known and {
        "assistant_early_exit", "assistant_ensemble_weight", "stop_strings",
    } <= set(known)  # fmt: skip
    assert GenerationConfig._get_default_generation_params()["num_assistant_tokens"] == 20


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
    """runner: model first, the rest by keyword. The draft, the streamer and tokenizers are dropped, so the runner carries them itself."""
    model, inputs = tiny.shared("llama"), tiny.prompts((5, 2))
    given = {"max_new_tokens": 7, "do_sample": True, "num_return_sequences": 2, "eos_token_id": [4, 9]}
    got = run_custom(model, **inputs, **given)
    assert got["model"] is model and got["input_ids"].shape == (4, 5)
    assert torch.equal(got["inputs_tensor"], inputs["input_ids"])
    criteria = {type(criterion): criterion for criterion in got["stopping_criteria"]}
    assert criteria.keys() == {transformers.MaxLengthCriteria, transformers.EosTokenCriteria}
    assert criteria[transformers.EosTokenCriteria].eos_token_id.tolist() == [4, 9]
    config, model_kwargs = got["generation_config"], got["model_kwargs"]
    assert config.max_length == 12 and config.do_sample is True and int(config._pad_token_tensor) == tiny.PAD
    assert torch.equal(model_kwargs["attention_mask"], inputs["attention_mask"].repeat_interleave(2, 0))
    assert isinstance(model_kwargs[CACHE], DynamicCache) and model_kwargs[CACHE].get_seq_length() == 0
    given = {"assistant_model": tiny.shared("gpt2"), "tokenizer": "a tokenizer"}
    got = run_custom(model, **tiny.prompts((5,)), **given, max_new_tokens=2)
    assert not {"assistant_model", "streamer", "tokenizer"} & got["model_kwargs"].keys()
    # runner: so the cache that was passed is filled, even if it is empty yet.
    assert not getattr(model_kwargs[CACHE], "_is_user_defined", False)
    cache = DynamicCache(config=model.config)
    assert run_custom(model, **inputs, **{CACHE: cache}, max_new_tokens=2)["model_kwargs"][CACHE]._is_user_defined
    # Of an encoder-decoder: decoder ids of one token, the encoder's mask and output.
    got = run_custom(tiny.shared("t5"), **tiny.prompts((5,)), max_new_tokens=2)
    assert got["input_ids"].tolist() == [[tiny.PAD]]
    assert {"attention_mask", "encoder_outputs"} <= got["model_kwargs"].keys()
    assert isinstance(got["model_kwargs"][CACHE], EncoderDecoderCache)


def test_layers_of_caches():
    """cache: every abstract method. passed_cache: quantised layers have the crop of plain ones, so they are refused by their class's name."""
    wanted = {"lazy_initialization", "update", "get_mask_sizes", "get_seq_length"}
    abstract = set(CacheLayerMixin.__abstractmethods__)
    assert wanted <= abstract <= wanted | {"get_max_length", "get_max_cache_shape"}
    layer = DynamicLayer()
    assert layer.keys is None and layer.values is None and layer.is_initialized is False
    assert issubclass(QuantizedLayer, DynamicLayer) and QuantizedLayer.crop is DynamicLayer.crop
    # cropping: a prompt comes in two forwards, so a layer that keeps it whatever its window is told how long it is.
    layers = pytest.importorskip("transformers.models.unlimited_ocr.modeling_unlimited_ocr")
    kind = layers.UnlimitedOcrDynamicReferenceSlidingWindowLayer
    assert parameters(kind.set_prefill_length) == ["self", "prefill_length"]


def test_inputs_that_prepare_inputs_grows_or_drops():
    """growing, token_types: cut to the length of the forward; inputs, images: not handed on behind the first forward."""
    ids, model = torch.arange(4, 14)[None], tiny.shared("gpt2")
    given = {"token_type_ids": torch.arange(10)[None], "pixel_values": torch.zeros(1)}
    out = model.prepare_inputs_for_generation(ids, next_sequence_length=3, is_first_iteration=False, **given)
    assert out["token_type_ids"].tolist() == [[7, 8, 9]] and "pixel_values" not in out
    assert "pixel_values" in MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL


def test_assisted_candidate_generator():
    """transformers_loop: a criterion of ours is added to the arguments of the draft's `generate`, and its settings are kept."""
    model = tiny.shared("llama")
    made = Assisted(torch.arange(4, 9)[None], model, model.generation_config, {})
    assert "stopping_criteria" not in made._prepare_generation_args(torch.arange(4, 9)[None], 0, 3)
    assert hasattr(made, "num_assistant_tokens") and hasattr(made, "logits_processor")
    for config in (made.assistant_generation_config, made.generation_config):
        assert hasattr(config, "assistant_confidence_threshold") and hasattr(config, "num_assistant_tokens_schedule")
