"""Tiny models that keep recurrent states or convolution windows, and what they should hold of a text."""

import copy
from functools import cache

import tiny_models
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from hf_lossy_assist.models.facts import CACHE, forward_of
from support import small


# One of each kind of recurrence, with what else is peculiar to it.
KINDS = {
    "qwen3_next": "a gated delta rule",
    "qwen3_5_text": "a gated delta rule, no mixture of experts",
    "olmo_hybrid": "a gated delta rule of other projections",
    "kimi_linear": "decay by channel; its convolution writes in place",
    "mamba2": "Mamba-2 and no attention, and so no positions",
    "bamba": "Mamba-2",
    "falcon_h1": "Mamba-2 and attention in every layer",
    "granitemoehybrid": "Mamba-2, mixtures of experts",
    "nemotron_h": "Mamba-2 with a least time in prompts, layers that keep nothing",
    "zamba2": "Mamba-2 with a least time in prompts, shared attention",
    "lfm2": "convolutions alone",
    "lfm3": "convolutions, full and sliding attention",
}
VOCABULARY = 97


@cache
def model(model_type: str, seed: int = 0):
    """A lively tiny one in float32, whose texts go on to the length that was asked for."""
    out = tiny_models.tiny_model(model_type, "causal", "eager", seed)
    out.generation_config.eos_token_id, out.generation_config.pad_token_id = None, 0
    return out


@cache
def few_token_model(model_type: str, size: int, seed: int = 0, attention: str = "sdpa"):
    """One whose laws over `size` tokens are neither flat nor certain."""
    config = tiny_models.tiny_config(model_type, vocab_size=size)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    torch.manual_seed(seed)
    out = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    return small.louder(out, 2.0)


def drafts(of):
    """Draft models that are right often, rarely and never."""
    never = copy.deepcopy(of)
    with torch.no_grad():
        never.get_output_embeddings().weight.neg_()
    return {"often": small.near(of, 0.02), "rarely": small.near(of, 0.3), "never": never}


@torch.no_grad()
def states(of, text: list[int], prompt: int):
    """Return the states in Transformers' own cache for a text whose first `prompt` tokens are read at once and the others one by one."""
    held, run, read = DynamicCache(config=of.config), forward_of(of, of), 0
    for part in (text[:prompt], *([token] for token in text[prompt:])):
        places = read + torch.arange(len(part))[None]
        run(input_ids=torch.tensor([part]), position_ids=places, **{CACHE: held}, use_cache=True)
        read += len(part)
    return windows_and_states(held)


def windows_and_states(held):
    """Return (window, state) for each layer that has some; either may be None."""
    layers = [layer for layer in held.layers if hasattr(layer, "conv_states")]
    return [(layer.conv_states[i], layer.recurrent_states[i]) for layer in layers for i in layer.conv_states]
