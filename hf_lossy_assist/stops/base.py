"""The base classes of draft stops: settings, and the run of one generate call."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from ..artifacts.features import FeatureSpec
from ..registry.frozen import Frozen
from ..tensors import refuse_unfit


PACKAGE = __name__.partition(".")[0]
Scores: TypeAlias = tuple[torch.Tensor, ...]  # one (B, V) for each drafted token so far


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the Shannon entropy in nats of softmax(logits), (..., V) → (...) float32. A logit of −inf is probability 0."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


@dataclass(frozen=True)
class DraftStop(Frozen, kind="stop"):
    """The settings of a stop: immutable, with a JSON form from the names and values of the fields.

    A stateless stop has a field `max_draft`, or overrides `longest`, and overrides one method: `should_stop`, called after each drafted
    token, or `limits`, which plans a round ahead (then `adaptive = False`). A stateful stop returns a `StopRun` from `start`.
    """

    # Called after every drafted token, with one device sync for each, or for each four (`StopRun.may_run_ahead`); else `limits` fixes
    # the draft lengths before the round.
    adaptive: ClassVar[bool] = True
    features: ClassVar[FeatureSpec | None] = None  # the hidden state that it reads, passed to the run as `features=`
    # In a batch, the share of drafting rows that must have stopped before the round ends. Not annotated: a stop may make it a field.
    patience = 1.0
    joint: ClassVar[bool] = False  # a row's draft may end because of other rows' drafts in the same round
    depth: ClassVar[int] = 0  # levels of nested stops

    @property
    def longest(self) -> int:
        """The maximum number of tokens that a round drafts for a row: the field `max_draft`."""
        return int(self.max_draft)  # type: ignore[attr-defined]

    def with_longest(self, gamma: int) -> "DraftStop":
        """Return a copy with longest draft `gamma` (`num_assistant_tokens=` of a call), the field `max_draft`."""
        return replace(self, max_draft=gamma)  # type: ignore[call-arg]

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Raise an error for unsuitable models. (The policy checks heads.)"""

    def start(self, rows: int) -> "StopRun":
        """Return the run of one generate call of `rows` rows, which holds all state."""
        return StopRun(self)

    def limits(self, rows: list[int]) -> list[int]:
        """Return each row's maximum draft in the next round. For stateless stops; stateful ones plan in `StopRun.begin_round`."""
        return [self.longest] * len(rows)

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: Any) -> torch.Tensor:
        """Return which rows stop after the last drafted token, (B,) bool. For stateless stops; arguments as in `StopRun.after_token`."""
        raise NotImplementedError(f"{type(self).__name__} needs a method should_stop, or adaptive = False")


class StopRun(StoppingCriteria):
    """The state of a stop in one generate call.

    Every round calls `begin_round`, then, if `settings.adaptive`, `drafting` and `after_token` for each drafted token, then `observe`. Rows
    are identified by their index in the call, since finished rows may leave the batch. `settings`: the stop that was started.
    """

    settings: DraftStop
    row_lists: ClassVar[tuple[str, ...]] = ()  # attributes with one entry for each row of the call
    # True if the first rounds draft nothing, so that the draft model need not prefill the prompts.
    begins_alone = False

    def __init__(self, settings: DraftStop):
        self.settings = settings

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        """Set the call's models, before the first round. `kind`: what else costs and acceptance depend on; calls of one kind share estimates."""

    @property
    def may_run_ahead(self) -> bool:
        """Whether the host may sync once for several tokens: not if the stop needs `drafting`, or is from outside this package."""
        return self.is_of_package and type(self).drafting is StopRun.drafting

    @property
    def is_of_package(self) -> bool:
        """Whether the classes of the run and its settings belong to this package."""
        return all(type(x).__module__.partition(".")[0] == PACKAGE for x in (self, self.settings))

    def begin_round(self, rows: list[int]) -> list[int]:
        """Begin a round; return the maximum draft of each of `rows`, the unfinished ones; 0 drafts nothing."""
        return self.settings.limits(rows)

    def drafting(self, rows: Sequence[int]) -> None:
        """Record, before `after_token`, the rows that may draft another token; the others have stopped or have no room."""

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return which rows stop after the last drafted token, (B,) bool.

        Args:
            input_ids (B, length) int64: the last column is the last drafted token.
            scores (tuple of (B, V) float): the last entry is the draft's logits of that token: raw in this package's engine, processed in
                Transformers' loop.
            rows (B,): index of each row in the call. Answers for finished rows are ignored.
            features: the hidden state that `settings.features` specifies, (B, H).
        """
        if not self.settings.adaptive:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        stops = self.settings.should_stop(input_ids, scores, rows=rows, features=features)
        return refuse_unfit(stops, input_ids.shape[:1], torch.bool, self.settings, "should_stop")

    def stopped(self, stops: torch.Tensor) -> None:
        """Record, after each drafted token, which rows have stopped for any reason, (B,) bool. Must not sync."""

    def read(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Copy the rows' answers for the last tokens, (B,) bool each, to the host: the device sync of an adaptive stop."""
        out: list[list[int]] = torch.stack(list(answers)).tolist()
        return out

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Record, after a round, how many tokens of each row were sent to the target and how many accepted."""

    def take(self, row: int, other: "StopRun") -> None:
        """Replace the state of `row` by that of row 0 of `other`, the run of a single-row call. Override it for state outside `row_lists`."""
        for name in self.row_lists:
            getattr(self, name)[row] = getattr(other, name)[0]

    def interrupted(self) -> None:
        """Discard the time since the last round: something else has run."""

    def __call__(self, input_ids: torch.Tensor, scores: Scores, **kwargs: Any) -> torch.Tensor:
        """Call `after_token`, in the signature of a `StoppingCriteria`."""
        rows = kwargs.get("rows") or range(input_ids.shape[0])  # Transformers' loop passes no rows and has one
        return self.after_token(input_ids, scores, rows=rows, features=kwargs.get("features"))
