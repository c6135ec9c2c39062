"""Shared by several tests."""

import pytest
import torch


# PEFT asks Transformers for a property that Transformers has renamed.
peft_warns = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def lora(model, seed):
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()
