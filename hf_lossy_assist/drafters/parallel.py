"""PARD: a draft model that drafts several tokens in one forward, trained to predict after mask tokens
(huggingface.co/papers/2504.18583).

Its config names the mask token (`pard_token`). The logits after a text and after each of K − 1 masks behind it are
those of the next K tokens, each without the tokens drawn before it. Without masks it is an ordinary draft model.
"""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..artifacts.features import FeatureSpec
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.introspection import base_of, tokens_known
from ..round import Draft
from ..tensors import advance, on_device
from ..validation import is_int, shown
from .base import DraftContext, fit_vocabulary
from .hidden_state import DraftModel, HiddenStateDrafter
from .model import AssistantRun


LONGEST = 16  # tokens of a block: published models are trained on 8 and draft up to 12


class ParallelRun(AssistantRun):
    """A PARD model during one call. A round has one forward, and each further token takes the next place of its
    logits."""

    is_plain_model, why_eager = False, "the draft model drafts after mask tokens"
    many = LONGEST + 1  # a row has not read the tokens that it drafted

    def __init__(self, model: CachedModel, context: DraftContext, network: torch.nn.Module, mask: int):
        """Take `mask`: the mask token's id; the others as `AssistantRun`.

        Raises: `ValueError`, one line, for a head on the draft's states, which it was not trained on after masks.
        """
        for spec in (context.stop.settings.features, context.features):
            refuse_features(spec, network)
        super().__init__(model, context, network)
        self.mask, self._size = mask, 0
        self._places: list[torch.Tensor] = []  # (B, V) each: the round's logits that no token was drawn from yet

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        limits = [min(limit, LONGEST) for limit in limits]
        self._size, self._places = max(limits), []
        draft = super().propose(rows, limits, randomness)
        self._places = []  # of a large vocabulary they take as much memory as a layer
        return draft

    def _logits(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        if not self._places:
            with self.clock.time("draft"):
                self._places = list(self._fill_block(feed, counts, device).unbind(dim=1))
        return fit_vocabulary(self._places.pop(0).to(device=device, dtype=torch.float32), self.vocabulary)

    def _fill_block(self, feed: torch.Tensor, counts: list[int], device: torch.device) -> torch.Tensor:
        """Read the text's new tokens and the masks, and drop the masks;
        return the logits of the block's places, (B, K, V)."""
        masks, shortest, longest = self._size - 1, max(min(counts), 1), max(counts)
        tokens = torch.nn.functional.pad(feed, (0, masks), value=self.mask)
        if shortest < longest:
            columns = torch.arange(tokens.shape[1], device=device)
            tokens = tokens.masked_fill(columns >= on_device(counts, device)[:, None], self.mask)
        text = [cached + count for cached, count in zip(self.model.lengths, counts, strict=True)]
        fed = advance(counts, [masks] * len(counts), self.model.device)
        logits = self.model.feed(tokens, fed, keep=self._size + longest - shortest)
        self.model.rollback(text)
        if shortest == longest:
            return logits
        first = on_device(counts, logits.device).clamp(min=1)[:, None] - shortest
        positions = first + torch.arange(self._size, device=logits.device)  # (B, K)
        return logits[torch.arange(len(counts), device=logits.device)[:, None], positions]


def refuse_features(spec: FeatureSpec | None, draft: DraftModel | torch.nn.Module) -> None:
    """Refuse a head that reads states of `draft` which a block does not have. Raises: `ValueError`, one line."""
    if isinstance(draft, HiddenStateDrafter):
        draft.check_features(spec)
    elif spec is not None and spec.reads("draft") and longest_draft(draft) is not None:
        raise ValueError(
            f"a head here reads the {spec}, which a draft model with a pard_token has of the text alone: use svip, or "
            "delete pard_token from its config to draft token by token"
        )


def longest_draft(draft: DraftModel | torch.nn.Module) -> int | None:
    """Return the most tokens that `draft` writes in a round, if it is fixed by its training; None: it is not."""
    if isinstance(draft, HiddenStateDrafter):
        return draft.network.longest
    return None if getattr(base_of(draft).config, "pard_token", None) is None else LONGEST


def start_parallel(model: CachedModel, context: DraftContext, assistant: PreTrainedModel) -> ParallelRun:
    """Return the run of a draft model with a `pard_token` on its cache.

    Raises: `ValueError`, one line, for one that is no token of the model.
    """
    base = base_of(assistant)
    mask, vocabulary = base.config.pard_token, tokens_known(base)
    if not is_int(mask) or not 0 <= mask < vocabulary:
        raise ValueError(
            f"pard_token of {type(base).__name__}'s config: expected a token id below {vocabulary}, got {shown(mask)}: "
            "delete it from the config to draft token by token"
        )
    return ParallelRun(model, context, assistant, int(mask))
