"""DFlash's draft network: masks after the last token form a block, filled in by one forward that reads the target's
hidden states.

From "DFlash: Block Diffusion for Flash Speculative Decoding" (huggingface.co/papers/2602.06036). In every layer the
text's states are cached as keys and values, and the block's tokens attend to them and to each other. The memory is a
filled-in block after the last token: as the head reads it (B, drafts, H), its logits (B, drafts, draft V), and what
`correct` carries from position to position.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from ...models.row_cache import RowCache
from ...round import Reading
from .base import AttentionWindow, HiddenStateNetwork, Memory, Stack, masks_of


@dataclass(frozen=True)
class DFlashConfig:
    """Sizes and settings of the network.

    Args:
        layer: `Qwen3Config` of its layers; `vocab_size` is the target's.
        target_layers: the layers whose states it reads, numbered as in Transformers' `hidden_states`.
        block: tokens of a block, including the last token of the text. mask: the id of tokens to fill in.
        target_hidden_size: width of the target's states.
        from_anchor: the last token's position also drafts the next token; else a block drafts `block` − 1 tokens.
        draft_vocab_size: number of tokens of its head; None: it uses the target's head.
        sights: what each layer sees; empty: each sees all.
        scale, cap: logits are multiplied by the one, then bent to stay within ± the other; None: they are not.
    """

    layer: Qwen3Config
    target_layers: tuple[int, ...]
    block: int
    mask: int
    target_hidden_size: int
    from_anchor: bool = False
    draft_vocab_size: int | None = None
    sights: tuple[AttentionWindow, ...] = ()
    scale: float = 1.0
    cap: float | None = None

    @property
    def drafts(self) -> int:
        """The number of tokens that a forward drafts."""
        return self.block if self.from_anchor else self.block - 1

    @property
    def first(self) -> int:
        """The position in a block whose logits are those of the first drafted token."""
        return self.block - self.drafts

    def layers_of(self, blocks: int) -> tuple[int, ...]:
        """Return the layers whose states it reads."""
        return self.target_layers

    @property
    def reduced(self) -> bool:
        """Whether it can propose only a part of the target's vocabulary."""
        return self.draft_vocab_size not in (None, self.layer.vocab_size)


class BlockAttention(Qwen3Attention):
    """Attention over the text's keys and values, which are in the cache, and the block's."""

    def keys(self, states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (B, heads, Q, d) of `states` (B, Q, H)."""
        keys = self.k_norm(self.k_proj(states).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        return rotated(keys, cos, sin), self.v_proj(states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self, block: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor, cache: RowCache
    ) -> torch.Tensor:
        queries = self.q_norm(self.q_proj(block).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        keys, values = cache.update(*self.keys(block, cos, sin), self.layer_idx)
        out = torch.nn.functional.scaled_dot_product_attention(
            rotated(queries, cos, sin), keys, values, attn_mask=mask, scale=self.scaling, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return queries or keys (B, heads, Q, d), rotated by `cos` and `sin` (1 or B, Q, d)."""
    return x * cos[:, None] + rotate_half(x) * sin[:, None]


class DFlashLayer(torch.nn.Module):
    """One decoder layer."""

    def __init__(self, config: DFlashConfig, layer_idx: int):
        super().__init__()
        layer = config.layer
        self.self_attn, self.mlp = BlockAttention(layer, layer_idx), Qwen3MLP(layer)
        self.input_layernorm = Qwen3RMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)

    def forward(self, block: torch.Tensor, *arguments: object) -> torch.Tensor:
        block = block + self.self_attn(self.input_layernorm(block), *arguments)
        return block + self.mlp(self.post_attention_layernorm(block))


