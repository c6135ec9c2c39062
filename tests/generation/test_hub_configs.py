"""generation_config.json of families on the Hub: a text under each is the one that `generate` writes, or a documented limit is named."""

import copy
import functools
import json
import warnings

import pytest
import tiny_models
import torch
from support.hub_configs import CAUSAL, FILES, LIMITS, fitted
from support.small import llama, near, one
from transformers import GenerationConfig, GenerationMixin

import hf_lossy_assist as hla
from hf_lossy_assist.cli._models import override


NEW = 12


@functools.cache
def pair(model_type, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = tiny_models.lively(tiny_models.tiny_model(model_type, kind, "eager").eval(), 1)
    return hla.enable(target), near(target)


def prompt(target, kind):
    ids = torch.randint(4, 60, (1, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def loaded(family, folder):
    model_type, kind, file = FILES[family]
    target, draft = pair(model_type, kind)
    known = target.config.get_text_config(decoder=True).vocab_size
    (folder / "generation_config.json").write_text(json.dumps(fitted(file, known)))
    config = GenerationConfig.from_pretrained(folder)
    if config.decoder_start_token_id is None and kind != CAUSAL:
        config.decoder_start_token_id = 0
    target.generation_config, draft.generation_config = config, copy.deepcopy(config)
    return target, draft, prompt(target, kind)


@pytest.mark.full(every=20)
@pytest.mark.nightly(every=5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FILES)
def test_a_familys_file_runs_or_meets_a_documented_limit(family, tmp_path):
    target, draft, inputs = loaded(family, tmp_path)
    settings = {"max_new_tokens": NEW, "min_new_tokens": 6}
    GenerationMixin.generate(target, **inputs, **settings)  # as the file has it: with beams, sampled
    ours = settings | {"assistant_model": draft, "lossy_policy": "strict"}
    way_out = LIMITS.get(family, {})
    if way_out:
        [(name, value)] = way_out.items()
        with pytest.raises(
            ValueError, match=rf"the generation config (has|says)[^\n]*--set {name}={json.dumps(value)}[^\n]*$"
        ):
            target.generate(**inputs, **ours)
    target.generate(**inputs, **ours, **way_out)
    expected = GenerationMixin.generate(target, **inputs, **settings, **way_out, do_sample=False)
    assert torch.equal(target.generate(**inputs, **ours, **way_out, do_sample=False), expected)


CACHES = ["hybrid", "hybrid_chunked", "sliding_window", "paged", "dynamic"]


@pytest.mark.full(every=4)
@pytest.mark.filterwarnings("ignore:.*max_new_tokens.*")
@pytest.mark.parametrize("where", ["generate", "generate_many", "a runner"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_grows_under_any_name(name, where):
    """Transformers works out the kinds of layers from the model, whatever such a name says."""
    target, settings = hla.enable(llama()), {"max_new_tokens": NEW, "do_sample": False}
    target.generation_config.cache_implementation = name
    expected = GenerationMixin.generate(llama(), **one(), **settings)
    ours = {"assistant_model": near(llama()), "lossy_policy": "strict"}
    if where == "generate":
        got = target.generate(**one(), **settings, **ours)
        if name != "paged":  # at the call another loop of Transformers
            assert torch.equal(target.generate(**one(), **settings, **ours, cache_implementation=name), expected)
    elif where == "generate_many":
        [text] = hla.generate_many(target, [one()["input_ids"][0].tolist()], **settings, **ours)
        got = torch.cat([one()["input_ids"], torch.tensor([text.token_ids])], dim=1)
    else:
        got = target.generate(**one(), **settings, custom_generate=hla.Runner("strict", ours["assistant_model"]))
    assert torch.equal(got, expected)


@pytest.mark.full(every=2)
@pytest.mark.parametrize(
    ("name", "value", "neutral"),
    [
        ("num_beams", 3, 1), ("use_cache", False, True), ("guidance_scale", 3.0, 1.0), ("output_attentions", True, False), ("token_healing", True, False),
        ("cache_implementation", "offloaded", "dynamic"), ("cache_implementation", "quantized", "dynamic"), ("penalty_alpha", 0.6, None),
        ("dola_layers", "low", None), ("assistant_ensemble_weight", 0.5, None), ("renormalize_logits", 1, None),
    ],
)  # fmt: skip
def test_what_a_config_has_and_is_refused_has_a_way_out_here_and_on_the_command_line(name, value, neutral):
    target, draft = hla.enable(llama()), near(llama())
    setattr(target.generation_config, name, value)
    ours = {"assistant_model": draft, "lossy_policy": "strict", "max_new_tokens": NEW}
    said = rf"^[^\n]*--set {name}={json.dumps(neutral)}(,|$)[^\n]*$"
    with pytest.raises((ValueError, TypeError), match=said):
        target.generate(**one(), **ours)
    with pytest.raises((ValueError, TypeError), match=said):
        list(hla.generate_many(target, [[4, 5, 6]], **ours))
    expected = GenerationMixin.generate(llama(), **one(), max_new_tokens=NEW)
    assert torch.equal(target.generate(**one(), **ours, **{name: neutral}), expected)
    override(target, [f"{name}={json.dumps(neutral)}"])
    assert torch.equal(target.generate(**one(), **ours), expected)


def test_several_texts_of_a_prompt_in_a_config_are_refused_by_name_in_many():
    target, draft = hla.enable(llama()), near(llama())
    target.generation_config.update(num_return_sequences=2, do_sample=True)
    settings = {"assistant_model": draft, "max_new_tokens": NEW}
    with pytest.raises(
        ValueError, match=r"^num_return_sequences belongs to one call[^\n]*--set num_return_sequences=1$"
    ):
        list(hla.generate_many(target, [[4, 5, 6]], **settings))
    assert len(list(hla.generate_many(target, [[4, 5, 6]], **settings, num_return_sequences=1))) == 1


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
        with pytest.raises(ValueError, match=r"^there is no prompt[^\n]*pass input_ids=…$"):
            target.generate(**ours)
