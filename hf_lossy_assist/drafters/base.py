"""What every drafter answers: what to propose, and what it learns from a verdict."""

from collections.abc import Sequence
from typing import Protocol

import torch

from ..batch.rows import Rows
from ..round import Block


class Drafter(Protocol):
    """Proposes a block, and learns how much of it was accepted."""

    def propose(self, rows: Rows, limits: Sequence[int]) -> Block:
        """Up to `limits[b]` tokens for row b; leaves them written behind each row's text (`Rows.write`)."""

    def learn(self, rows: Rows, block: Block, accepted: Sequence[int]) -> None:
        """Called after every commit, with `rows` already grown by it."""

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows only."""


def fitted(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus is cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]
