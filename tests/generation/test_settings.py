"""Where a setting comes from: the call, then the policy, then the configs, as Transformers has it, with nothing left behind."""

import copy

import pytest
import torch
from support.refusals import refused
from support.small import PAD, llama, near, one, ragged, tokenizer
from transformers import GenerationConfig, GenerationMixin

import hf_lossy_assist as hla


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


def test_a_generation_config_object_is_honoured_and_not_changed(target, draft):
    config = GenerationConfig(max_new_tokens=11, do_sample=False, repetition_penalty=1.5, pad_token_id=PAD)
    before, prompts = config.to_dict(), ragged()
    expected = target.generate(**ragged(), generation_config=config)
    ours = target.generate(**prompts, generation_config=config, assistant_model=draft, lossy_policy="svip")
    assert torch.equal(expected, ours) and config.to_dict() == before
    assert all(torch.equal(prompts[name], value) for name, value in ragged().items())


def test_prompt_lookup_in_the_models_config_is_honoured(target):
    target.generation_config.prompt_lookup_num_tokens = 4
    out = target.generate(**one(), **ENDS, lossy_policy="strict", return_dict_in_generate=True)
    assert torch.equal(out.sequences, reference(llama(), one())) and out.speculation.draft_acceptance_rate > 0


@pytest.mark.parametrize("given", [False, True], ids=["alone", "with a config"])
def test_none_at_the_call_switches_off_what_the_models_config_says(target, draft, given):
    first = reference(target, one())[0, 9:]
    target.generation_config.eos_token_id = int(first[6])
    target.generation_config.repetition_penalty = 1.9
    off = {"eos_token_id": None, "repetition_penalty": None, "pad_token_id": PAD}
    settings = ENDS | off | ({"generation_config": GenerationConfig(top_k=0)} if given else {})
    expected = GenerationMixin.generate(target, **one(), **settings)
    assert expected.shape[1] == 9 + NEW
    ours = {"assistant_model": draft, "lossy_policy": "strict"}
    assert torch.equal(target.generate(**one(), **settings, **ours), expected)
    target.generation_config.top_k = 2
    ours |= {"do_sample": True, "top_k": None, "max_new_tokens": 1}
    ours |= {"output_scores": True, "return_dict_in_generate": True}
    assert target.generate(**one(), **ours).scores[0].isfinite().all()


def longest(target, draft, **settings):
    given = {"lossy_policy": "strict", "assistant_model": draft, "return_dict_in_generate": True} | settings
    out = target.generate(**one(), **ENDS, **given)
    assert torch.equal(out.sequences, reference(llama(), one()))
    return out.speculation.num_spec_tokens, max(sent for sent, _ in out.speculation.total().steps)


COUNT, SURE, SCHEDULE = "num_assistant_tokens", "assistant_confidence_threshold", "num_assistant_tokens_schedule"
FOUR, NINE = {"lossy_policy": hla.Constant(4)}, {"lossy_policy": hla.SVIP(h=9.0)}
FROM = (  # the draft's config, the call, the limit of a draft and the longest one
    ({}, {}, 5, 5), ({COUNT: 3}, {}, 3, 3), ({COUNT: 3}, FOUR, 4, 4), ({COUNT: 3}, FOUR | {COUNT: 2}, 2, 2), ({COUNT: 3}, {COUNT: 6}, 6, 6),
    ({COUNT: 3}, {"lossy_policy": hla.SVIP(h=9.0, max_draft=8)}, 8, 8), ({COUNT: 3}, NINE | {COUNT: 7}, 7, 7),
    ({COUNT: 3, SURE: 1.0}, {}, 3, 1), ({COUNT: 3, SURE: 1.0}, {SURE: 0.0}, 3, 3), ({COUNT: 3, SURE: 1.0}, FOUR, 4, 4),
    ({COUNT: 3}, {SURE: 1.0, COUNT: 4}, 4, 1), ({COUNT: 3, SCHEDULE: "heuristic"}, {SCHEDULE: "constant"}, 3, 3),
)  # fmt: skip


@pytest.mark.full
def test_draft_settings_come_from_the_call_then_the_policy_then_the_drafts_config(target):
    for config, call, limit, most in FROM:
        itself = llama()
        vars(itself.generation_config).update(config)
        assert longest(target, itself, **call) == (limit, most), (config, call)
    for config, call in (({COUNT: 3, SCHEDULE: "heuristic"}, {}), ({COUNT: 3}, {SCHEDULE: "heuristic"})):  # 3, 5, 7
        itself = llama()
        vars(itself.generation_config).update(config)
        assert longest(target, itself, **call)[1] > 3, (config, call)


def test_draft_settings_in_a_generation_config_of_the_call_count_as_at_the_call(target):
    """Neither Transformers' defaults nor the target's own config, which Transformers does not read for a draft either."""

    def with_config(config, **settings):
        config.update(**ENDS, return_dict_in_generate=True)
        out = target.generate(
            **one(), generation_config=config, assistant_model=llama(), lossy_policy="strict", **settings
        )
        return out.speculation.num_spec_tokens

    assert with_config(GenerationConfig(num_assistant_tokens=2)) == 2
    assert with_config(GenerationConfig(num_assistant_tokens=2), num_assistant_tokens=3) == 3
    assert with_config(GenerationConfig(num_assistant_tokens_schedule="heuristic")) > 5
    target.generation_config.num_assistant_tokens = 2
    assert with_config(GenerationConfig()) == with_config(copy.deepcopy(target.generation_config)) == 5
    defaults = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.4}
    assert with_config(GenerationConfig(num_assistant_tokens=20, **defaults)) == 5
    assert with_config(GenerationConfig(), num_assistant_tokens=20) == 20


def test_a_wrong_setting_of_the_drafts_config_is_named_as_its(target):
    for name, value in ((COUNT, -3), (SCHEDULE, "often"), (SURE, 2.0)):
        itself = llama()
        setattr(itself.generation_config, name, value)
        line = f"^{name} in the draft's generation config: expected .*{value}"
        refused(lambda itself=itself: longest(target, itself), line)


def test_no_state_leaks_into_the_drafts_or_the_targets_config(target, draft):
    draft.generation_config.num_assistant_tokens_schedule = "heuristic"
    before = [m.generation_config.to_dict() for m in (target, draft)]
    for settings in ({COUNT: 9}, {SCHEDULE: "constant"}, {SURE: 0.3}, {"lossy_policy": "svip"}):
        longest(target, draft, **settings)
    assert [m.generation_config.to_dict() for m in (target, draft)] == before
    assert longest(target, draft) == longest(target, draft)


def test_two_tokenizers_that_agree_are_one(target, draft):
    """Then nothing is translated, and batches work."""
    settings = {"tokenizer": tokenizer(), "assistant_tokenizer": tokenizer(), "assistant_model": draft}
    assert torch.equal(target.generate(**ragged(), **ENDS, **settings, lossy_policy="svip"), reference(target))
