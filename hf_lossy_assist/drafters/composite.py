"""Two drafters: one that costs nothing where it has a proposal, else the other."""

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
from ..stops import StopRun
from ..validation import shown
from .base import DraftContext, Drafter, DrafterRun, as_drafter
from .checks import fitting
from .model import AssistantDrafter
from .suffix import SuffixDrafter


@dataclass(frozen=True)
class CompositeDrafter(Drafter):
    """`first` where it proposes something for a row, `then` for the other rows. Where all rows have a proposal, `then` does not run.

    By default a look into the text, and the draft model where nothing matches. The output distribution is the target's. A part may be
    given by its name or JSON form, as `generate(drafter=…)` takes them.
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
            if isinstance(part, CompositeDrafter):
                raise TypeError(
                    f"CompositeDrafter.{name}: a composite cannot stand inside another: pass a drafter such as SuffixDrafter()"
                )
            if not isinstance(part, Drafter):
                raise TypeError(
                    f"CompositeDrafter.{name}: expected a drafter such as SuffixDrafter(), got {shown(part)}"
                )
        if self.first.needs_assistant or not self.then.needs_assistant:
            raise ValueError(
                "CompositeDrafter: expected first without a model, such as SuffixDrafter(), and then with one"
            )

    def start(self, context: DraftContext) -> "CompositeRun":
        return CompositeRun(self.first.start(context), self.then.start(context), context.vocabulary)


class CompositeRun(DrafterRun):
    """Both drafters at work in one call."""

    gives_probs = True

    def __init__(self, first: DrafterRun, then: DrafterRun, vocabulary: int):
        self.first, self.then, self.vocabulary = first, then, vocabulary
        self.tokens_are_sure = first.tokens_are_sure and then.tokens_are_sure
        self.must_give_probs = False

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        return (*self.first.cached_models, *self.then.cached_models)

    @property
    def taps(self) -> Sequence[HiddenStateHook]:
        return (*self.first.taps, *self.then.taps)

    def keep_probs(self) -> None:
        self.must_give_probs = True
        self.then.keep_probs()

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        found = self.first.propose(rows, limits, randomness)
        if not self.first.tokens_are_sure:
            found = fitting(found, limits, self.vocabulary, rows.row_ids, type(self.first).__name__)
        lengths = found.lengths.tolist()
        missing = [0 if n else limit for n, limit in zip(lengths, limits, strict=True)]
        if not any(missing):
            return self._with_probs(found) if self.must_give_probs else found
        drafted = self.then.propose(rows, missing, randomness)
        # Rows with a proposal ran along in the other model's batch: what it drafted for them is not their draft.
        texts = [held + 1 for held in rows.cached_lengths()]
        for model in self.then.cached_models:
            model.rollback([min(m, t) if n else m for m, t, n in zip(model.lengths, texts, lengths, strict=True)])
        if not any(lengths):
            return replace(drafted, planned=found.planned)
        return merged(self._with_probs(found) if drafted.probs is not None else found, drafted)

    def _with_probs(self, draft: Draft) -> Draft:
        """The same draft with q = 1 written out, (B, γ, V)."""
        probs = torch.nn.functional.one_hot(draft.tokens, self.vocabulary)
        return replace(draft, probs=probs.to(torch.float32))

    def learn(self, rows: Rows, verified: Verified, accepted: Sequence[int]) -> None:
        self.first.learn(rows, verified, accepted)
        self.then.learn(rows, verified, accepted)

    def select(self, keep: Sequence[int]) -> None:
        self.first.select(keep)
        self.then.select(keep)

    def together(self, seats: int, stop: StopRun, processing: Processing) -> "CompositeRun":
        out = copy.copy(self)
        out.first, out.then = (its.together(seats, stop, processing) for its in (self.first, self.then))
        return out

    def take(self, b: int, number: int, other: DrafterRun) -> None:
        assert isinstance(other, CompositeRun)
        self.first.take(b, number, other.first)
        self.then.take(b, number, other.then)


def merged(one: Draft, other: Draft) -> Draft:
    """Each row from the draft that has tokens for it; both have distributions or none has."""
    gamma = max(one.gamma, other.gamma)
    use = one.lengths > 0  # (B,)
    a, b = (torch.nn.functional.pad(draft.tokens, (0, gamma - draft.gamma)) for draft in (one, other))
    tokens = torch.where(use[:, None], a, b)
    probs, validity = None, None
    if one.probs is not None and other.probs is not None:
        a, b = (
            torch.nn.functional.pad(d.probs, (0, 0, 0, gamma - d.gamma)) for d in (one, other) if d.probs is not None
        )
        probs = torch.where(use[:, None, None], a, b)
    if other.validity is not None:  # a proposal without a model has no logits that could be broken
        validity = torch.nn.functional.pad(other.validity, (0, gamma - other.gamma)).masked_fill(use[:, None], 0.0)
    lengths = torch.where(use, one.lengths, other.lengths)
    planned = max(one.planned, other.planned)
    return Draft(tokens, lengths, one.row_ids, planned, one.sampling, probs, validity=validity)


register_drafter(
    "composite", CompositeDrafter,
    summary="A look into the text where it finds a match, else the draft model: rows of a batch each for itself.",
)  # fmt: skip
