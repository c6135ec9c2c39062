"""Tiny random DFlash networks."""

import torch
from transformers import Qwen3Config

from hf_lossy_assist.drafters.networks.dflash_network import DFlashConfig, DFlashNetwork


def network(target, seed=0, layers=1, block=5, target_layers=(0, 1, 2), kept=None, **flags):
    text = target.config.get_text_config(decoder=True)
    layer = Qwen3Config(
        vocab_size=text.vocab_size, hidden_size=text.hidden_size, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256,
    )  # fmt: skip
    config = DFlashConfig(layer, target_layers, block, text.vocab_size - 1, text.hidden_size, draft_vocab_size=kept, **flags)  # fmt: skip
    torch.manual_seed(seed)
    out = DFlashNetwork(config)
    with torch.no_grad():
        for weight in out.parameters():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1), std=0.3)
        if kept:
            out.d2t.copy_(torch.randperm(text.vocab_size)[:kept].sort().values - torch.arange(kept))
    return out.to(target.dtype).eval().requires_grad_(False)
