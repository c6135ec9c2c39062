"""`enable` touches one model object and nothing else; a policy works through pipelines, PEFT wrappers and `custom_generate`."""

import copy

import pytest
import torch
from support.refusals import refused
from support.small import llama, near, one, ragged, tokenizer, words
from support.tiny import lora, peft_warns
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, LlamaForCausalLM, pipeline

import hf_lossy_assist as hla
from hf_lossy_assist.models import row_model


NEW = 20
ENDS = {"max_new_tokens": NEW, "do_sample": False}


@pytest.fixture
def target():
    return hla.enable(llama())


@pytest.fixture
def draft():
    return near(llama())


def reference(model, prompts=None, **settings):
    """Transformers' own greedy text, whatever `generate` the object carries."""
    return GenerationMixin.generate(model, **(prompts or ragged()), **ENDS | settings)


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# -- enable and disable ------------------------------------------------------------------------------------------------


def test_enable_and_disable_are_idempotent_and_per_instance(draft):
    target, other = llama(), llama()
    before = dict(vars(target))
    assert hla.enable(target) is target and hla.enable(target) is target
    assert hla.is_enabled(target) and not hla.is_enabled(other)
    assert type(target).generate is GenerationMixin.generate and "generate" not in vars(other)
    refused(lambda: other.generate(**one(), **ENDS, assistant_model=draft, lossy_policy="strict"), "lossy_policy")
    assert hla.disable(target) is target and hla.disable(target) is target
    assert not hla.is_enabled(target) and vars(target).keys() == before.keys()
    refused(lambda: target.generate(**one(), **ENDS, assistant_model=draft, lossy_policy="strict"), "lossy_policy")


def test_a_generate_that_the_instance_already_has_is_put_back():
    target = llama()
    target.generate = lambda *args, **kwargs: "from a custom_generate repository"
    carried = target.generate
    hla.enable(target)
    assert target.generate(**one()) == "from a custom_generate repository"
    assert hla.disable(target).generate is carried


def test_without_a_policy_the_call_is_left_to_transformers(target, draft):
    for extra in ({}, {"assistant_model": draft}, {"do_sample": True}, {"do_sample": True, "assistant_model": draft}):
        settings, outs = ENDS | {"return_dict_in_generate": True, "output_scores": True} | extra, []
        for model in (llama(), target):
            torch.manual_seed(1)
            outs.append(model.generate(**one(), **settings))
        assert type(outs[0]) is type(outs[1]) and "speculation" not in outs[1]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert torch.equal(torch.cat(outs[0].scores), torch.cat(outs[1].scores))


def test_positional_arguments_are_understood(target, draft):
    config = GenerationConfig(**ENDS)
    for ours in ({"assistant_model": draft, "lossy_policy": "strict"}, {}):
        assert torch.equal(target.generate(one()["input_ids"], config, **ours), reference(target, one()))


def test_save_pretrained_writes_the_same_bytes(target, draft, tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    target.generate(**one(), **ENDS, assistant_model=draft, lossy_policy="svip")
    target.save_pretrained(tmp_path / "enabled")
    assert files(tmp_path / "plain") == files(tmp_path / "enabled")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "enabled")
    assert not hla.is_enabled(again) and torch.equal(reference(again), reference(target))


def test_a_deep_copy_generates_with_its_weights(target, draft):
    twin = copy.deepcopy(target)
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.roll(1, dims=0))
    assert not torch.equal(reference(twin), reference(target))
    ours = ENDS | {"assistant_model": draft, "lossy_policy": "strict"}
    assert torch.equal(twin.generate(**ragged(), **ours), reference(twin))
    hla.disable(twin)
    assert hla.is_enabled(target) and not hla.is_enabled(twin)


