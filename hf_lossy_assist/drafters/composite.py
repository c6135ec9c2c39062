"""Combination of two drafters: one without a model, and another where it proposes nothing."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ..batch.logits_processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached_model import CachedModel
from ..models.hidden_state_hook import HiddenStateHook
from ..registry import register_drafter
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun
from ..validation import shown
from .base import DraftContext, Drafter, DrafterRun, as_drafter, validate_draft
from .model import AssistantDrafter
from .suffix import SuffixDrafter


@dataclass(frozen=True)
class CompositeDrafter(Drafter):
    """`first` for the rows where it proposes something, `then` for the others. If all rows have a proposal, `then` does not run.

    By default `first` searches the text and `then` is the draft model. The output distribution is the target's. A part may also be given by name or
    in JSON form, as in `generate(drafter=…)`.
    """

    first: Drafter = field(default_factory=SuffixDrafter)
    then: Drafter = field(default_factory=AssistantDrafter)
    needs_assistant: ClassVar[bool] = True
    gives_probs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("first", "then"):
            part = getattr(self, name)
            if isinstance(part, str | Mapping):
                part = as_drafter(part)
                object.__setattr__(self, name, part)
            if not isinstance(part, Drafter) or isinstance(part, CompositeDrafter):
                raise TypeError(
                    f"CompositeDrafter.{name}: expected a drafter such as SuffixDrafter(), and no composite, got {shown(part)}"
                )
        if self.first.needs_assistant or not self.then.needs_assistant:
            raise ValueError(
                "CompositeDrafter: expected first without a model, such as SuffixDrafter(), and then with one"
            )

    def start(self, context: DraftContext) -> "CompositeRun":
        return CompositeRun(
            self.first.start(context), self.then.start(context), context.vocabulary, context.reads_probs
        )


class CompositeRun(DrafterRun):
    """Both drafters during one call."""

    gives_probs = True

    def __init__(self, first: DrafterRun, then: DrafterRun, vocabulary: int, reads_probs: bool):
        self.first, self.then, self.vocabulary = first, then, vocabulary
        self.skip_validation = first.skip_validation and then.skip_validation
        self.reads_probs = reads_probs

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return (*self.first.cached_models, *self.then.cached_models)

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return (*self.first.taps, *self.then.taps)

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        found = self.first.propose(rows, limits, randomness)
        if not self.first.skip_validation:
            found = validate_draft(found, limits, self.vocabulary, rows.row_ids, type(self.first).__name__)
        lengths = found.lengths.tolist() if found.counts is None else found.counts
        missing = [0 if n else limit for n, limit in zip(lengths, limits, strict=True)]
        if not any(missing):
            return self._with_probs(found) if self.reads_probs else found
        drafted = self.then.propose(rows, missing, randomness)
        # The other model also ran rows that have a proposal; what it drafted for them is discarded.
        texts = [held + 1 for held in rows.cached_lengths()]
        for model in self.then.cached_models:
            model.rollback([min(m, t) if n else m for m, t, n in zip(model.lengths, texts, lengths, strict=True)])
        if not any(lengths):
            return replace(drafted, planned=found.planned)
        return merged(self._with_probs(found) if drafted.probs is not None else found, drafted)

    def _with_probs(self, draft: Draft) -> Draft:
        """Return the draft with q = 1 as explicit probabilities, (B, γ, V)."""
        probs = torch.nn.functional.one_hot(draft.tokens, self.vocabulary)
        return replace(draft, probs=probs.to(torch.float32))

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        self.first.learn(rows, verified, accepted)
        self.then.learn(rows, verified, accepted)

    def select(self, keep: Sequence[int]) -> None:
        self.first.select(keep)
        self.then.select(keep)

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "CompositeRun":
        out = copy.copy(self)
        out.first, out.then = (part.fresh(rows, limit, stop, processing, clock) for part in (self.first, self.then))
        return out

    def insert(self, places: Sequence[int], numbers: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        assert isinstance(other, CompositeRun)
        self.first.insert(places, numbers, other.first, rows)
        self.then.insert(places, numbers, other.then, rows)


def merged(one: Draft, other: Draft) -> Draft:
    """Return each row from the draft that has tokens for it; either both have distributions or neither."""
    gamma = max(one.gamma, other.gamma)
    use = one.lengths > 0  # (B,)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (*[0, 0] * (x.dim() - 2), 0, gamma - x.shape[1]))

    probs = validity = None
    if one.probs is not None and other.probs is not None:
        probs = torch.where(use[:, None, None], padded(one.probs), padded(other.probs))
    if other.validity is not None:  # a proposal without a model has no logits that could be invalid
        validity = padded(other.validity).masked_fill(use[:, None], 0.0)
    return Draft(
        tokens=torch.where(use[:, None], padded(one.tokens), padded(other.tokens)),
        lengths=torch.where(use, one.lengths, other.lengths),
        row_ids=one.row_ids,
        planned=max(one.planned, other.planned),
        sampling=one.sampling,
        probs=probs,
        validity=validity,
    )


register_drafter(
    "composite",
    CompositeDrafter,
    summary="A look into the text where it finds a match, else the draft model: rows of a batch each for itself.",
)
