"""An EAGLE-3 network before its training: the target's widths, the tokens that the target writes most, and what it can have of the target's own.

Few texts teach a network of random numbers little. This one begins with the target's head, and hands on the state of the last layer that is read,
which is nearly what that head reads (docs/log.md has what that brings).
"""

from typing import Any

import torch
from transformers import LlamaConfig

from ...drafters.networks.eagle_network import Eagle3Config, Eagle3Network
from ...models.introspection import base_of
from .data import Texts
from .settings import FitSettings


def network_for(target: Any, texts: Texts, settings: FitSettings) -> Eagle3Network:
    """An untrained network of the target's widths. Its head begins as the target's own, and its states as those of the last layer that it reads."""
    base = base_of(target)
    text, embeddings = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight
    vocabulary, width = embeddings.shape
    heads = text.num_attention_heads
    layer = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=settings.intermediate_size or _intermediate(text),
        num_hidden_layers=settings.layers, num_attention_heads=heads, num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or width // heads, max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
    )  # fmt: skip
    kept = _most_frequent(texts, vocabulary, settings.vocabulary)
    config = Eagle3Config(layer, texts.layers, len(kept), text.hidden_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = Eagle3Network(config, own_embeddings=False)
        with torch.no_grad():
            for weight in network.parameters():
                if weight.dim() > 1:
                    torch.nn.init.normal_(weight, std=0.02)
            network.d2t.copy_(kept - torch.arange(len(kept)))
            if text.hidden_size == width:  # else the target's head reads other numbers than its blocks write
                network.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
                network.lm_head.weight.copy_(rows_of(base.get_output_embeddings(), kept, width))
    return network


@torch.no_grad()
def rows_of(head: torch.nn.Module, kept: torch.Tensor, width: int) -> torch.Tensor:
    """The rows `kept` of the weights of a target's head that reads `width` numbers, (kept, width), float32, on the CPU."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight[kept.to(weight.device)].float().cpu()
    # The weights are packed (int8, 4 bits), each kind in its way. All heads say what they make of unit vectors: their columns.
    like = next((its for its in (*head.parameters(), *head.buffers()) if its.is_floating_point()), None)
    dtype, device = (torch.float32, "cpu") if like is None else (like.dtype, like.device)
    columns = [head(units)[:, kept.to(device)] for units in torch.eye(width, dtype=dtype, device=device).split(64)]
    nothing = head(torch.zeros(1, width, dtype=dtype, device=device))[:, kept.to(device)]
    return (torch.cat(columns) - nothing).T.float().cpu()


def _intermediate(text: Any) -> int:
    """The width of a target's MLP, under the names that it has."""
    for name in ("intermediate_size", "n_inner", "ffn_dim"):
        if isinstance(getattr(text, name, None), int):
            return int(getattr(text, name))
    return int(4 * text.hidden_size)


def _most_frequent(texts: Texts, vocabulary: int, count: int | None) -> torch.Tensor:
    """The ids of the `count` tokens that the target wrote most often, in order; ties go to the lower ids."""
    if count is None or count >= vocabulary:
        return torch.arange(vocabulary)
    counts = texts.counts(vocabulary)
    return counts.sort(descending=True, stable=True).indices[:count].sort().values
