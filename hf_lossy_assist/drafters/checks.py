"""What somebody's own drafter proposed, before anything is done with it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..round import Draft
from ..validation import shown


def fitting(draft: Draft, limits: Sequence[int], vocabulary: int, order: torch.Tensor, name: str) -> Draft:
    """`draft` with zeros for padding, which may be anything, and with the rows of the call, `order` (B,).

    Raises: `ValueError` or `TypeError`, one line, before a forward stumbles over it or a wrong q makes another distribution.
    """
    refuse_shapes(draft, len(limits), vocabulary, order.device, name)
    gamma = draft.gamma
    for row, (length, limit) in enumerate(zip(draft.lengths.tolist(), limits, strict=True)):
        if not 0 <= length <= min(limit, gamma):
            raise ValueError(
                f"{name}.propose: row {row} was to draft at most {limit} tokens, and has {gamma} of which {length} count"
            )
    drafted = torch.arange(gamma, device=draft.tokens.device) < draft.lengths[:, None]
    foreign = draft.tokens[drafted & ((draft.tokens < 0) | (draft.tokens >= vocabulary))].tolist()
    if foreign:
        raise ValueError(f"{name}.propose: expected token ids from 0 to {vocabulary - 1}, got {foreign[0]}")
    return replace(draft, tokens=draft.tokens.masked_fill(~drafted, 0), row_ids=order)


def refuse_shapes(draft: Draft, rows: int, vocabulary: int, device: torch.device, name: str) -> None:
    """Refuse what is no draft, or one of other shapes, dtypes or on another device."""
    if not isinstance(draft, Draft):
        raise TypeError(f"{name}.propose: expected a Draft, got {shown(draft)}")
    for field in ("tokens", "lengths", "probs", "validity"):
        value = getattr(draft, field)
        if not isinstance(value, torch.Tensor) and (value is not None or field in ("tokens", "lengths")):
            raise TypeError(f"{name}.propose: {field}: expected a tensor, got {shown(value)}")
    gamma = draft.gamma if draft.tokens.dim() == 2 else 0
    for field, shape in {"tokens": (rows, gamma), "lengths": (rows,)}.items():
        value = getattr(draft, field)
        if value.shape != shape or value.dtype != torch.int64:
            what = "(B, γ)" if field == "tokens" else "(B,)"
            raise ValueError(
                f"{name}.propose: {field}: expected int64 {what} with B = {rows}, got {value.dtype} {tuple(value.shape)}"
            )
        if value.device != device:
            raise ValueError(
                f"{name}.propose: {field}: expected a tensor on {device}, where the texts are, got {value.device}"
            )
    if draft.probs is not None and draft.probs.shape != (rows, gamma, vocabulary):
        raise ValueError(
            f"{name}.propose: probs: expected (B, γ, V) = {(rows, gamma, vocabulary)}, got {tuple(draft.probs.shape)}"
        )
