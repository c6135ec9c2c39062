"""What every drafter answers: what to propose, and what it learns from a verdict.

`Drafter` is the settings, `DrafterRun` the drafter at work in one call. Drafters never change the output distribution: whatever they
propose is verified.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureSpec, FeatureTap
from ..batch.processing import Processing
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..models.cached import CachedModel
from ..registry import set_base
from ..round import Draft, Verified
from ..stats.clock import Clock
from ..stops import StopRun


@dataclass(frozen=True)
class DraftContext:
    """What one generate call hands to a drafter."""

    target: Any  # the Transformers model
    rows: Rows
    stop: StopRun
    processing: Processing
    vocabulary: int  # how many token ids the target has
    sampling: bool
    clock: Clock
    # Makes the drafter of `assistant_model=`; None: the call has none.
    assistant_run: Callable[[], "DrafterRun"] | None = None


@dataclass(frozen=True)
class Drafter:
    """The base of drafters: settings, and `start`. Pass one as `generate(…, lossy_policy=…, drafter=…)`."""

    needs_assistant: ClassVar[bool] = False  # drafts with the call's `assistant_model`
    gives_probs: ClassVar[bool] = False  # its drafts have distributions, which rules and filters may read

    def start(self, context: DraftContext) -> "DrafterRun":
        """The drafter at work in one generate call."""
        raise NotImplementedError(f"{type(self).__name__} needs a method start(context)")


class DrafterRun:
    """A drafter at work in one generate call."""

    # Which hidden states of the target `learn` is given; None: none.
    target_features: FeatureSpec | None = None
    gives_probs = False  # its drafts have distributions, which rules and filters may read
    # Its tokens cannot be other than the target's. False: the engine looks at each draft, which costs a device sync.
    tokens_are_sure = False

    @property
    def cached_models(self) -> Sequence[CachedModel]:
        """Models that the engine gives each row's prompt before the first round."""
        return ()

    @property
    def taps(self) -> Sequence[FeatureTap]:
        """Hooks that must be active during the call."""
        return ()

    def keep_probs(self) -> None:
        """Told before the first round that a rule or a filter reads `Draft.probs` in greedy decoding too."""

    def propose(self, rows: Rows, limits: Sequence[int], randomness: Randomness) -> Draft:
        """Up to `limits[b]` tokens for row b."""
        raise NotImplementedError(f"{type(self).__name__} needs a method propose(rows, limits, randomness)")

    def learn(
        self, rows: Rows, verified: Verified, accepted: Sequence[int], target_hidden: torch.Tensor | None = None
    ) -> None:
        """Told after each round how many drafted tokens of each row were accepted, with `rows` already grown by them.

        `target_hidden` (B, γ + 1, H): the states of `target_features` at the token before the draft and at each drafted token.
        """

    def select(self, keep: Sequence[int]) -> None:
        """Keep these rows only."""


def fit_vocabulary(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Logits (…, V') over the target's `vocabulary`: missing ids get −inf, surplus is cut off."""
    missing = vocabulary - logits.shape[-1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocabulary]


def empty_draft(rows: Rows, limits: Sequence[int], sampling: bool) -> Draft:
    """No token for any row."""
    none = torch.zeros(len(limits), dtype=torch.int64, device=rows.ids.device)
    return Draft(rows.ids[:, :0], none, rows.order, max(limits, default=0), sampling)


set_base("drafter", Drafter)