def test_a_generate_that_takes_anything_is_given_its_arguments_by_transformers_names(draft):
    class Mine(LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    target, expected, config = llama(), reference(llama(), one()), GenerationConfig(**ENDS)
    target.__class__ = Mine
    text = hla.enable(target).generate(one()["input_ids"], config, assistant_model=draft, lossy_policy="strict")
    assert torch.equal(text, expected)


def test_an_argument_given_twice_is_refused_as_python_does(target, draft):
    ids = one()["input_ids"]
    settings = ENDS | {"assistant_model": draft, "lossy_policy": "strict"}
    refused(lambda: target.generate(ids, inputs=ids + 1, **settings), "values for argument 'inputs'", TypeError)
    refused(lambda: target.generate(*[ids] * 30, lossy_policy="strict"), "too many positional arguments", TypeError)


# -- other ways in ------------------------------------------------------------------------------------------------------


def by_runner(*args, settings=None, **call):
    """The statistics of a call through a `Runner`, whose text is the target's own."""
    runner = hla.Runner("strict", *args, settings=settings)
    out = llama().generate(**one(), **ENDS | call, custom_generate=runner, return_dict_in_generate=True)
    assert torch.equal(out.sequences, reference(llama(), one()))
    return out.speculation


@pytest.mark.full
def test_a_runner_reads_the_drafts_settings_at_the_call():
    itself = llama()
    assert by_runner(itself).num_spec_tokens == 5  # none of Transformers' defaults, 20 for one
    for gamma in (2, 12, 20):
        assert by_runner(itself, num_assistant_tokens=gamma).num_spec_tokens == gamma
    assert by_runner(itself, num_assistant_tokens=3, settings={"num_assistant_tokens": 3}).num_spec_tokens == 3
    config = GenerationConfig(**ENDS, num_assistant_tokens=2, return_dict_in_generate=True)
    out = llama().generate(**one(), generation_config=config, custom_generate=hla.Runner("strict", itself))
    assert out.speculation.num_spec_tokens == 2
    stops = by_runner(itself, assistant_confidence_threshold=1.0).total().steps  # after every token
    assert max(sent for sent, _ in stops) == 1
    assert by_runner(itself, num_assistant_tokens_schedule="heuristic").num_spec_tokens > 5


def test_a_runner_drafts_as_the_call_says():
    assert by_runner(prompt_lookup_num_tokens=4).num_spec_tokens == 4
    refused(lambda: by_runner(llama(), prompt_lookup_num_tokens=3), "are two ways to draft")


def test_a_runner_says_who_passed_what_it_refuses():
    runner, model = hla.Runner("strict", llama()), llama()
    refused(lambda: model.generate(**one(), **ENDS, num_beams=2, custom_generate=runner), "leave num_beams out")
    model.generation_config.num_beams = 2
    refused(lambda: model.generate(**one(), **ENDS, custom_generate=runner), "config has it, so pass num_beams=1")


TEXTS = [" ".join(words()[i : i + n]) for i, n in ((3, 5), (40, 8), (70, 2))]


def test_a_text_generation_pipeline_takes_a_policy(target, draft):
    """Draft and policy in the call; the draft at construction (as Transformers has it) and the policy in the call."""
    plain = pipeline("text-generation", model=llama(), tokenizer=tokenizer(), device="cpu")
    settings, calls = ENDS | {"batch_size": 3}, []
    expected = plain(TEXTS, **settings)
    draft.register_forward_pre_hook(lambda *_: calls.append(1))
    for built, given in (({}, {"assistant_model": draft}), ({"assistant_model": draft}, {})):
        calls.clear()
        pipe = pipeline("text-generation", model=target, tokenizer=tokenizer(), device="cpu", **built)
        assert pipe(TEXTS, **settings, **given, lossy_policy="svip") == expected and calls


@peft_warns
@pytest.mark.parametrize("wrapped", ["both", pytest.param("draft", marks=pytest.mark.full)])
def test_lora_adapters_take_part(wrapped):
    """With "both", the draft has the target's own adapter, and is only any good if that runs."""
    prompts, base, draft = ragged(), llama(), lora(near(llama()), 0)
    target = lora(llama(), 0) if wrapped == "both" else base
    expected = target.generate(**prompts, **ENDS)
    assert wrapped == "draft" or not torch.equal(expected, reference(base, prompts)), "the adapter must matter"
    assert hla.enable(target) is target and hla.is_enabled(target)
    ours = ENDS | {"assistant_model": draft, "lossy_policy": "strict", "return_dict_in_generate": True}
    out = target.generate(**prompts, **ours)
    assert torch.equal(out.sequences, expected)
    if wrapped == "both":
        assert out.speculation.draft_acceptance_rate > 0.2
    with target.disable_adapter() if wrapped != "draft" else torch.no_grad():
        bare = target.generate(**prompts, **ENDS, assistant_model=near(llama()), lossy_policy="strict")
    assert torch.equal(bare, reference(base, prompts))
    assert not hla.is_enabled(hla.disable(target))


@peft_warns
@pytest.mark.parametrize("packing", [False, True])
def test_an_adapter_for_each_row(packing, monkeypatch):
    """Rows of one batch have PEFT's `adapter_names`, and end at different places."""
    import peft

    if packing:  # at any gain
        monkeypatch.setattr(row_model, "PACKED_FROM", 0)
        monkeypatch.setattr(row_model, "PACKED_BELOW", 1.0)
    target = llama()
    draft = near(target, 0.1)
    model = lora(target, 1)
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model.add_adapter("second", config)
    model.double()
    names = ["default", "second", "__base__", "second"]
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": list(range(4, 24)), "pad_token_id": 0}
    inputs = ragged((0, 2, 4, 5))
    expected = model.generate(**inputs, **settings, adapter_names=names)
    ends = {(row == 0).sum().item() for row in expected[:, 9:]}
    assert len(ends) > 2  # rows ended apart
    hla.enable(model)
    for drafted in (2, 5):
        ours = {"assistant_model": draft, "lossy_policy": "strict", "num_assistant_tokens": drafted}
        assert torch.equal(model.generate(**inputs, **settings, adapter_names=names, **ours), expected)
    assert torch.equal(model.generate(**inputs, **settings, adapter_names=names), expected)


@peft_warns
def test_learned_prompts_are_refused():
    """PEFT prepends them where Transformers prepares inputs, which rounds do not pass."""
    peft = pytest.importorskip("peft")
    settings = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 5}
    for kind in (peft.PromptTuningConfig, peft.PrefixTuningConfig):
        tuned, plain = peft.get_peft_model(llama(), kind(**settings)).eval(), llama()
        for target, draft, name in ((plain, tuned, "assistant"), (tuned, plain, "target")):
            with pytest.raises(ValueError, match=rf"^the {name} has a learned prompt[^\n]*$"):
                hla.enable(target).generate(**one(), **ENDS, assistant_model=draft, lossy_policy="strict")
