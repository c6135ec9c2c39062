"""The first stage of a round: the drafter proposes, and what it says stands behind each row's text."""

from collections.abc import Sequence
from dataclasses import replace

from ..drafters.checks import fitting
from ..round import Draft
from ..validation import shown
from .call import Call


def propose(call: Call, limits: Sequence[int]) -> Draft:
    """Up to `limits[b]` tokens for row b, written behind its text.

    Raises: `ValueError` or `TypeError`, one line, for a draft that is none of these rows and this target.
    """
    draft = call.drafter.propose(call.rows, limits, call.randomness)
    if not call.drafter.tokens_are_sure:
        name = type(call.drafter).__name__
        draft = in_this_mode(fitting(draft, limits, call.vocabulary, call.rows.order, name), call.sampling, name)
    call.rows.write(draft.tokens)
    return draft


def in_this_mode(draft: Draft, sampling: bool, name: str) -> Draft:
    """`draft` as one of this call's kind of decoding. Tokens without a distribution count as certain in both; where q is given, tokens that
    are its argmax were not drawn from it, and that is refused."""
    if draft.probs is not None and draft.sampling != sampling:
        raise ValueError(
            f"{name}.propose: sampling: expected {sampling}, as this call decodes (DraftContext.sampling), got {shown(draft.sampling)}"
        )
    return replace(draft, sampling=sampling)
