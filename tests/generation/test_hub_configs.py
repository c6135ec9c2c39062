"""generation_config.json of families on the Hub, one for each kind of entry: a text under each is `generate`'s, or a documented limit is named."""

import copy
import functools
import json
import warnings

import pytest
import tiny_models
import torch
from support.small import llama, near, one
from transformers import GenerationConfig, GenerationMixin

import hf_lossy_assist as hla
from hf_lossy_assist.cli._models import override


CAUSAL, SEQ2SEQ = "causal", "encoder-decoder"
DERIVED = {"_from_model_config": True, "transformers_version": "4.31.0"}  # which Transformers made of a config.json
GEMMA3 = {
    "bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0, "cache_implementation": "hybrid", "do_sample": True, "top_k": 64, "top_p": 0.95,
}  # fmt: skip
WHISPER = {
    "begin_suppress_tokens": [220, 50257], "suppress_tokens": [1, 2, 7, 8, 9, 10, 14, 25, 26, 27], "bos_token_id": 50257, "eos_token_id": 50257,
    "pad_token_id": 50257, "decoder_start_token_id": 50258, "forced_decoder_ids": [[1, None], [2, 50359]], "is_multilingual": True,
    "lang_to_id": {"<|en|>": 50259}, "task_to_id": {"transcribe": 50359}, "no_timestamps_token_id": 50363, "max_initial_timestamp_index": 50,
    "alignment_heads": [[2, 2], [3, 0]], "prev_sot_token_id": 50361, "return_timestamps": False, "max_length": 448,
}  # fmt: skip
BART = {
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2, "forced_bos_token_id": 0, "forced_eos_token_id": 2,
    "early_stopping": True, "no_repeat_ngram_size": 3, "num_beams": 4,
}  # fmt: skip

FILES = {
    "Llama 1": ("llama", CAUSAL, DERIVED | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": -1}),
    "Baichuan-like": ("llama", CAUSAL, {"assistant_token_id": 196, "user_token_id": 195, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "max_new_tokens": 2048, "temperature": 0.3, "top_k": 5, "top_p": 0.85, "repetition_penalty": 1.05, "do_sample": True}),
    "Gemma 3": ("gemma3_text", CAUSAL, GEMMA3),
    "XGLM": ("xglm", CAUSAL, DERIVED | {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2}),
    "Flan-T5, with a decay": ("t5", SEQ2SEQ, {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "exponential_decay_length_penalty": [4, 1.1]}),
    "BART CNN": ("bart", SEQ2SEQ, BART | {"length_penalty": 2.0, "max_length": 142, "min_length": 56}),
    "a Whisper's file": ("bart", SEQ2SEQ, WHISPER),
}  # fmt: skip


def fitted(value, vocabulary, name=""):
    """The same file with its token ids inside a vocabulary, ids apart from each other as before."""
    if isinstance(value, dict):
        return {key: fitted(entry, vocabulary, key) for key, entry in value.items()}
    if isinstance(value, list) and name.endswith(("ids", "tokens", "token_id")):
        return [fitted(entry, vocabulary, name) for entry in value]
    if name.endswith(("ids", "tokens", "token_id")) and name != "max_new_tokens" and isinstance(value, int):
        return value % vocabulary if value >= 0 else value
    return value


NEW = 12


@functools.cache
def pair(model_type, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = tiny_models.lively(tiny_models.tiny_model(model_type, kind, "eager").eval(), 1)
    return hla.enable(target), near(target)


def loaded(family, folder):
    model_type, kind, file = FILES[family]
    target, draft = pair(model_type, kind)
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    (folder / "generation_config.json").write_text(json.dumps(fitted(file, vocabulary)))
    config = GenerationConfig.from_pretrained(folder)
    if config.decoder_start_token_id is None and kind != CAUSAL:
        config.decoder_start_token_id = 0
    target.generation_config, draft.generation_config = config, copy.deepcopy(config)
    ids = torch.randint(4, 60, (1, 5), generator=torch.Generator().manual_seed(0))
    return target, draft, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("Gemma 3", "BART CNN"))) for name in FILES]
)
def test_a_familys_file_runs_or_meets_a_documented_limit(family, tmp_path):
    target, draft, inputs = loaded(family, tmp_path)
    settings = {"max_new_tokens": NEW, "min_new_tokens": 6}
    GenerationMixin.generate(target, **inputs, **settings)  # as the file has it: with beams, sampled
    ours = settings | {"assistant_model": draft, "lossy_policy": "strict"}
    way_out = {"num_beams": 1} if FILES[family][2].get("num_beams", 1) > 1 else {}
    if way_out:
        with pytest.raises(ValueError, match=r"the generation config (has|says)[^\n]*--set num_beams=1[^\n]*$"):
            target.generate(**inputs, **ours)
    target.generate(**inputs, **ours, **way_out)
    expected = GenerationMixin.generate(target, **inputs, **settings, **way_out, do_sample=False)
    assert torch.equal(target.generate(**inputs, **ours, **way_out, do_sample=False), expected)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*max_new_tokens.*")
