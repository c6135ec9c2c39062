"""Additive masks of a forward on rows: which tokens each token may attend to.

A row cache holds no hidden token, but Transformers' sliding windows and chunks count the prompts' original columns, and so do positions in models
that take none (BART's decoder). In padded rows, and in rows whose mask has holes, those columns differ from the slots.
"""

import copy
from collections.abc import Callable, Sequence

import torch

from .architecture import CHUNKED, Architecture


class Columns:
    """Column of each row's tokens in the padded prompts; tokens after the prompts have consecutive columns."""

    def __init__(self, seen: Sequence[torch.Tensor], width: int, device: torch.device):
        """Take the columns `seen` (n,) int64 of each row's prompt tokens, in order, and the `width` of the prompts."""
        rows = [columns.to(device) for columns in seen]
        self.hidden = torch.tensor([width - len(row) for row in rows], device=device)[:, None]  # (B, 1)
        self.left = torch.stack([row[:1] for row in rows])  # (B, 1): hidden tokens on the left
        self.most = max(width - len(row) - int(row[0]) for row in rows)  # most tokens hidden by holes in a row
        longest = max(len(row) for row in rows)
        later = torch.arange(longest, device=device) + self.hidden
        self._table = torch.stack([torch.cat([row, rest[len(row) :]]) for row, rest in zip(rows, later, strict=True)])

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the columns (B, Q) of each row's tokens in `slots` (1 or B, Q)."""
        slots, known = slots.expand(len(self.hidden), -1), self._table.shape[1]
        return torch.where(slots < known, self._table.gather(1, slots.clamp(max=known - 1)), slots + self.hidden)

    def select(self, rows: Sequence[int]) -> "Columns":
        """Return only these rows."""
        out, index = copy.copy(self), list(rows)
        # `most` stays that of all rows: it only decides whether masks may be left out.
        out.hidden, out.left, out._table = self.hidden[index], self.left[index], self._table[index]
        return out


def visibility(
    positions: torch.Tensor,
    visible: int,
    window: int | None,
    chunk: int | None,
    places: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return which of the `visible` slots each query may attend to, (1 or B, 1, Q, visible) bool, from `position_ids` (1 or B, Q).

    `places`: maps slots (1 or B, n) to the numbers that windows and chunks compare; None: the slots themselves.
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
    """Return which of `visible` tokens a layer of `kind` attends to from `positions` (B, Q), (B, 1, Q, visible) bool; windows count `columns`."""
    places = None if columns is None else lambda slots: columns.of(slots) - columns.left  # from each row's first token
    return visibility(positions, visible, facts.windows[kind], facts.chunk if kind == CHUNKED else None, places)


def additive_masks(
    facts: Architecture, slots: torch.Tensor, visible: int, columns: Columns | None = None
) -> dict[str, torch.Tensor]:
    """Return the additive mask over `visible` tokens for each kind of layer, (1 or B, 1, Q, visible). Arguments: see `layer_visibility`."""
    seen = {kind: layer_visibility(facts, kind, slots, visible, columns) for kind in facts.windows}
    lowest = torch.finfo(facts.dtype).min
    return {kind: torch.zeros_like(s, dtype=facts.dtype).masked_fill_(~s, lowest) for kind, s in seen.items()}


class Masks:
    """The masks of one decoder on a row cache."""

    def __init__(self, facts: Architecture, columns: Columns | None = None):
        """Take the `columns` that windows and chunks count, where they differ from the slots."""
        self.facts, self.columns = facts, columns
        self._open: torch.Tensor | None = None  # zeros, (1, 1, 1, capacity)

    @property
    def counts_holes(self) -> bool:
        """Return whether windows hide tokens that they would not hide if they counted slots."""
        return self.columns is not None and self.columns.most > 0 and self.facts.reach < float("inf")

    def of(
        self, slots: torch.Tensor, visible: int, rows: int, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Return an additive mask (1 or B, 1, Q, visible) in the model's dtype, or one for each kind of layer if there are several.

        `slots` (1 or B, Q): those of the forward's tokens; `rows`: B; `capacity`: the largest `visible` to expect.
        """
        facts = self.facts
        if not facts.windows:
            return None
        holes = 0 if self.columns is None else self.columns.most
        if slots.shape == (1, 1) and facts.sees_all(visible + holes):
            # One token that attends to everything before it needs no mask. On a CPU a ready-made one is still cheaper than the model's
            # check for that (0.29 ms against 0.34 ms for the demo draft's step).
            if facts.device.type != "cpu":
                return None
            if self._open is None or self._open.shape[-1] < visible:
                self._open = torch.zeros(1, 1, 1, capacity, dtype=facts.dtype, device=facts.device)
            masks = dict.fromkeys(facts.windows, self._open[..., :visible])
        else:
            masks = additive_masks(facts, slots, visible, self.columns if self.counts_holes else None)
        return self.bundle(masks, rows)

    def bundle(self, masks: dict[str, torch.Tensor], rows: int) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the masks of all kinds of layers in the form that the model takes."""
        if self.facts.mask_each_row:
            masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        return masks | dict.fromkeys(self.facts.unmasked) if len(masks) > 1 else next(iter(masks.values()))
