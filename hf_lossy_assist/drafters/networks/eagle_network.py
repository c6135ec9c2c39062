"""EAGLE's draft networks: decoder layers on a token's embedding and the target's hidden states of the token before it.

EAGLE-3: "Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(huggingface.co/papers/2503.01840), with the norms of EAGLE-3.1.

Pair i is the embedding of token i + 1 with the target's states at token i; its output predicts token i + 2. Beyond what
the target has read, the network's output at the previous pair replaces the states. The memory (B, 1, H) is the state of
the next pair, or (B, Q, H) those of the next Q.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import Cache, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding

from ...models.facts import CACHE
from ...round import Reading
from .base import CAUSAL, AttentionWindow, HiddenStateNetwork, Memory, Stack, masks_of


class LayerKind(NamedTuple):
    """Transformers modules that make up one kind of layer."""

    config: type[LlamaConfig | Qwen3Config]
    layer: type[LlamaDecoderLayer | Qwen3DecoderLayer]
    norm: type[LlamaRMSNorm | Qwen3RMSNorm]
    rotary: type[LlamaRotaryEmbedding | Qwen3RotaryEmbedding]


LAYER_KINDS: Mapping[str, LayerKind] = {
    "llama": LayerKind(LlamaConfig, LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding),
    "qwen3": LayerKind(Qwen3Config, Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding),
}


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and settings of an EAGLE-3 network.

    Args:
        layer: config of its decoder layers, of a kind in `LAYER_KINDS`; `vocab_size` is the target's.
        target_layers: the layers whose states it reads, numbered as in Transformers' `hidden_states`: n is the output
        of block n, 0 the embeddings.
            None: three, chosen by the number of the target's blocks.
        draft_vocab_size: how many tokens it can propose.
        target_hidden_size: width of the target's states.
        norm_before_residual: normalise the first layer's residual. norm_before_fc: one norm over the states of all
        layers. fc_norm: a norm for each.
        norm_output: normalise the output for the next step (EAGLE-3.1).
        sights: what each layer sees; empty: each sees all. A draft begins at the last pair with a state of the
            target's.
    """

    layer: LlamaConfig | Qwen3Config
    target_layers: tuple[int, ...] | None
    draft_vocab_size: int
    target_hidden_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    sights: tuple[AttentionWindow, ...] = ()

    @property
    def kind(self) -> LayerKind:
        return LAYER_KINDS[self.layer.model_type]

    @property
    def reduced(self) -> bool:
        """Whether it can propose only a part of the target's vocabulary."""
        return self.draft_vocab_size != self.layer.vocab_size

    def layers_of(self, blocks: int) -> tuple[int, ...]:
        """Return the layers whose states it reads, for a target with that many blocks."""
        return default_layers(blocks) if self.target_layers is None else self.target_layers


def default_layers(blocks: int) -> tuple[int, int, int]:
    """Return an early, a middle and a late layer of a target with that many blocks, for files that name none."""
    return min(2, blocks), blocks // 2, max(blocks - 3, 0)


