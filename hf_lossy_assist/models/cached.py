"""A model and its cache, in the two ways the engine can roll back: `RowModel` (any batch, O(1)) and `CroppingModel`
(Transformers' own cache, one row).

Both keep `lengths`, the tokens that each row's cache holds, and offer the same verbs:
`feed` runs tokens and appends them, `rollback` forgets the tail, `select` drops rows.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import Cache

from .rope import ChangingRope


class NotJoined(Exception):
    """Rows of several calls cannot be decoded as one batch; the message says why."""


class CachedModel(Protocol):
    """What the engine needs of a target or a draft."""

    lengths: list[int]
    device: torch.device
    rope: ChangingRope | None
    needs_prefill: bool  # a prompt must have a forward of its own, before the first block
    outlives_call: bool  # its cache goes back to the caller

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Run `tokens` (B, Q), of which row b's first `counts[b]` are real, behind what the cache holds.

        Returns the logits of the last `keep` positions, (B, keep, V); None: of all Q; 0: nothing can be read from them.
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything behind each row's first `lengths[b]` tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        """The cache as Transformers can go on with it, or None where that is not one text's.

        `rows`: how many the call had; `mask` (rows, width): which tokens of the prompts are not hidden.
        """
