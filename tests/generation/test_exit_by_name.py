"""`assistant_early_exit=n`: the model's first n layers draft, as `hla.early_exit(model, n)` does, whatever the number of rows."""

import pytest
import torch
from support import tiny
from transformers import GenerationConfig

import hf_lossy_assist as hla


def generate(model, **settings):
    given = {"lossy_policy": "strict", "max_new_tokens": 12, "do_sample": False}
    return hla.enable(model).generate(**tiny.prompts((9,)), **given | settings)


@pytest.mark.parametrize("value", [-1, 0, 2, 10**6, True, 1.0, "1"], ids=repr)
def test_a_number_of_layers_that_the_model_has_not_got_is_refused(value):
    model = tiny.build("llama")
    with pytest.raises((ValueError, TypeError), match=r"^assistant_early_exit: expected[^\n]*$"):
        generate(model, assistant_early_exit=value)
    model.generation_config.assistant_early_exit = value
    with pytest.raises((ValueError, TypeError), match=r"^assistant_early_exit: expected[^\n]*$"):
        generate(model)
    model.generation_config.assistant_early_exit = None
    assert model.config.num_hidden_layers == 2
    assert torch.equal(
        model.generate(**tiny.prompts((9,)), max_new_tokens=24, do_sample=False),
        tiny.greedy(tiny.shared("llama"), tiny.prompts((9,))),
    )


@pytest.mark.full(every=3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_leaves_early_or_says_why_not(name):
    model = tiny.build(name)
    if name in ("t5", "lfm2"):
        with pytest.raises(
            ValueError, match=r"^assistant_early_exit: \w+ (keeps a recurrent state|is no decoder)[^\n]*$"
        ):
            generate(model, assistant_early_exit=1)
    else:
        expected = tiny.greedy(model, tiny.prompts((9,)), max_new_tokens=12)
        assert torch.equal(generate(model, assistant_early_exit=1), expected)
    assert model.config.num_hidden_layers == 2


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_its_distributions_serve_stops_and_rules():
    """As those of `hla.early_exit(model, n)`."""
    model, settings = tiny.build("llama"), {"assistant_early_exit": 1, "return_dict_in_generate": True}
    for policy in ("svip", hla.KLJudge(0.1)):
        by_name = generate(model, lossy_policy=policy, **settings)
        by_model = generate(
            model,
            lossy_policy=policy,
            **settings | {"assistant_early_exit": None},
            assistant_model=hla.early_exit(model, 1),
        )
        assert torch.equal(by_name.sequences, by_model.sequences)
        assert by_name.speculation.total().steps == by_model.speculation.total().steps


@pytest.mark.parametrize("where", ["the model's config", "a config at the call"])
def test_a_policy_in_a_config_is_not_one_for_the_draft(where):
    """The early exit drafts by the same model's `generate`, with the same config."""
    model, settings = hla.enable(tiny.build("llama")), {"max_new_tokens": 12, "do_sample": False}
    config = model.generation_config if where == "the model's config" else GenerationConfig(**settings)
    config.lossy_policy, config.assistant_early_exit = hla.LossyPolicy(), 1
    given = settings if where == "the model's config" else {"generation_config": config}
    out = model.generate(**tiny.prompts((9,)), **given)
    assert torch.equal(out, tiny.greedy(tiny.shared("llama"), tiny.prompts((9,)), max_new_tokens=12))


def test_a_drafts_own_policy_does_not_disturb_transformers_own_loop():
    model, draft = tiny.shared("llama"), hla.enable(tiny.draft_of(tiny.shared("llama"), "often"))
    draft.generation_config.lossy_policy = hla.LossyPolicy()
    settings = {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(**tiny.prompts((9,)), **settings, assistant_model=draft)
    assert torch.equal(out, tiny.greedy(model, tiny.prompts((9,)), max_new_tokens=12))


def test_an_exit_in_the_config_does_not_take_an_assistants_place():
    """By the runner itself, where the generation config is not looked through before."""
    model, draft = tiny.build("llama"), tiny.draft_of(tiny.shared("llama"), "often")
    model.generation_config.assistant_early_exit = -1
    out = model.generate(
        **tiny.prompts((9,)), max_new_tokens=12, do_sample=False, custom_generate=hla.Runner("strict", draft)
    )
    assert torch.equal(out, tiny.greedy(tiny.shared("llama"), tiny.prompts((9,)), max_new_tokens=12))
