"""A cache is passed by every name that the installed Transformers takes it by, and messages name it so. No other name stands in the package."""

import dataclasses
import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
from support import tiny
from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer

import hf_lossy_assist as hla
from hf_lossy_assist.models.compat import CACHE, CACHE_NAMES, cache_of, passed_as


IDS = torch.arange(4, 13)[None]
GREEDY = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": tiny.NEVER_EMITTED}
OLD = "past_key_values"


def test_the_name_is_what_models_layers_and_outputs_call_it():
    """eagle1, eagle3: layers; models: forwards and `prepare_inputs_for_generation`; output: the field."""
    takers = [LlamaAttention, LlamaDecoderLayer, Qwen3Attention, Qwen3DecoderLayer]
    takers = [kind.forward for kind in takers] + [type(tiny.shared(name)).forward for name in tiny.ARCHITECTURES]
    for taker in (*takers, GenerationMixin.prepare_inputs_for_generation):
        assert CACHE in inspect.signature(taker).parameters, taker
    assert CACHE in {field.name for field in dataclasses.fields(GenerateDecoderOnlyOutput)}
    assert CACHE in tiny.shared("llama")(IDS)


def test_no_other_file_of_the_package_names_it():
    for path in Path(hla.__file__).parent.rglob("*.py"):
        if path.name != "cache_name.py":
            assert not re.search("past_key_values|cache_params", path.read_text(encoding="utf-8")), path


def test_of_two_names_the_first_counts():
    """As in Transformers, whose alias is dropped beside the name, whatever is in it."""
    assert passed_as({}) is None and passed_as({CACHE: None}) is None
    for name in CACHE_NAMES:
        assert passed_as({name: 1, "use_cache": True}) == name
        assert passed_as({name: 1} | {CACHE: 2}) == CACHE
        assert name == CACHE or passed_as({name: 1, CACHE: None}) is None


def called(call):
    """What `call` returns, and its warnings."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        out = call()
    return out, [(its.category, str(its.message)) for its in seen]


def ours(**given):
    model = hla.enable(tiny.build("llama"))
    draft = tiny.draft_of(tiny.shared("llama"), "often")
    return model.generate(
        IDS, **GREEDY | given, assistant_model=draft, lossy_policy="strict", return_dict_in_generate=True
    )


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_taken_by_each_name_and_with_transformers_own_warnings(name):
    theirs, mine = DynamicCache(), DynamicCache()
    alone, said = called(lambda: tiny.shared("llama").generate(IDS, **GREEDY, **{name: theirs}))
    out, told = called(lambda: ours(**{name: mine}))
    assert torch.equal(out.sequences, alone) and cache_of(out) is mine
    assert mine.get_seq_length() == theirs.get_seq_length() == IDS.shape[1] + 11
    assert told == said and len(said) == (name != CACHE)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_messages_name_what_was_passed(name):
    filled = DynamicCache()
    tiny.shared("llama")(IDS, **{CACHE: filled})
    for given, line in (
        ("a cache", "expected a Cache such as DynamicCache, got str"),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), "an EncoderDecoderCache is for encoder-decoders"),
        (filled, "holds 9 tokens, input_ids has 9"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            with pytest.raises((TypeError, ValueError), match=rf"^{name}:? {line}[^\n]*$"):
                ours(**{name: given})
    with pytest.raises(ValueError, match=rf"^{name}=… belongs to one call[^\n]*$"):
        hla.generate_many(
            tiny.shared("llama"),
            [[4, 5]],
            assistant_model=tiny.shared("llama"),
            lossy_policy="strict",
            **{name: filled},
        )


@pytest.mark.parametrize("name", CACHE_NAMES[1:])
def test_two_names_at_once_are_what_they_are_in_transformers(name):
    theirs, mine, other = DynamicCache(), DynamicCache(), DynamicCache()
    alone, said = called(lambda: tiny.shared("llama").generate(IDS, **GREEDY, **{CACHE: theirs, name: other}))
    out, told = called(lambda: ours(**{CACHE: mine, name: other}))
    assert torch.equal(out.sequences, alone) and cache_of(out) is mine and not other.get_seq_length()
    assert [kind for kind, _ in told] == [kind for kind, _ in said] != []


def test_the_output_has_the_field_of_this_transformers():
    out = ours()
    assert CACHE in out.keys() and out[CACHE] is cache_of(out) is not None
    if CACHE != OLD:  # Transformers' own alias
        assert OLD not in out.keys() and out[OLD] is out[CACHE]


@pytest.mark.skipif(CACHE != OLD, reason="this Transformers calls it so")
def test_the_name_of_newer_ones_is_refused_with_that_of_this_one():
    with pytest.raises(
        TypeError, match=r"^generate: this model takes no argument 'cache'; did you mean 'past_key_values'\?$"
    ):
        ours(cache=DynamicCache())
