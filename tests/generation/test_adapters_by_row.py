"""PEFT's `adapter_names`: an adapter for each row of a batch, whose rows end at different places."""

import copy

import pytest
import torch
from support import small, tiny
from support.tiny import lora, peft_warns
from transformers import Phi3Config, Phi3ForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.models import row_model


@peft_warns
@pytest.mark.parametrize("packing", [False, True])
def test_an_adapter_for_each_row(packing, monkeypatch):
    import peft

    if packing:  # at any gain
        monkeypatch.setattr(row_model, "PACKED_FROM", 0)
        monkeypatch.setattr(row_model, "PACKED_BELOW", 1.0)
    target = small.llama()
    draft = small.near(target, 0.1)
    model = lora(target, 1)
    torch.manual_seed(2)
    model.add_adapter(
        "second", peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    model.double()
    names = ["default", "second", "__base__", "second"]
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": list(range(4, 24)), "pad_token_id": 0}
    inputs = small.ragged((0, 2, 4, 5))
    expected = model.generate(**inputs, **settings, adapter_names=names)
    ends = {(row == 0).sum().item() for row in expected[:, 9:]}
    assert len(ends) > 2  # rows ended apart
    hla.enable(model)
    for drafted in (2, 5):
        out = model.generate(
            **inputs, **settings, adapter_names=names, assistant_model=draft, lossy_policy="strict", num_assistant_tokens=drafted
        )  # fmt: skip
        assert torch.equal(out, expected)
    assert torch.equal(model.generate(**inputs, **settings, adapter_names=names), expected)


@pytest.mark.full
@peft_warns
def test_rows_that_would_be_written_anew_one_by_one_are_refused():
    """Phi-3 behind its original length: a forward of one row would be given the adapter of row 0."""
    import peft

    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 3.0, 4.0, 6.0]}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 24,
    } | factors
    sizes = tiny.DECODER | {"max_position_embeddings": 96}
    target = Phi3ForCausalLM(
        Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=24, sliding_window=None)
    ).eval()
    draft, model = copy.deepcopy(target), peft.get_peft_model(
        target, peft.LoraConfig(r=4, target_modules=["qkv_proj"], init_lora_weights=False)
    ).eval()  # fmt: skip
    hla.enable(model)
    inputs = tiny.prompts((9, 7))
    call = {"assistant_model": draft, "lossy_policy": "strict", "do_sample": False}
    by_row = call | {"adapter_names": ["default", "__base__"]}
    model.generate(**inputs, **call, max_new_tokens=30)
    assert model.generate(**inputs, **by_row, max_new_tokens=5).shape == (2, 14)
    with pytest.raises(ValueError, match=r"^adapter_names [^\n]* beyond 24 tokens [^\n]*set_adapter$"):
        model.generate(**inputs, **by_row, max_new_tokens=30)  # last: PEFT leaves its hooks behind after an error
    untried = hla.enable(copy.deepcopy(model))
    with pytest.raises(ValueError, match=r"^Phi3ForCausalLM [^\n]*call it once without adapter_names[^\n]*$"):
        untried.generate(**inputs, **by_row, max_new_tokens=5)
