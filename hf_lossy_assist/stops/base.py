"""Draft stops: settings, a run for each generate call, and the entropy that several stops compute."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from ..artifacts.features import FeatureSpec
from ..registry import Frozen, set_base
from ..validation import check_nesting, shown


PACKAGE = __name__.partition(".")[0]
Scores: TypeAlias = tuple[torch.Tensor, ...]  # of each drafted token so far, (B, V) each


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Return the Shannon entropy in nats of softmax(logits), (..., V) → (...) float32. A logit of −inf is a probability of 0."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


@dataclass(frozen=True)
class DraftStop(Frozen):
    """The settings of a stop: immutable, with a JSON form through the names and values of its fields.

    A stop without state has a field `max_draft`, or overrides `longest`, and overrides one method: `should_stop`, called after each
    drafted token, or `limits`, which plans a round ahead (then `adaptive = False`). A stop with state returns a `StopRun` from `start`.

    Class attributes:
        adaptive: inspects every drafted token, at one device sync each, or for each four (`StopRun.may_run_ahead`). False: the limits fix the draft length before the round.
        features (`FeatureSpec`): the hidden state that the stop reads, if any; a run gets it as `features=`.
        patience: in a batch, the share of drafting rows that must have stopped before the round ends: 1 waits for every row, 0 for none.
        joint: a row's draft may end for what other rows drafted in the same round.
        depth: how many stops are nested inside.
    """

    adaptive: ClassVar[bool] = True
    features: ClassVar[FeatureSpec | None] = None
    patience = 1.0  # not annotated: a stop may make it a field
    joint: ClassVar[bool] = False
    depth: ClassVar[int] = 0

    @property
    def longest(self) -> int:
        """The most tokens that one round may draft for a row: the field `max_draft`."""
        if "max_draft" not in {field.name for field in fields(self)}:
            raise NotImplementedError(f"{type(self).__name__} needs a property longest, or a field max_draft")
        return int(self.max_draft)  # type: ignore[attr-defined]

    def with_longest(self, gamma: int) -> "DraftStop":
        """Return the stop with another longest draft: `num_assistant_tokens=` of a call. Raises: `ValueError` without a field `max_draft`."""
        if "max_draft" not in {field.name for field in fields(self)}:
            raise ValueError(
                f"num_assistant_tokens: {type(self).__name__} has no field max_draft that could be set to {gamma}: leave it out, or give the "
                "stop one (or a method with_longest)"
            )
        return replace(self, max_draft=gamma)  # type: ignore[call-arg]

    def check(
        self, target: PreTrainedModel, draft: PreTrainedModel | None, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Refuse models that it was not made for. (The policy checks heads.)"""

    def start(self, rows: int) -> "StopRun":
        """Return the run of one generate call of `rows` rows, which has all state."""
        return StopRun(self)

    def limits(self, rows: list[int]) -> list[int]:
        """Return the longest draft of each of `rows` in the coming round. For stops without state; others plan in `StopRun.begin_round`."""
        return [self.longest] * len(rows)

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: Any) -> torch.Tensor:
        """Return which rows stop after the token just drafted, (B,) bool. For stops without state; arguments as of `StopRun.after_token`."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a method should_stop(input_ids, scores, **kwargs), or a start(rows) that returns a StopRun "
            "with an after_token of its own, or adaptive = False"
        )


class StopRun(StoppingCriteria):
    """A stop at work in one generate call, with its state.

    Every round calls `begin_round`, then, if `settings.adaptive`, `drafting` and `after_token` for each drafted token, then `observe`. State
    of a row is stored by the row's number in the call: a finished row may leave the batch. `settings`: the stop that was started.
    """

    settings: DraftStop
    row_lists: ClassVar[tuple[str, ...]] = ()  # attributes with an entry for each row of the call
    # True if the first rounds draft nothing, so that the draft model need not read the prompts before them.
    begins_alone = False

    def __init__(self, settings: DraftStop):
        self.settings = settings

    def pair(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable) -> None:
        """Take the call's models, before the first round. `kind`: what else costs and acceptance depend on; calls of one kind share what
        they learn.
        """

    @property
    def may_run_ahead(self) -> bool:
        """Tell whether it may be asked about tokens after one at which it stops, so that the host looks once for several of its answers.

        Not where it follows by `drafting` alone which rows go on, nor where the code is not of this package.
        """
        return self.is_of_package and type(self).drafting is StopRun.drafting

    @property
    def is_of_package(self) -> bool:
        """Tell whether its code and that of its settings are this package's."""
        return all(type(x).__module__.partition(".")[0] == PACKAGE for x in (self, self.settings))

    def begin_round(self, rows: list[int]) -> list[int]:
        """Return the longest draft of each of `rows`, the unfinished ones, in the round that begins; 0 drafts nothing."""
        return self.settings.limits(rows)

    def drafting(self, rows: Sequence[int]) -> None:
        """Take the rows of the call that may draft another token, before `after_token`: the others have stopped, or have no room."""

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return which rows stop after the token just drafted, (B,) bool.

        Args:
            input_ids (B, length) int64: the last column is the token just drafted.
            scores (tuple of (B, V) float): the last one holds the draft's logits of the token: raw ones in this package's engine,
                processed ones in Transformers' loop.
            rows (B,): each row's number in the call. Answers of finished rows do not matter.
            features (B, H): the hidden state that `settings.features` specifies.
        """
        if not self.settings.adaptive:
            return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        stops = self.settings.should_stop(input_ids, scores, rows=rows, features=features)
        if not isinstance(stops, torch.Tensor) or stops.shape != input_ids.shape[:1] or stops.dtype != torch.bool:
            name = type(self.settings).__name__
            raise TypeError(
                f"{name}.should_stop: expected a tensor of bool with one entry for each of {len(input_ids)} rows, got {shown(stops)}"
            )
        return stops

    def stopped(self, stops: torch.Tensor) -> None:
        """Take, after each drafted token, which rows have stopped by then for whatever reason, (B,) bool, without a look at it."""

    def read(self, answers: Sequence[torch.Tensor]) -> list[list[int]]:
        """Bring what rows answered to the last tokens, (B,) bool each, to the host: the device sync that an adaptive stop costs."""
        looked = answers[0][None] if len(answers) == 1 else torch.stack(list(answers))
        out: list[list[int]] = looked.tolist()
        return out

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Take note, after a round, how many tokens each of `rows` sent to the target, and how many were accepted."""

    def take(self, row: int, other: "StopRun") -> None:
        """Replace the state of `row` by that of row 0 of `other`, the run of a call with one text. A run with state of rows beside `row_lists`
        overrides this.
        """
        for name in self.row_lists:
            getattr(self, name)[row] = getattr(other, name)[0]

    def interrupted(self) -> None:
        """Ignore the seconds since the last round: something else has run."""

    def __call__(self, input_ids: torch.Tensor, scores: Scores, **kwargs: Any) -> torch.Tensor:
        """Call `after_token`, as Transformers' loop calls a `StoppingCriteria`."""
        rows = kwargs.get("rows") or range(input_ids.shape[0])  # Transformers' loop passes none, and has one row
        return self.after_token(input_ids, scores, rows=rows, features=kwargs.get("features"))


def check_stop(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is a stop, `ValueError` if another one around it would be one level too many."""
    if not isinstance(value, DraftStop):
        raise TypeError(f"{name}: expected a stop such as SVIP(), got {shown(value)}")
    check_nesting(name, value.depth + 1)


set_base("stop", DraftStop)
