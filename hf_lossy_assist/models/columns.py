"""Where the tokens of a batch stand among the columns of the prompts as they were given, hidden tokens between them.

A cache of rows holds no hidden token. But Transformers' sliding windows and chunks count columns, and so do the positions of models that take none
(BART's decoder): of a row whose mask has holes, or of any padded row, those are not the places in the cache.
"""

import copy
from collections.abc import Sequence

import torch


class Columns:
    """The columns of each row's tokens; behind the prompts one column a token."""

    def __init__(self, seen: Sequence[torch.Tensor], width: int, device: torch.device):
        """`seen` (n,) int64 of each row: the columns of its prompt's tokens, in their order; `width`: of the prompts."""
        rows = [columns.to(device) for columns in seen]
        self.hidden = torch.tensor([width - len(its) for its in rows], device=device)[:, None]  # (B, 1)
        self.left = torch.stack([its[:1] for its in rows])  # (B, 1): tokens that are hidden on the left
        self.most = max(width - len(its) - int(its[0]) for its in rows)  # that a row's holes hide
        longest = max(len(its) for its in rows)
        behind = torch.arange(longest, device=device) + self.hidden
        self._table = torch.stack([torch.cat([its, rest[len(its) :]]) for its, rest in zip(rows, behind, strict=True)])

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """The columns of tokens number `slots` (1 or B, Q) of each row, (B, Q)."""
        slots, known = slots.expand(len(self.hidden), -1), self._table.shape[1]
        return torch.where(slots < known, self._table.gather(1, slots.clamp(max=known - 1)), slots + self.hidden)

    def from_first(self, slots: torch.Tensor) -> torch.Tensor:
        """The same, counted from each row's first token."""
        return self.of(slots) - self.left

    def select(self, rows: Sequence[int]) -> "Columns":
        """These rows alone."""
        out, index = copy.copy(self), list(rows)
        # `most` stays that of all: it only says when masks may be left out.
        out.hidden, out.left, out._table = self.hidden[index], self.left[index], self._table[index]
        return out
