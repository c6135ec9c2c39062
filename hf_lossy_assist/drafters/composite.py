"""Combination of two drafters: one without a model, and another where it proposes nothing."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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


def of_then(name: str) -> Any:
    """Return a property that reads attribute `name` of a composite's second part."""
    return property(lambda drafter: getattr(drafter.then, name))


def as_part(name: str, drafter: object) -> Drafter:
    """Return a part of a drafter, given by name or in JSON form, too. Raises: `TypeError` or `ValueError`, one line."""
    if isinstance(drafter, str | Mapping):
        drafter = as_drafter(drafter)
    if not isinstance(drafter, Drafter) or hasattr(drafter, "then"):
        raise TypeError(f"{name}: expected a drafter such as SuffixDrafter(), and no composite, got {shown(drafter)}")
    return drafter


@dataclass(frozen=True)
class CompositeDrafter(Drafter):
    """`first` for the rows where it proposes something, `then` for the others. If all rows have a proposal, `then` does
    not run.

    By default `first` searches the text and `then` is the draft model. A drafter on the target's hidden states may take
    its place, also passed as `assistant_model`; it learns the tokens of `first` from the target's states. The output
    distribution is the target's. A part may also be given by name or in JSON form, as in `generate(drafter=…)`.
    """

    first: Drafter = field(default_factory=SuffixDrafter)
    then: Drafter = field(default_factory=AssistantDrafter)
    needs_assistant = of_then("needs_assistant")
    gives_probs = of_then("gives_probs")

    def __post_init__(self) -> None:
        for name in ("first", "then"):
            object.__setattr__(self, name, as_part(f"CompositeDrafter.{name}", getattr(self, name)))
        if self.first.needs_assistant or self.first.gives_probs or isinstance(self.then, SuffixDrafter):
            raise ValueError(
                "CompositeDrafter: expected first without a model, such as SuffixDrafter(), and then with one"
            )

    @property
    def main(self) -> Drafter:
        return self.then

    def over(self, other: Drafter) -> Drafter | None:
        return replace(self, then=other) if self.needs_assistant else None

    def start(self, context: DraftContext) -> "CompositeRun":
        return CompositeRun(self.first.start(context), self.then.start(context), context)


class CompositeRun(DrafterRun):
    """Both drafters during one call."""

    may_forbid = True

    def __init__(self, first: DrafterRun, then: DrafterRun, context: DraftContext):
        self.first, self.then, self.vocabulary = first, then, context.vocabulary
        self.gives_probs, self.reads_target = then.gives_probs, then.reads_target or first.reads_target
        self.drafts_at_once = then.drafts_at_once or first.drafts_at_once
        self.skip_validation = first.skip_validation and then.skip_validation
        self.reads_probs = context.reads_probs

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return (*self.first.cached_models, *self.then.cached_models)

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return (*self.first.taps, *self.then.taps)

    def prompts_are_read(self, rows: Rows) -> None:
        self.first.prompts_are_read(rows)
        self.then.prompts_are_read(rows)

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        copied = self.first.propose(rows, limits, randomness)
        if not self.first.skip_validation:
            copied = validate_draft(copied, limits, self.vocabulary, rows.row_ids, type(self.first).__name__)
        return self._add(copied, rows, limits, randomness)

    def _add(self, copied: Draft, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        """Return `copied`, and drafts of the other drafter for the rows in which it is empty."""
        lengths = copied.lengths.tolist() if copied.counts is None else copied.counts
        missing = [0 if n else limit for n, limit in zip(lengths, limits, strict=True)]
        if not any(missing):
            if self.then.reads_target:  # it takes the states of prompts that were read before this round
                self.then.propose(rows, missing, randomness)
            return self._with_probs(copied) if self.reads_probs else copied
        drafted = self.then.propose(rows, missing, randomness)
        # The other model also ran rows that have a proposal; what it drafted for them is discarded.
        texts = [cached + 1 for cached in rows.cached_lengths()]
        for model in self.then.cached_models:
            model.rollback([min(m, t) if n else m for m, t, n in zip(model.lengths, texts, lengths, strict=True)])
        if not any(lengths):
            return replace(drafted, planned=copied.planned)
        return merged(self._with_probs(copied) if drafted.probs is not None else copied, drafted)

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

    def close(self) -> None:
        self.first.close()
        self.then.close()

    def fresh(self, rows: int, limit: int, stop: StopRun, processing: Processing, clock: Clock) -> "CompositeRun":
        out = copy.copy(self)
        out.first, out.then = (run.fresh(rows, limit, stop, processing, clock) for run in (self.first, self.then))
        return out

    def insert(self, slots: Sequence[int], row_ids: Sequence[int], other: DrafterRun, rows: Sequence[int]) -> None:
        assert isinstance(other, CompositeRun)
        self.first.insert(slots, row_ids, other.first, rows)
        self.then.insert(slots, row_ids, other.then, rows)


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
