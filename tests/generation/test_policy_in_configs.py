"""A policy is never passed over in silence, and never switched on in silence: generation configs, copies, pickles, files and pipelines."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from support.small import PAD, llama, near, one, tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, pipeline

import hf_lossy_assist as hla


SETTINGS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD}
LOOSE = {"rule": {"name": "top_k", "k": 50}}  # as a stranger's file may have it


def as_get_started(policy):
    """The lines of docs/get-started.md, up to its `disable`."""
    target = hla.enable(llama())
    target.generation_config.lossy_policy = hla.as_policy("svip")
    target.generate(**one(), **SETTINGS, assistant_model=near(target))
    target.generation_config.lossy_policy = policy
    return target


def saved_and_loaded(model, folder):
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


WAYS = {
    "as it is": lambda model, folder: model,
    "deep copy": lambda model, folder: copy.deepcopy(model),
    "pickle": lambda model, folder: pickle.loads(pickle.dumps(model)),
    "files": saved_and_loaded,
    "pipeline": lambda model, folder: pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu"),
}


def write(model, **settings):
    if hasattr(model, "preprocess"):
        return model("w5 w6 w7", **SETTINGS, **settings)
    return model.generate(**one(), **SETTINGS, **settings)


ALL = hla.TopK(k=96)  # another text than the target's
NONE = {"in the call": {"lossy_policy": None}, "in its config": {"generation_config": GenerationConfig(**SETTINGS, lossy_policy=None)}}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
@pytest.mark.parametrize("none", NONE.values(), ids=NONE)
@pytest.mark.parametrize("lossy", ["standing", "using", "the model's config"])
def test_none_means_none_for_this_call(lossy, none):
    """The call with None writes Transformers' text; the next one has the policy again."""
    model, settings = llama(), {} if "generation_config" in none else SETTINGS
    expected, draft = model.generate(**one(), **SETTINGS), near(model, 0.6)
    if lossy == "the model's config":
        hla.enable(model).generation_config.lossy_policy = hla.as_policy(ALL)
        settings = settings | {"assistant_model": draft}
    elif lossy == "standing":
        hla.enable(model, draft, ALL)
    with hla.using(model, draft, ALL) if lossy == "using" else nullcontext():
        assert torch.equal(model.generate(**one(), **settings, **none), expected) and not hla.reports(model)
        if lossy != "the model's config":
            with hla.using(model, lossy_policy=None):
                assert torch.equal(model.generate(**one(), **SETTINGS), expected) and not hla.reports(model)
            pipe = pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
            pipe("w5 w6 w7", **SETTINGS, lossy_policy=None)
            assert not hla.reports(model)
        drafting = {} if lossy != "the model's config" else {"assistant_model": draft}
        assert not torch.equal(model.generate(**one(), **SETTINGS, **drafting), expected)
    (many,) = hla.generate_many(model, one()["input_ids"].tolist(), assistant_model=draft, **SETTINGS | none)
    assert many.token_ids == expected[0, one()["input_ids"].shape[1] :].tolist()


def test_none_is_refused_where_it_cannot_act():
    """Other arguments need this package's loop, and an open context of Transformers' has a policy."""
    model = hla.enable(llama(), near(llama()))
    with pytest.raises(ValueError, match="^drafter=… is for this package's loop, which only a policy starts"):
        write(model, lossy_policy=None, drafter="suffix")
    with hla.in_transformers_loop(model, "strict"), pytest.raises(ValueError, match="^lossy_policy=None: the open in"):
        write(model, lossy_policy=None, assistant_model=near(llama()))
    hla.enable(model, lossy_policy=None)
    write(model)
    assert not hla.reports(model)


@pytest.mark.full(every=4)
@pytest.mark.filterwarnings("ignore:generation_config.json is written without the policy")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", [None, hla.SVIP(), "svip"], ids=["None", "an object", "a name"])
def test_a_disabled_model_refuses_a_policy(policy, way, tmp_path):
    model = WAYS[way](hla.disable(as_get_started(policy)), tmp_path)
    with pytest.raises(ValueError, match="lossy_policy"):
        write(model, assistant_model=near(llama()), lossy_policy="svip")


@pytest.mark.filterwarnings("ignore:generation_config.json is written without the policy")
@pytest.mark.parametrize("policy", [None, hla.SVIP()], ids=["None", "an object"])
def test_what_was_saved_while_enabled_refuses_a_policy_too(policy, tmp_path):
    """Whether or not the file says that Transformers made it of the model's config, where entries of one's own are forgotten."""
    for made in (False, True):
        target = as_get_started(policy)
        target.generation_config._from_model_config = made
        again = saved_and_loaded(target, tmp_path)
        assert not hasattr(again.generation_config, "lossy_policy")
        assert target.generation_config.lossy_policy == policy
        with pytest.raises(ValueError, match="lossy_policy"):
            write(again, assistant_model=near(llama()), lossy_policy="svip")


def test_saving_says_that_the_policy_is_not_in_the_file(tmp_path):
    target = as_get_started(hla.SVIP())
    with pytest.warns(UserWarning, match=r"without the policy SVIP[^\n]*policy.save_pretrained\(folder\)$"):
        target.save_pretrained(tmp_path)


@pytest.mark.parametrize("way", ["deep copy", "pickle", "pipeline"])
def test_a_copy_of_an_enabled_model_is_enabled(way, tmp_path):
    """With the policy in its generation config, if there is one."""
    target, draft, calls = as_get_started(None), near(llama()), []
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    for policy, settings in ((None, {"lossy_policy": "svip"}), (hla.SVIP(), {})):
        target.generation_config.lossy_policy = policy
        model = WAYS[way](target, tmp_path)
        assert hla.is_enabled(model if way != "pipeline" else model.model)
        expected = write(hla.disable(copy.deepcopy(target)) if way != "pipeline" else pipeline("text-generation", model=llama(), tokenizer=tokenizer(), device="cpu"))  # fmt: skip
        calls.clear()
        got = write(model, assistant_model=draft, **settings)
        assert calls and (got == expected if way == "pipeline" else torch.equal(got, expected))
    assert "generate" not in vars(hla.disable(copy.deepcopy(target)))


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("copied", [False, True], ids=["itself", "a copy"])
def test_a_policy_that_a_config_at_the_call_was_read_with_is_not_used(copied, tmp_path):
    target, draft = hla.enable(llama()), near(llama())
    GenerationConfig(**SETTINGS, lossy_policy=LOOSE).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    config = copy.deepcopy(config) if copied else config
    config.return_dict_in_generate = True
    ours = {"generation_config": config, "assistant_model": draft}
    with pytest.warns(
        UserWarning,
        match=r"^the generation config of this call names the policy [^\n]*lossy_policy=generation_config.lossy_policy",
    ):
        out = target.generate(**one(), **ours)
    assert not hasattr(out, "speculation")
    assert target.generate(**one(), **ours, lossy_policy=config.lossy_policy).speculation.num_spec_steps
    target.generation_config.lossy_policy = hla.SVIP()  # which the caller set
    with pytest.warns(UserWarning, match="which is not used"):
        assert target.generate(**one(), **ours).speculation.num_spec_tokens == 40
    config.lossy_policy = hla.as_policy(config.lossy_policy)
    assert target.generate(**one(), **ours).speculation.num_spec_steps
