"""Shared by several tests."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from hf_lossy_assist import AcceptanceRule, Block
from hf_lossy_assist.rules import draw


@dataclass(frozen=True)
class Everything(AcceptanceRule):
    """Accepts whatever was drafted."""

    lossless: ClassVar[bool] = False

    def matches(self, block):
        return torch.ones_like(block.tokens, dtype=torch.bool)

    def probability(self, block):
        return torch.ones(block.tokens.shape)


def greedy_block(tokens: list[list[int]], best: list[list[int]], drafted: list[int], kept: list[int] | None = None):
    """Drafted tokens and the target's choices, one more for each row than tokens."""
    scores = torch.nn.functional.one_hot(torch.tensor(best), 10).float()
    return Block(
        torch.tensor(tokens, dtype=torch.long).reshape(len(best), -1),
        torch.tensor(drafted),
        None,
        False,
        torch.tensor(drafted if kept is None else kept),
        scores,
    )


def sampling_block(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor, drafted: torch.Tensor | None = None):
    drafted = torch.full((tokens.shape[0],), tokens.shape[1]) if drafted is None else drafted
    return Block(tokens, drafted, q, True, drafted, p.log())


def random_block(seed: int, rows: int = 200, gamma: int = 4, size: int = 6) -> Block:
    torch.manual_seed(seed)
    p, q = torch.randn(rows, gamma + 1, size).mul(2).softmax(-1), torch.randn(rows, gamma, size).mul(2).softmax(-1)
    return sampling_block(p, q, draw(q), torch.randint(0, gamma + 1, (rows,)))
