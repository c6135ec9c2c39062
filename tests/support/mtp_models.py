"""What Transformers drafts with from a target's states: tiny targets with multi-token prediction layers, as files, for Transformers reads
those layers from the checkpoint alone; and DFlash models."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.transformers_drafters import DFLASH_SINCE, VERSION


def written(folder, layers, vocabulary=6, seed=0):
    """Write a random DeepSeek-V3 of two layers with `layers` MTP layers. Of few tokens some drafts are right by chance."""
    from transformers.modeling_layers import MtpModel

    config = DeepseekV3Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1,
        q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, num_mtp_layers=layers,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = DeepseekV3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in MtpModel(model, layers).state_dict().items():
        if not name.startswith("layers."):
            continue  # the target's own
        if tensor.dim() > 1:
            tensor = torch.randn(tensor.shape) * 0.3  # Transformers leaves some of them as the memory was
        _, number, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        here = f"model.layers.{2 + int(number)}"
        if rest.endswith("experts.gate_up_proj"):
            for e, both in enumerate(tensor):
                for part, its in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    weights[f"{here}.mlp.experts.{e}.{part}.weight"] = its.contiguous()
        elif rest.endswith("experts.down_proj"):
            for e, its in enumerate(tensor):
                weights[f"{here}.mlp.experts.{e}.down_proj.weight"] = its.contiguous()
        else:
            weights[f"{here}.{rest}"] = tensor.contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def target(folder):
    """Load one. Transformers knows MTP layers by their numbers in the published checkpoint, of which this one has others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9].*"]
    return hla.enable(model)


def dflash(target, layers=2, block=4, seed=0):
    """A random DFlash model of Transformers' for `target`; skips the test where Transformers does not run one rightly."""
    if VERSION < DFLASH_SINCE:
        pytest.skip("this Transformers hands DFlash models other states")
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    text = target.config.get_text_config(decoder=True)
    config = MuseGlimmerAssistantConfig(
        hidden_size=text.hidden_size, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        block_size=block, mask_token_id=1, target_layer_ids=[0, text.num_hidden_layers - 1], sliding_window=256, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return MuseGlimmerAssistantModel(config).to(target.dtype).eval()
