"""What a model is refused for is the model's own reason, in one line."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import ImageGPTConfig, ImageGPTForCausalImageModeling


sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import supported_models
import tiny_models

import hf_lossy_assist as hla
from hf_lossy_assist.trials import RECURRENT, why_not_rows


def refusal(model_type, kind="causal", **settings):
    model = tiny_models.tiny_model(model_type, kind, "eager")
    with pytest.raises(ValueError) as error:
        hla.enable(model).generate(
            **supported_models.prompts((5,), 0), max_new_tokens=4, do_sample=False, assistant_model=copy.deepcopy(model),
            lossy_policy="strict", **settings,
        )  # fmt: skip
    assert supported_models.refused_by_us(error.value), str(error.value)
    return str(error.value)


@pytest.mark.parametrize("model_type", ["mamba", "rwkv", "minimax"])
def test_a_recurrent_state_is_given_as_the_reason(model_type):
    assert RECURRENT in refusal(model_type)


def test_a_cache_that_the_models_own_settings_switch_off_is_named_as_theirs():
    assert "the generation config says use_cache=False" in refusal("mpt")
    assert "the generation config" not in refusal("llama", use_cache=False)


def test_a_model_is_tried_once_and_in_eval_mode():
    model = tiny_models.tiny_model("opt", "causal", "eager").train()
    frozen = model.get_decoder().layers[0].eval()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(module.get_decoder().layers[1].training))
    assert why_not_rows(model) is None
    assert 0 < len(seen) < 20 and not any(seen)
    assert model.training and not frozen.training
    tried = len(seen)
    assert why_not_rows(model) is None and len(seen) == tried


def test_a_vocabulary_is_what_the_output_layer_writes():
    """ImageGPT reads one id more, which processors that are given the size of the vocabulary must not be told of."""
    torch.manual_seed(0)
    model = ImageGPTForCausalImageModeling(
        ImageGPTConfig(vocab_size=98, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    )
    tiny_models.lively(model.eval(), 2)
    inputs = {
        "input_ids": torch.tensor([[97, 3, 4, 5, 6]]),
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
    }
    inputs |= {"eos_token_id": None, "bad_words_ids": [[5], [7, 8]], "repetition_penalty": 1.2}
    own = model.generate(**inputs)
    ours = hla.enable(model).generate(**inputs, assistant_model=copy.deepcopy(model), lossy_policy="strict")
    assert torch.equal(own, ours) and len(set(own[0].tolist())) > 8
