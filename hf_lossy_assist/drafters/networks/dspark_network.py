"""DSpark's draft network: DFlash's block, whose logits are corrected from left to right by the token before, and a head that estimates acceptance.

From "DSpark" (huggingface.co/papers/2607.05147); tensors are named as in DeepSpec, the authors' code, and in `speculators`.
"""

from collections import OrderedDict
from dataclasses import dataclass

import torch

from .base import Memory
from .dflash_network import DFlashConfig, DFlashNetwork


MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DSparkConfig(DFlashConfig):
    """Sizes and settings of the network, with DFlash's.

    Args:
        rank: width of the Markov head; 0: it has none, and drafts as DFlash does.
        markov: its kind, of `MARKOV_HEADS`: a bias by the token before; the same, gated by the position's state; a recurrent state of the block.
        confidence: it has a confidence head, which reads a position's state; confidence_reads_token: and the embedding of the token before.
    """

    rank: int = 256
    markov: str = "vanilla"
    confidence: bool = True
    confidence_reads_token: bool = True


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
        """Return the bias (B, draft V) and the next state, for the position's state `hidden` (B, H) and the token `before` it (B,).

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
        width = config.layer.hidden_size + config.rank * config.confidence_reads_token
        head = torch.nn.Sequential(OrderedDict(proj=torch.nn.Linear(width, 1)))
        self.confidence_head = head if config.confidence else None

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

    def confidence(self, hidden: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the estimated probability that the target accepts the token of each position, (B, 1) float32. Arguments as for `correct`."""
        assert self.confidence_head is not None, "stops check that there is one"
        hidden = hidden.to(self.dtype)
        if self.config.confidence_reads_token:
            assert self.markov_head is not None, "configs are refused where it has none"
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before)], dim=-1)
        return self.confidence_head(hidden).float().sigmoid()
