"""DFlash's block with a correction of each position by the token before it: DFlash 2 and DSpark.

DFlash 2 has short convolutions over the positions, and a selector that scores a position's likeliest tokens again; its
tensors are named as in z-lab's code (github.com/z-lab/dflash). DSpark (huggingface.co/papers/2607.05147) has a bias by
the token before; its tensors are named as in DeepSpec, the authors' code.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .base import Memory
from .dflash_network import DFlashConfig, DFlashLayer, DFlashNetwork


MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DFlash2Config(DFlashConfig):
    """Sizes and settings of the network, with DFlash's.

    Args:
        taps: positions that a convolution reads, its own and those before it in the block. group: channels with one
            kernel; it divides the width.
        rank: width of the selector. candidates: tokens of a position that it scores; all others are never drafted.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16


class DynamicConvolution(torch.nn.Module):
    """Causal convolutions before and after a sublayer, whose kernels depend on its input."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        width = config.layer.hidden_size
        self.taps, self.group = config.taps, config.group
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, config.taps, width))
        self.kernel_projection = torch.nn.Linear(width, 2 * config.taps * (width // config.group), bias=False)

    def forward(self, block: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return what `sublayer` makes of a `block` (B, Q, H), between both convolutions, (B, Q, H)."""
        kernels = self.kernel_projection(block).unflatten(-1, (2, self.taps, -1)).repeat_interleave(self.group, dim=-1)
        before, after = (kernels + self.base_kernel).unbind(dim=2)
        return convolved(sublayer(convolved(block, before)), after)


def convolved(block: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Return the sum over `taps` of each position (B, Q, H) and those before it, weighted by `kernels` (B, Q, taps,
    H)."""
    out = block * kernels[:, :, 0]
    for tap in range(1, kernels.shape[2]):
        out = out + torch.nn.functional.pad(block[:, :-tap], (0, 0, tap, 0)) * kernels[:, :, tap]
    return out


class DFlash2Layer(DFlashLayer):
    """One decoder layer."""

    def __init__(self, config: DFlash2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv, self.mlp_conv = DynamicConvolution(config), DynamicConvolution(config)

    def forward(self, block: torch.Tensor, *arguments: object) -> torch.Tensor:
        block = block + self.attention_conv(self.input_layernorm(block), lambda x: self.self_attn(x, *arguments))
        return block + self.mlp_conv(self.post_attention_layernorm(block), self.mlp)


class CandidateSelector(torch.nn.Module):
    """Scores of tokens after the token before, at the position's state."""

    def __init__(self, config: DFlash2Config):
        super().__init__()
        layer, rank = config.layer, config.rank
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(layer.vocab_size, rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(layer.vocab_size, rank))
        self.hidden_projection = torch.nn.Linear(layer.hidden_size, rank, bias=False)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the scores (B, n) of `tokens` (B, n), for the position's state `hidden` (B, H) and the token `before`
        it (B,)."""
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)
        return (context[:, None] * self.successor_codebook[tokens]).sum(dim=-1)


class DFlash2Network(DFlashNetwork):
    """The network."""

    config: DFlash2Config
    layer_class = DFlash2Layer

    def __init__(self, config: DFlash2Config, has_embeddings: bool = False):
        super().__init__(config, has_embeddings)
        self.candidate_selector = CandidateSelector(config)

    def correct(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, state: Memory
    ) -> tuple[torch.Tensor, Memory]:
        logits, state = super().correct(logits, hidden, before, state)
        likely, tokens = logits.topk(self.config.candidates, dim=-1)
        scores = likely + self.candidate_selector(hidden.to(self.dtype), before, tokens).to(likely.dtype)
        return torch.full_like(logits, -torch.inf).scatter(-1, tokens, scores), state


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Sizes and settings of the network, with DFlash's.

    Args:
        rank: width of the Markov head; 0: it has none, and drafts as DFlash does.
        markov: its kind, of `MARKOV_HEADS`: a bias by the token before; the same, gated by the position's state; a
            recurrent state of the block.
    """

    rank: int = 256
    markov: str = "vanilla"


class MarkovHead(torch.nn.Module):
    """Bias of low rank on the logits of a position."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        rank, width, size = config.rank, config.layer.hidden_size, config.layer.vocab_size
        self.kind = config.markov
        self.markov_w1 = torch.nn.Embedding(size, rank)
        self.markov_w2 = torch.nn.Linear(rank, config.draft_vocab_size or size, bias=False)
        if self.kind == "gated":
            self.gate_proj = torch.nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = torch.nn.Linear(2 * rank + width, 3 * rank)

    def forward(self, hidden: torch.Tensor, before: torch.Tensor, state: Memory) -> tuple[torch.Tensor, Memory]:
        """Return the bias (B, draft V) and the next state, for the position's state `hidden` (B, H) and the token
        `before` it (B,).

        `state`: of a recurrent head, (B, rank); of another, nothing.
        """
        token = self.markov_w1(before)
        hidden = hidden.to(token.dtype)
        if self.kind == "gated":
            token = self.gate_proj(torch.cat([hidden, token], dim=-1)).sigmoid() * token
        elif self.kind == "rnn":
            joint = self.joint_proj(torch.cat([*state, token, hidden], dim=-1))
            gate, candidate, out = joint.chunk(3, dim=-1)
            gate = gate.sigmoid()
            state, token = (gate * state[0] + (1 - gate) * candidate.tanh(),), out.tanh()
        return self.markov_w2(token), state


class DSparkNetwork(DFlashNetwork):
    """The network."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, has_embeddings: bool = False):
        super().__init__(config, has_embeddings)
        self.markov_head = MarkovHead(config) if config.rank else None

    def first_state(self, rows: int) -> Memory:
        recurrent = self.markov_head is not None and self.markov_head.kind == "rnn"
        return (self.norm_weight.new_zeros(rows, self.config.rank),) if recurrent else ()

    def correct(
        self, logits: torch.Tensor, hidden: torch.Tensor, before: torch.Tensor, state: Memory
    ) -> tuple[torch.Tensor, Memory]:
        if self.markov_head is None:
            return logits, state
        bias, state = self.markov_head(hidden, before, state)
        return logits + bias, state
