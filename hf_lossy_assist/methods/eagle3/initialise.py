"""Initialise a draft network, EAGLE-3's or DSpark's, from the target's widths, its most frequent tokens, and its head.

A network of random numbers learns little from few texts. This one begins with the target's head and passes on the state of the last layer read,
which is nearly that head's input (results in docs/log.md).
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3Config

from ...drafters.networks.corrected_networks import DSparkConfig, DSparkNetwork
from ...drafters.networks.eagle_network import Eagle3Config, Eagle3Network
from ...models.introspection import base_of
from ..drafter_settings import DrafterFitSettings, DSparkFitSettings
from .collect import TextDataset


Network = TypeVar("Network", Eagle3Network, DSparkNetwork)


def make_network(target: PreTrainedModel, texts: TextDataset, settings: DrafterFitSettings) -> Eagle3Network:
    """Create an untrained network."""
    sizes = layer_sizes(target, settings)
    tokens = find_most_frequent(texts, sizes["vocab_size"], settings.vocabulary)
    width = target.config.get_text_config(decoder=True).hidden_size
    config = Eagle3Config(LlamaConfig(**sizes), texts.layers, len(tokens), width)
    return start_as_target(lambda: Eagle3Network(config, has_embeddings=False), target, tokens, settings.seed)


def make_dspark_network(target: PreTrainedModel, texts: TextDataset, settings: DSparkFitSettings) -> DSparkNetwork:
    """Create an untrained network. Blocks are filled with the token that the texts have least often, if possible never."""
    sizes = layer_sizes(target, settings)
    tokens = find_most_frequent(texts, sizes["vocab_size"], settings.vocabulary)
    counts = count_tokens(texts, sizes["vocab_size"], answers=False)
    mask = int((counts == counts.min()).nonzero().max())
    width = target.config.get_text_config(decoder=True).hidden_size
    config = DSparkConfig(
        Qwen3Config(**sizes),
        texts.layers,
        settings.steps,
        mask,
        width,
        from_anchor=True,
        draft_vocab_size=len(tokens),
        rank=settings.rank,
        markov=settings.markov,
    )
    return start_as_target(lambda: DSparkNetwork(config), target, tokens, settings.seed)


def layer_sizes(target: PreTrainedModel, settings: DrafterFitSettings) -> dict[str, Any]:
    """Return the sizes of a decoder layer as wide as the target's embeddings, by their names in configs."""
    base = base_of(target)
    text, embeddings = base.config.get_text_config(decoder=True), base.get_input_embeddings().weight
    vocabulary, width = embeddings.shape
    heads = text.num_attention_heads
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": settings.intermediate_size or _read_intermediate_size(text),
        "num_hidden_layers": settings.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None) or heads,
        "head_dim": getattr(text, "head_dim", None) or width // heads,
        "max_position_embeddings": text.max_position_embeddings,
        "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
    }


def start_as_target(make: Callable[[], Network], target: PreTrainedModel, tokens: torch.Tensor, seed: int) -> Network:
    """Return a network of random numbers for the draft vocabulary `tokens` (n,), whose head starts as the target's, and whose input from the
    target's states as those of the last layer it reads.
    """
    base = base_of(target)
    width = base.get_input_embeddings().weight.shape[1]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        network = make()
        for weight in network.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.02)
        network.d2t.copy_(tokens - torch.arange(len(tokens)))
        if network.config.target_hidden_size == width:  # else the target's head has another input width
            assert network.lm_head is not None, "it has one over these tokens"
            network.fc.weight.mul_(0.1)[:, -width:] += torch.eye(width)
            network.lm_head.weight.copy_(read_rows(base.get_output_embeddings(), tokens, width))
    return network


@torch.no_grad()
def read_rows(head: torch.nn.Module, tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Return rows `tokens` of the weights of a head with `width` inputs, (tokens, width), float32, on the CPU."""
    weight = getattr(head, "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight[tokens.to(weight.device)].float().cpu()
    # Packed weights (int8, 4 bits) have different layouts, but applying any head to unit vectors gives its columns.
    like = next((tensor for tensor in (*head.parameters(), *head.buffers()) if tensor.is_floating_point()), None)
    dtype, device = (torch.float32, "cpu") if like is None else (like.dtype, like.device)
    columns = [head(units)[:, tokens.to(device)] for units in torch.eye(width, dtype=dtype, device=device).split(64)]
    bias = head(torch.zeros(1, width, dtype=dtype, device=device))[:, tokens.to(device)]
    return (torch.cat(columns) - bias).T.float().cpu()


def _read_intermediate_size(text: PretrainedConfig) -> int:
    """Return the width of a target's MLP, under any of its config names."""
    names = ("intermediate_size", "n_inner", "ffn_dim")
    sizes = [getattr(text, name) for name in names if isinstance(getattr(text, name, None), int)]
    return int(sizes[0] if sizes else 4 * text.hidden_size)


def find_most_frequent(texts: TextDataset, vocabulary: int, count: int | None) -> torch.Tensor:
    """Return the ids of the `count` tokens that the target wrote most often, in ascending order; ties go to the lower ids."""
    if count is None or count >= vocabulary:
        return torch.arange(vocabulary)
    return count_tokens(texts, vocabulary).sort(descending=True, stable=True).indices[:count].sort().values


def count_tokens(texts: TextDataset, vocabulary: int, answers: bool = True) -> torch.Tensor:
    """Return how often the texts have each token id, (vocabulary,) int64. `answers`: only what the target wrote."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for ids, prompt in zip(texts.ids, texts.prompts, strict=True):
        counts += torch.bincount(ids[prompt * answers :], minlength=vocabulary)
    return counts