@pytest.mark.parametrize("name", ["hybrid_chunked", "sliding_window", "paged"])
def test_a_cache_that_grows_under_any_name(name):
    """Transformers works out the kinds of layers from the model, whatever such a name says."""
    target, settings = hla.enable(llama()), {"max_new_tokens": NEW, "do_sample": False}
    target.generation_config.cache_implementation = name
    expected = GenerationMixin.generate(llama(), **one(), **settings)
    ours = {"assistant_model": near(llama()), "lossy_policy": "strict"}
    got = [target.generate(**one(), **settings, **ours)]
    if name != "paged":  # at the call another loop of Transformers
        got.append(target.generate(**one(), **settings, **ours, cache_implementation=name))
    [text] = hla.generate_many(target, one()["input_ids"].tolist(), **settings, **ours)
    got.append(torch.cat([one()["input_ids"], torch.tensor([text.token_ids])], dim=1))
    got.append(target.generate(**one(), **settings, custom_generate=hla.Runner("strict", ours["assistant_model"])))
    assert all(torch.equal(each, expected) for each in got)


NEUTRAL = (
    ("num_beams", 3, 1), ("guidance_scale", 3.0, 1.0), ("output_attentions", True, False),
    ("token_healing", True, False), ("cache_implementation", "offloaded", "dynamic"), ("penalty_alpha", 0.6, 0.0),
    ("dola_layers", "low", None), ("assistant_ensemble_weight", 0.5, None),
)  # fmt: skip


def test_what_a_config_has_and_is_refused_has_a_way_out_here_and_on_the_command_line():
    ours = {"assistant_model": near(llama()), "lossy_policy": "strict", "max_new_tokens": 4}
    expected = GenerationMixin.generate(llama(), **one(), max_new_tokens=4)
    for name, value, neutral in NEUTRAL:
        target = hla.enable(llama())
        setattr(target.generation_config, name, value)
        message = rf"^[^\n]*--set {name}={json.dumps(neutral)}(,|$)[^\n]*$"
        with pytest.raises((ValueError, TypeError), match=message):
            target.generate(**one(), **ours)
        with pytest.raises((ValueError, TypeError), match=message):
            list(hla.generate_many(target, [[4, 5, 6]], **ours))
        assert torch.equal(target.generate(**one(), **ours, **{name: neutral}), expected), name
        override(target, [f"{name}={json.dumps(neutral)}"])
        assert torch.equal(target.generate(**one(), **ours), expected), name


def test_a_lookup_in_the_models_config_does_not_take_an_assistants_place():
    """Nor is it in its way: the call names what drafts."""
    target, draft, calls = hla.enable(llama()), near(llama()), []
    target.generation_config.prompt_lookup_num_tokens = 4
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    target.generate(**one(), max_new_tokens=NEW, assistant_model=draft, lossy_policy="strict")
    assert calls
    with pytest.raises(ValueError, match="two ways to draft"):
        target.generate(**one(), assistant_model=draft, lossy_policy="strict", prompt_lookup_num_tokens=4)


def test_a_target_begins_by_itself_only_with_one_begin_token():
    target, draft = hla.enable(llama()), near(llama())
    for begin in ([1], -1):
        target.generation_config.bos_token_id = begin
        ours = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": NEW}
        assert target.generate(**one(), **ours).shape[1] == 9 + NEW
        with pytest.raises((ValueError, IndexError), match="cannot run with these arguments|out of range"):
            target.generate(**ours)
