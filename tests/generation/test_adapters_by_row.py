"""PEFT's `adapter_names`: an adapter for each row of a batch, whose rows end at different places."""

import pytest
import torch
from support import small
from support.tiny import lora, peft_warns

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
