"""The first stage of a round: the drafter proposes, and what it says stands behind each row's text."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..batch.logits_processing import Processing
from ..batch.processor_kinds import only_functions
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
        draft = in_this_mode(fitting(draft, limits, call.vocabulary, call.rows.row_ids, name), call.sampling, name)
    call.rows.write(draft.tokens)
    if draft.gamma and not call.rule.rule.lossless and not call.drafter.gives_probs and call.processing.may_forbid:
        return cut_forbidden(call, draft)
    return draft


def cut_forbidden(call: Call, draft: Draft) -> Draft:
    """Cut drafts, which stand after their rows' texts, before the first token that a logits processor forbids: a lossy rule might keep it."""
    rows, functions = call.rows, Processing(only_functions(call.processing.processors), call.processing.batch)
    flat = torch.zeros(*draft.tokens.shape, call.vocabulary, device=rows.ids.device)
    scores = functions(rows.ids, rows.lengths, flat, rows.row_id_list)
    allowed = scores.gather(2, draft.tokens[..., None])[..., 0] > float("-inf")
    return replace(draft, lengths=torch.minimum(draft.lengths, allowed.long().cumprod(dim=1).sum(dim=1)))


def in_this_mode(draft: Draft, sampling: bool, name: str) -> Draft:
    """`draft` as one of this call's kind of decoding. Tokens without a distribution count as certain in both; where q is given, tokens that
    are its argmax were not drawn from it, and that is refused."""
    if draft.probs is not None and draft.sampling != sampling:
        raise ValueError(
            f"{name}.propose: sampling: expected {sampling}, as this call decodes (DraftContext.sampling), got {shown(draft.sampling)}"
        )
    return replace(draft, sampling=sampling)
