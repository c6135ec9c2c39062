"""Additive masks of a forward on rows: which tokens each token may attend to. A row cache holds no hidden token."""

import torch

from .facts import CHUNKED, ModelFacts


def visibility(positions: torch.Tensor, visible: int, window: int | None, chunk: int | None) -> torch.Tensor:
    """Return which of the `visible` slots each query may attend to, (1 or B, 1, Q, visible) bool, from its slot in `positions` (1 or B, Q)."""
    query, key = positions[:, None, :, None], torch.arange(visible, device=positions.device)
    seen = key <= query
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    return seen


def layer_visibility(facts: ModelFacts, kind: str, positions: torch.Tensor, visible: int) -> torch.Tensor:
    """Return which of `visible` tokens a layer of `kind` attends to from `positions` (B, Q), (B, 1, Q, visible) bool."""
    return visibility(positions, visible, facts.windows[kind], facts.chunk if kind == CHUNKED else None)


def additive_masks(facts: ModelFacts, slots: torch.Tensor, visible: int) -> dict[str, torch.Tensor]:
    """Return the additive mask over `visible` tokens for each kind of layer, (1 or B, 1, Q, visible). Arguments: see `layer_visibility`."""
    seen = {kind: layer_visibility(facts, kind, slots, visible) for kind in facts.windows}
    lowest = torch.finfo(facts.dtype).min
    return {kind: torch.zeros_like(s, dtype=facts.dtype).masked_fill_(~s, lowest) for kind, s in seen.items()}


class Masks:
    """The masks of one decoder on a row cache."""

    def __init__(self, facts: ModelFacts):
        self.facts = facts
        self._open: torch.Tensor | None = None  # zeros, (1, 1, 1, capacity)

    def of(
        self, slots: torch.Tensor, visible: int, rows: int, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Return an additive mask (1 or B, 1, Q, visible) in the model's dtype, or one for each kind of layer if there are several.

        `slots` (1 or B, Q): those of the forward's tokens; `rows`: B; `capacity`: the largest `visible` to expect.
        """
        facts = self.facts
        if not facts.windows:
            return None
        if slots.shape == (1, 1) and facts.sees_all(visible):
            # One token that attends to everything before it needs no mask. On a CPU a ready-made one is still cheaper than the model's
            # check for that (0.29 ms against 0.34 ms for the demo draft's step).
            if facts.device.type != "cpu":
                return None
            if self._open is None or self._open.shape[-1] < visible:
                self._open = torch.zeros(1, 1, 1, capacity, dtype=facts.dtype, device=facts.device)
            masks = dict.fromkeys(facts.windows, self._open[..., :visible])
        else:
            masks = additive_masks(facts, slots, visible)
        return self.bundle(masks, rows)

    def bundle(self, masks: dict[str, torch.Tensor], rows: int) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the masks of all kinds of layers in the form that the model takes."""
        if not self.facts.is_tested:
            masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        return masks | dict.fromkeys(self.facts.unmasked) if len(masks) > 1 else next(iter(masks.values()))
