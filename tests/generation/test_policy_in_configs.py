"""A policy is never passed over in silence, and never switched on in silence: generation configs, copies, pickles and pipelines."""

from contextlib import nullcontext

import pytest
import torch
from support.small import PAD, llama, near, one, tokenizer
from transformers import GenerationConfig, pipeline

import hf_lossy_assist as hla
from hf_lossy_assist.generation import model_checks


SETTINGS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}


def write(model, **settings):
    if hasattr(model, "preprocess"):
        return model("w5 w6 w7", **SETTINGS, **settings)
    return model.generate(**one(), **SETTINGS, **settings)


ALL = hla.TopK(k=96)  # another text than the target's


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
@pytest.mark.parametrize("lossy", ["standing", "using"])
def test_none_means_none_for_this_call(lossy):
    """The call with None writes Transformers' text; the next one has the policy again."""
    model, none = llama(), {"lossy_policy": None}
    expected, draft = model.generate(**one(), **SETTINGS), near(model, 0.6)
    if lossy == "standing":
        hla.enable(model, draft, ALL)
    with hla.using(model, draft, ALL) if lossy == "using" else nullcontext():
        assert torch.equal(model.generate(**one(), **SETTINGS, **none), expected) and not hla.reports(model)
        with hla.using(model, lossy_policy=None):
            assert torch.equal(model.generate(**one(), **SETTINGS), expected) and not hla.reports(model)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
        pipe("w5 w6 w7", **SETTINGS, lossy_policy=None)
        assert not hla.reports(model)
        assert not torch.equal(model.generate(**one(), **SETTINGS), expected)
    (many,) = hla.generate_many(model, one()["input_ids"].tolist(), assistant_model=draft, **SETTINGS | none)
    assert many.token_ids == expected[0, one()["input_ids"].shape[1] :].tolist()


def test_none_is_refused_where_it_cannot_act():
    """Transformers refuses other arguments, and an open context of Transformers' has a policy."""
    model = hla.enable(llama(), near(llama()))
    with pytest.raises(ValueError, match="not used by the model: ..drafter"):
        write(model, lossy_policy=None, drafter="suffix")
    with hla.in_transformers_loop(model, "strict"), pytest.raises(ValueError, match="^lossy_policy=None: the open in"):
        write(model, lossy_policy=None, assistant_model=near(llama()))
    hla.enable(model, lossy_policy=None)
    write(model)
    assert not hla.reports(model)


def test_a_policy_in_a_config_does_not_act_and_says_so(monkeypatch):
    monkeypatch.setattr(model_checks, "_warned", set())
    model, draft = hla.enable(llama()), near(llama())
    config = GenerationConfig(
        **SETTINGS, lossy_policy={"rule": {"name": "top_k", "k": 50}}, return_dict_in_generate=True
    )
    with pytest.warns(
        UserWarning, match="^lossy_policy in a generation config does not act: pass it to generate or enable$"
    ):
        out = model.generate(**one(), generation_config=config, assistant_model=draft)
    assert not hasattr(out, "speculation") and hla.reports(model) == []
