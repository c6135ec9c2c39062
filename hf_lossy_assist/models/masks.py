"""Additive masks of a forward on rows: the tokens that each of its tokens may see.

A cache of rows holds no hidden token. But Transformers' sliding windows and chunks count the columns of the prompts as they were given, and so do
the positions of models that take none (BART's decoder): of a row whose mask has holes, or of any padded row, those are not the slots.
"""

import copy
from collections.abc import Callable, Sequence

import torch

from .architecture import CHUNKED, Architecture


class Columns:
    """The columns of each row's tokens among those of the prompts; after the prompts one column a token."""

    def __init__(self, seen: Sequence[torch.Tensor], width: int, device: torch.device):
        """`seen` (n,) int64 of each row: the columns of its prompt's tokens, in their order; `width`: of the prompts."""
        rows = [columns.to(device) for columns in seen]
        self.hidden = torch.tensor([width - len(row) for row in rows], device=device)[:, None]  # (B, 1)
        self.left = torch.stack([row[:1] for row in rows])  # (B, 1): tokens that are hidden on the left
        self.most = max(width - len(row) - int(row[0]) for row in rows)  # that a row's holes hide
        longest = max(len(row) for row in rows)
        later = torch.arange(longest, device=device) + self.hidden
        self._table = torch.stack([torch.cat([row, rest[len(row) :]]) for row, rest in zip(rows, later, strict=True)])

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the columns of tokens number `slots` (1 or B, Q) of each row, (B, Q)."""
        slots, known = slots.expand(len(self.hidden), -1), self._table.shape[1]
        return torch.where(slots < known, self._table.gather(1, slots.clamp(max=known - 1)), slots + self.hidden)

    def select(self, rows: Sequence[int]) -> "Columns":
        """Return these rows alone."""
        out, index = copy.copy(self), list(rows)
        # `most` stays that of all: it only says when masks may be left out.
        out.hidden, out.left, out._table = self.hidden[index], self.left[index], self._table[index]
        return out


def visibility(
    positions: torch.Tensor,
    visible: int,
    window: int | None,
    chunk: int | None,
    places: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return which of the `visible` slots each query may see, (1 or B, 1, Q, visible) bool, from `position_ids` (1 or B, Q).

    `places`: maps slots (1 or B, n) to what a window and a chunk count; None: the slots.
    """
    slots = torch.arange(visible, device=positions.device)[None]
    seen = slots[:, None, None, :] <= positions[:, None, :, None]
    if window is None and chunk is None:
        return seen
    query, key = (positions, slots) if places is None else (places(positions), places(slots))
    query, key = query[:, None, :, None], key[:, None, None, :]
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    return seen


def layer_visibility(
    facts: Architecture, kind: str, positions: torch.Tensor, visible: int, columns: Columns | None = None
) -> torch.Tensor:
    """Return which of `visible` tokens a layer of `kind` sees from `positions` (B, Q), (B, 1, Q, visible) bool; windows count `columns`."""
    places = None if columns is None else lambda slots: columns.of(slots) - columns.left  # from each row's first token
    return visibility(positions, visible, facts.windows[kind], facts.chunk if kind == CHUNKED else None, places)


def additive_masks(
    facts: Architecture, slots: torch.Tensor, visible: int, columns: Columns | None = None
) -> dict[str, torch.Tensor]:
    """Return of each kind of layer what is added to the scores of `visible` tokens, (1 or B, 1, Q, visible); as of `layer_visibility`."""
    seen = {kind: layer_visibility(facts, kind, slots, visible, columns) for kind in facts.windows}
    lowest = torch.finfo(facts.dtype).min
    return {kind: torch.zeros_like(s, dtype=facts.dtype).masked_fill_(~s, lowest) for kind, s in seen.items()}


class Masks:
    """The masks of one decoder on a cache of rows."""

    def __init__(self, facts: Architecture, columns: Columns | None = None):
        """`columns`: those that windows and chunks count, where they are not the slots."""
        self.facts, self.columns = facts, columns
        self._open: torch.Tensor | None = None  # zeros, (1, 1, 1, capacity)

    @property
    def counts_holes(self) -> bool:
        """Tell whether a token sees less than the model itself would make of the slots."""
        return self.columns is not None and self.columns.most > 0 and self.facts.reach < float("inf")

    def of(
        self, slots: torch.Tensor, visible: int, rows: int, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Return an additive mask (1 or B, 1, Q, visible) in the model's dtype, one for each kind of layer if there are several.

        `slots` (1 or B, Q): those of the forward's tokens; `rows`: B; `capacity`: how large `visible` can come to be.
        """
        facts = self.facts
        if not facts.windows:
            return None
        holes = 0 if self.columns is None else self.columns.most
        if slots.shape == (1, 1) and facts.sees_all(visible + holes):
            # One token that sees everything before it needs no mask. On a CPU a ready one is still cheaper than the model's
            # way of finding that out (0.29 ms against 0.34 ms for the demo draft's step).
            if facts.device.type != "cpu":
                return None
            if self._open is None or self._open.shape[-1] < visible:
                self._open = torch.zeros(1, 1, 1, capacity, dtype=facts.dtype, device=facts.device)
            masks = dict.fromkeys(facts.windows, self._open[..., :visible])
        else:
            masks = additive_masks(facts, slots, visible, self.columns if self.counts_holes else None)
        if facts.mask_each_row:
            masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        return masks | dict.fromkeys(facts.unmasked) if len(masks) > 1 else next(iter(masks.values()))