class FirstLayer(torch.nn.Module):
    """EAGLE-3's first layer, whose attention reads twice the width: the embedding and the state."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        layer, kind = config.layer, config.kind
        plain = kind.layer(layer, layer_idx=0)
        self.self_attn, self.mlp = plain.self_attn, plain.mlp
        self.input_layernorm, self.post_attention_layernorm = plain.input_layernorm, plain.post_attention_layernorm
        self.hidden_norm = kind.norm(layer.hidden_size, eps=layer.rms_norm_eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = torch.nn.Linear(2 * layer.hidden_size, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)
        self.norm_before_residual = config.norm_before_residual

    def forward(self, embeds: torch.Tensor, states: torch.Tensor, **arguments: object) -> torch.Tensor:
        """Return (B, Q, H) for `embeds` and `states`, (B, Q, H) each."""
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embeds), normed], dim=-1)
        residual = normed if self.norm_before_residual else states
        states = residual + self.self_attn(hidden_states=both, **arguments)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Network(HiddenStateNetwork):
    """EAGLE-3's network, with a head over `draft_vocab_size` tokens.
    The order of the modules determines the hash of the weights."""

    config: Eagle3Config
    norm: torch.nn.Module
    lm_head: torch.nn.Linear

    def __init__(self, config: Eagle3Config, has_embeddings: bool = True):
        """`has_embeddings`: False: the target's are used."""
        super().__init__()
        layer, kind, width, self.config = config.layer, config.kind, config.target_hidden_size, config
        layer._attn_implementation = "sdpa"
        self.embed_tokens = torch.nn.Embedding(layer.vocab_size, layer.hidden_size) if has_embeddings else None
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        count = 3 if config.target_layers is None else len(config.target_layers)
        norms = torch.nn.ModuleList(kind.norm(width, eps=layer.rms_norm_eps) for _ in range(count))
        self.input_norm = kind.norm(count * width, eps=layer.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = norms if config.fc_norm else None
        self.fc = torch.nn.Linear(count * width, layer.hidden_size, bias=False)
        more = [kind.layer(layer, layer_idx=layer_idx) for layer_idx in range(1, layer.num_hidden_layers)]
        self.layers = torch.nn.ModuleList([FirstLayer(config), *more])
        self.norm = kind.norm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.lm_head = torch.nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = kind.rotary(layer)

    @property
    def sights(self) -> Sequence[AttentionWindow]:
        """The view of each layer."""
        return self.config.sights or (CAUSAL,) * len(self.layers)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """Project the target's states of all layers, (…, layers · target width), to the network's width, (…, H)."""
        states = states.to(self.dtype)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if self.fc_norm is not None:
            pieces = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        return self.fc(states)

    def forward(
        self,
        embeds: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        masks: Sequence[torch.Tensor | None],
        cache: Cache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states for the next pair and those for the head, (B, Q, H) each.

        Args: `embeds` and `states` (fused, or the network's output), (B, Q, H) each; `masks`: for each layer (1 or B,
        1, Q, slots), additive; None: causal.
        """
        arguments = {"position_embeddings": self.rotary_emb(states, position_ids), CACHE: cache}
        out = self.layers[0](embeds.to(states.dtype), states, attention_mask=masks[0], **arguments)
        for layer, mask in zip(self.layers[1:], masks[1:], strict=True):
            out = layer(out, attention_mask=mask, **arguments)
        normed = self.norm(out)
        return (normed if self.config.norm_output else out), normed

    def run(
        self,
        stack: Stack,
        tokens: torch.Tensor,
        states: torch.Tensor,
        starts: torch.Tensor,
        provided: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs of `tokens` (B, Q) and fused `states` (B, Q, H) from slot `starts` (B,) on; return `forward`'s
        outputs.

        `provided` (B, 1): the last pair with a state of the target's; None: all have one.
        """
        slots, cache = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device), stack.cache
        cache.plan_static(slots)
        begins = slots if provided is None else torch.minimum(slots, provided)
        masks = masks_of(self.sights, slots, begins, cache.capacity, states.dtype)
        outputs: tuple[torch.Tensor, torch.Tensor] = self(stack.embedding(tokens), states, slots, masks, cache)
        cache.forget_plan()
        return outputs

    def step(
        self, stack: Stack, inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        width = memory[0].shape[1]
        start = cached + num_drafted - width
        output, normed = self.run(stack, inputs[:, -width:], memory[0], start, cached[:, None] - 1)
        return stack.head(normed[:, -1]), (output[:, -1:],)

    def learn(self, stack: Stack, reading: Reading) -> Memory:
        fused = self.fuse(reading.states)
        if reading.tokens.shape[1]:
            self.run(stack, reading.tokens, fused[:, :-1], reading.cached)
        return (fused.gather(1, reading.accepted[:, None, None].expand(-1, 1, fused.shape[2])),)
