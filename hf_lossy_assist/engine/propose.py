"""The first stage of a round: the drafter proposes, and what it says stands behind each row's text."""

from collections.abc import Sequence

import torch

from ..round import Draft
from ..validation import shown
from .call import Call


def propose(call: Call, limits: Sequence[int]) -> Draft:
    """Up to `limits[b]` tokens for row b, written behind its text.

    Raises: `ValueError` or `TypeError`, one line, for a draft that is none of these rows and this target.
    """
    draft = call.drafter.propose(call.rows, limits, call.randomness)
    if not call.drafter.tokens_are_sure:
        refuse_unfit(draft, limits, call.vocabulary, type(call.drafter).__name__)
    call.rows.write(draft.tokens)
    return draft


def refuse_unfit(draft: Draft, limits: Sequence[int], vocabulary: int, name: str) -> None:
    """Refuse what somebody's own drafter got wrong, before a forward stumbles over it or a wrong q makes another distribution."""
    if not isinstance(draft, Draft):
        raise TypeError(f"{name}.propose: expected a Draft, got {shown(draft)}")
    rows, gamma = len(limits), draft.gamma if draft.tokens.dim() == 2 else 0
    shapes = {"tokens": (rows, gamma), "lengths": (rows,), "call_rows": (rows,)}
    for field, shape in shapes.items():
        value = getattr(draft, field)
        if value.shape != shape or value.dtype != torch.int64:
            what = "(B, γ)" if field == "tokens" else "(B,)"
            raise ValueError(
                f"{name}.propose: {field}: expected int64 {what} with B = {rows}, got {value.dtype} {tuple(value.shape)}"
            )
    if draft.probs is not None and draft.probs.shape != (rows, gamma, vocabulary):
        raise ValueError(
            f"{name}.propose: probs: expected (B, γ, V) = {(rows, gamma, vocabulary)}, got {tuple(draft.probs.shape)}"
        )
    for row, (length, limit) in enumerate(zip(draft.lengths.tolist(), limits, strict=True)):
        if not 0 <= length <= min(limit, gamma):
            raise ValueError(
                f"{name}.propose: row {row} was to draft at most {limit} tokens, and has {gamma} of which {length} count"
            )
    drafted = torch.arange(gamma, device=draft.tokens.device) < draft.lengths[:, None]
    foreign = draft.tokens[drafted & ((draft.tokens < 0) | (draft.tokens >= vocabulary))].tolist()
    if foreign:
        raise ValueError(f"{name}.propose: expected token ids from 0 to {vocabulary - 1}, got {foreign[0]}")
