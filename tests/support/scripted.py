"""A model that writes a given text."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_lossy_assist as hla


def scripted(tokenizer: Any, script: list[int], width: int = 96) -> GPT2LMHeadModel:
    """A model of up to `width` tokens, whose token at each place is that of `script`, whatever stands before it."""
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=width, n_embd=width, n_inner=1, n_layer=1, n_head=1, tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=end,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.transformer.h.parameters():
            weight.zero_()
        model.transformer.wte.weight.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(width))
    write_script(model, tokenizer, script)
    hla.enable(model)
    return model


@torch.no_grad()
def write_script(model: GPT2LMHeadModel, tokenizer: Any, script: list[int]) -> None:
    """Have a model of `scripted` write another script."""
    width = model.config.n_positions
    model.lm_head.weight.zero_()
    model.lm_head.weight[(script + [tokenizer.eos_token_id] * width)[1 : width + 1], torch.arange(width)] = 1.0
