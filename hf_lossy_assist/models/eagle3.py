"""EAGLE-3's draft network: decoder layers on a token's embedding and on the hidden states that the target had before it.

From "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (huggingface.co/papers/2503.01840), with the
norms of EAGLE-3.1. Pair i is the embedding of token i + 1 beside the target's states at token i; its output predicts token i + 2. Where the
target has not been yet, the network's own output at the pair before takes the place of the states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from .compat import CACHE
from .states_network import StatesNetwork


@dataclass(frozen=True)
class Kind:
    """The modules of Transformers' that one kind of layer is made of."""

    config: Any
    layer: Any
    norm: Any
    rotary: Any


KINDS: Mapping[str, Kind] = {
    "llama": Kind(LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": Kind(Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


@dataclass(frozen=True)
class Eagle3Config:
    """What the network is like.

    Args:
        layer: config of its decoder layers, of a kind in `KINDS`; `vocab_size` is the target's.
        target_layers: whose states it reads, as Transformers numbers `hidden_states`: n is what block n gives, 0 the embeddings. None: three, by
            the number of the target's blocks.
        draft_vocab_size: how many tokens it can propose.
        target_hidden_size: of the target's states.
        norm_before_residual: the first layer's residual is normed. norm_before_fc: one norm over the states of all layers. fc_norm: a norm for each.
        norm_output: what is handed to the next step is normed (EAGLE-3.1).
    """

    layer: Any
    target_layers: tuple[int, ...] | None
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def kind(self) -> Kind:
        return KINDS[self.layer.model_type]

    @property
    def states(self) -> int:
        """Of how many layers it reads the state."""
        return 3 if self.target_layers is None else len(self.target_layers)

    def layers_of(self, blocks: int) -> tuple[int, ...]:
        """Whose states it reads of a target with so many blocks."""
        return default_layers(blocks) if self.target_layers is None else self.target_layers

    @property
    def reduced(self) -> bool:
        """Whether it proposes a part of the target's vocabulary alone."""
        return self.draft_vocab_size != self.layer.vocab_size


def default_layers(blocks: int) -> tuple[int, int, int]:
    """Whose states are read of a target with so many blocks where nothing is said: an early, a middle and a late one's."""
    return min(2, blocks), blocks // 2, max(blocks - 3, 0)


class FirstLayer(torch.nn.Module):
    """A decoder layer whose attention reads twice the width: the embedding, and the state beside it."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        layer, kind = config.layer, config.kind
        stock = kind.layer(layer, layer_idx=0)
        self.self_attn, self.mlp = stock.self_attn, stock.mlp
        self.input_layernorm, self.post_attention_layernorm = stock.input_layernorm, stock.post_attention_layernorm
        self.hidden_norm = kind.norm(layer.hidden_size, eps=layer.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = torch.nn.Linear(2 * layer.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeds: torch.Tensor, states: torch.Tensor, **given: Any) -> torch.Tensor:
        """`embeds` and `states` (B, Q, H) → (B, Q, H)."""
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.norm_before_residual else states
        states = residual + self.self_attn(hidden_states=both, **given)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Network(StatesNetwork):
    """The network; `embed_tokens` may be the target's, which is then not among its own weights."""

    norm: torch.nn.Module

    def __init__(self, config: Eagle3Config, own_embeddings: bool = True):
        super().__init__()
        layer, kind = config.layer, config.kind
        layer._attn_implementation = "sdpa"
        count, width = config.states, config.target_hidden_size
        self.config = config
        self.embed_tokens = torch.nn.Embedding(layer.vocab_size, layer.hidden_size) if own_embeddings else None
        self.input_norm = kind.norm(count * width, eps=layer.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            torch.nn.ModuleList(kind.norm(width, eps=layer.rms_norm_eps) for _ in range(count))
            if config.fc_norm
            else None
        )
        self.fc = torch.nn.Linear(count * width, layer.hidden_size, bias=False)
        more = [kind.layer(layer, layer_idx=number) for number in range(1, layer.num_hidden_layers)]
        self.layers = torch.nn.ModuleList([FirstLayer(config), *more])
        self.norm = kind.norm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.lm_head = torch.nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = kind.rotary(layer)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states of all layers, (…, layers · target width), as the network reads them, (…, H)."""
        states = states.to(self.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            parts = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(states)

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
        cache: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`embeds` and fused or own `states`, (B, Q, H) each: what the next pair reads in place of states, and what `lm_head` reads.

        `attention_mask` (1 or B, 1, Q, slots), additive; None: causal.
        """
        given = {
            "position_embeddings": self.rotary_emb(states, position_ids),
            "attention_mask": attention_mask,
            CACHE: cache,
        }
        out = self.layers[0](embeds.to(states.dtype), states, **given)
        for layer in self.layers[1:]:
            out = layer(out, **given)
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed
