"""EAGLE's first draft network: decoder layers on a token's embedding and the last hidden state before it, read through the target's own head.

From "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (huggingface.co/papers/2401.15077); EAGLE-2 (2406.16858) drafts trees
with the same network. Pairs as in `eagle3`: its output at a pair is its guess of the target's next state.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .compat import CACHE
from .layer_states import NORMED
from .states_network import StatesNetwork


@dataclass(frozen=True)
class Eagle1Config:
    """What the network is like: `layer`, `LlamaConfig` of its decoder layers, as wide as the target. `bias`: of `fc`."""

    layer: Any
    bias: bool = False
    reduced = False
    states = 1

    @property
    def target_hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def draft_vocab_size(self) -> int:
        return int(self.layer.vocab_size)

    def layers_of(self, blocks: int) -> tuple[int, ...]:
        """Whose states it reads."""
        return (NORMED,)


class Eagle1Network(StatesNetwork):
    """The network; `embed_tokens` may be the target's, which is then not among its own weights. It has no head."""

    lm_head = None

    def __init__(self, config: Eagle1Config, own_embeddings: bool = True):
        super().__init__()
        layer = config.layer
        layer._attn_implementation = "sdpa"
        self.config = config
        self.embed_tokens = torch.nn.Embedding(layer.vocab_size, layer.hidden_size) if own_embeddings else None
        self.fc = torch.nn.Linear(2 * layer.hidden_size, layer.hidden_size, bias=config.bias)
        self.layers = torch.nn.ModuleList(
            LlamaDecoderLayer(layer, number) for number in range(layer.num_hidden_layers)
        )
        self.layers[0].input_layernorm = torch.nn.Identity()
        self.norm = None
        self.rotary_emb = LlamaRotaryEmbedding(layer)
        self.register_buffer("d2t", torch.zeros(0, dtype=torch.int64))

    @property
    def a_norm(self) -> Any:
        return self.layers[0].post_attention_layernorm

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states as the network reads them."""
        return states.to(self.dtype)

    def forward(
        self, embeds: torch.Tensor, states: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor | None, cache: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return the states that the next pair reads and those that the head reads, (B, T, H) each; they are the same here."""
        out = self.fc(torch.cat([embeds.to(states.dtype), states], dim=-1))
        given = {
            "position_embeddings": self.rotary_emb(out, position_ids),
            "attention_mask": attention_mask,
            CACHE: cache,
        }
        for layer in self.layers:
            out = layer(out, **given)
        return out, out