class DFlashNetwork(HiddenStateNetwork):
    """The network. If `embed_tokens` or `lm_head` are the target's, they are not among its weights."""

    config: DFlashConfig
    norm: torch.nn.Module
    reads_tokens: ClassVar[bool] = False
    layer_class: ClassVar[type[DFlashLayer]] = DFlashLayer

    def __init__(self, config: DFlashConfig, has_embeddings: bool = False):
        super().__init__()
        layer = config.layer
        self.config, self.spare = config, config.block
        self.layers = torch.nn.ModuleList(
            self.layer_class(config, layer_idx) for layer_idx in range(layer.num_hidden_layers)
        )
        self.norm = Qwen3RMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.fc = torch.nn.Linear(len(config.target_layers) * config.target_hidden_size, layer.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(layer)
        self.embed_tokens = torch.nn.Embedding(layer.vocab_size, layer.hidden_size) if has_embeddings else None
        size = config.draft_vocab_size
        self.lm_head = None if size is None else torch.nn.Linear(layer.hidden_size, size, bias=False)
        self.register_buffer("d2t", torch.zeros(size or 0, dtype=torch.int64))

    @property
    def longest(self) -> int:
        return self.config.drafts

    def state_column(self, index: int) -> int:
        return self.config.first + index

    def first_state(self, rows: int) -> Memory:
        """Return what `correct` begins a block of `rows` rows with: nothing, unless its positions have a state."""
        return ()

    def correct(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, state: Memory
    ) -> tuple[torch.Tensor, Memory]:
        """Return the logits of one position (B, draft V), given the token `before` it (B,), and the state for the next;
        DFlash's depend on no token.

        `hidden` (B, H): what the head read. `state`: from `first_state`, or the position before.
        """
        scale, cap = self.config.scale, self.config.cap
        logits = logits if scale == 1 else logits * scale
        return (logits if cap is None else (logits / cap).tanh() * cap), state

    def step(
        self, stack: Stack, inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: Memory
    ) -> tuple[torch.Tensor, Memory]:
        slot = num_drafted.clamp(max=self.longest - 1)[None]  # steps beyond the block are not used by any row
        hidden, logits = (block.index_select(1, slot)[:, 0] for block in memory[:2])
        logits, state = self.correct(logits, hidden, inputs[:, -1], memory[2:])
        return logits, (*memory[:2], *state)

    def learn(self, stack: Stack, reading: Reading) -> Memory:
        _, cached, accepted, last, states = reading
        cache, device = stack.cache, states.device
        slots = cached[:, None] + torch.arange(states.shape[1], device=device)
        cache.plan_static(slots)
        self.remember(states, slots, cache)
        slots = (cached + accepted + 1)[:, None] + torch.arange(self.config.block, device=device)
        cache.plan_static(slots)
        block = torch.nn.functional.pad(last, (0, self.config.block - 1), value=self.config.mask)
        hidden: torch.Tensor = self(stack.embedding(block), slots, cache.capacity, cache)[:, self.config.first :]
        cache.forget_plan()
        weight = getattr(stack.head, "weight", None)
        if self.lm_head is None and isinstance(weight, torch.Tensor) and weight.is_floating_point():
            hidden = hidden.to(weight.dtype)  # the target's head, unless it is in int8
        return hidden, stack.head(hidden), *self.first_state(len(last))

    def remember(self, states: torch.Tensor, slots: torch.Tensor, cache: RowCache) -> None:
        """Write the target's states (B, Q, layers · target width) of a text as keys and values, at the planned `slots`
        (1 or B, Q)."""
        fused = self.hidden_norm(self.fc(states.to(self.dtype)))
        cos, sin = self.rotary_emb(fused, slots)
        for layer_idx, layer in enumerate(self.layers):
            assert isinstance(layer, DFlashLayer)
            cache.update(*layer.self_attn.keys(fused, cos, sin), layer_idx)

    def forward(self, embeds: torch.Tensor, slots: torch.Tensor, visible: int, cache: RowCache) -> torch.Tensor:
        """Return the head's input for `embeds` (B, block, H) at the planned `slots` (1 or B, block), of the same shape.
        `visible`: slots of the cache."""
        out = embeds.to(self.dtype)
        cos, sin = self.rotary_emb(out, slots)
        masks = masks_of(self.config.sights or (AttentionWindow(),) * len(self.layers), slots, slots[:, :1], visible)
        for layer, mask in zip(self.layers, masks, strict=True):
            out = layer(out, cos, sin, mask, cache)
        return self.norm(out)
