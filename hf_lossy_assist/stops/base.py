"""What a draft stop is: settings, and a run for each generate call. And the entropy that several stops compute."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
from transformers import StoppingCriteria

from ..artifacts.features import FeatureSpec
from ..registry import NoDeepCopy, set_base
from ..validation import check_nesting, shown


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats of softmax(logits), (..., V) → (...) float32. A logit of −inf is a probability of 0."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


@dataclass(frozen=True)
class DraftStop(NoDeepCopy):
    """The settings of a stop: immutable, and with a JSON form through the names and values of its fields.

    A stop without state overrides `longest` and one method: `should_stop`, which is asked after each drafted token, or `limits`,
    which plans a round ahead (then `adaptive = False`). A stop with state overrides `start` and returns a `StopRun` of its own.

    What a subclass says of itself: `adaptive`, it looks at every drafted token, which costs a look at the device each (True);
    `features` (`FeatureSpec`), the hidden state that it is given as `features=`; `patience`, in a batch the share of drafting rows that
    must have stopped before the round ends, 0 to 1 (1: all); `joint`, a row's answer depends on what other rows drafted (False).
    """

    # True if the stop inspects every drafted token. If False, the limits fix the draft length before the round,
    # which saves one device sync per token.
    adaptive: ClassVar[bool] = True
    # The hidden state that the stop reads, if any; a run is given it as `features=`.
    features: ClassVar[FeatureSpec | None] = None
    # In a batch, the share of drafting rows that must have stopped before the round ends: 1 waits for every row, 0 for none.
    # Not annotated, so that a stop may make it a field of its own.
    patience = 1.0
    # True if a row's draft may end for what other rows drafted in the same round.
    joint: ClassVar[bool] = False
    # How many stops stand inside one another, below this one.
    depth: ClassVar[int] = 0

    @property
    def longest(self) -> int:
        """The most tokens that one round may draft for a row (γ at most)."""
        raise NotImplementedError(f"{type(self).__name__} needs a property longest")

    def with_longest(self, gamma: int) -> "DraftStop":
        """The same stop with another longest draft; what `num_assistant_tokens=` at the call does.

        Raises: `ValueError` for a stop that has no field `max_draft` and does not override this.
        """
        if "max_draft" not in {field.name for field in fields(self)}:
            raise ValueError(
                f"num_assistant_tokens: {type(self).__name__} has no field max_draft that could be set to {gamma}: leave it out, or give the "
                "stop one (or a method with_longest)"
            )
        return replace(self, max_draft=gamma)  # type: ignore[call-arg]

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        """Reject models that it was not made for. (Heads are checked wherever they stand in a policy.)"""

    def start(self, rows: int) -> "StopRun":
        """What one generate call of `rows` rows works with. All state lives there, so nothing leaks from call to call."""
        return StopRun(self)

    def limits(self, rows: list[int]) -> list[int]:
        """The longest draft of each of `rows` in the coming round. Of a stop without state; others plan in `StopRun.begin_round`."""
        return [self.longest] * len(rows)

    def should_stop(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Stop each row after the token it has just drafted? Of a stop without state; arguments as of `StopRun.after_token`.

        Returns: `torch.BoolTensor` of shape `(B,)`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} needs a method should_stop(input_ids, scores, **kwargs), or a start(rows) that returns a StopRun "
            "with an after_token of its own, or adaptive = False"
        )


class StopRun(StoppingCriteria):
    """A stop at work in one generate call, and whatever it keeps from round to round.

    Every round calls `begin_round`, then, if `settings.adaptive`, `drafting` and `after_token` for each drafted token, then `observe`. What a run
    keeps for a row, it keeps by the row's number in the call: rows do not mix, and a finished row may leave the batch.

    Args:
        settings (`DraftStop`): the stop that was started.
    """

    settings: DraftStop
    # True if the first rounds draft nothing, so that the draft model need not read the prompts before them.
    begins_alone = False

    def __init__(self, settings: DraftStop):
        self.settings = settings

    def pair(self, target: Any, draft: Any, kind: Hashable) -> None:
        """Told before the first round which models the call has, for a run that knows something of them.

        `kind` says what else their seconds and what is accepted depend on: calls of one kind can learn from each other.
        """

    def begin_round(self, rows: list[int]) -> list[int]:
        """The longest draft of each of `rows`, the unfinished ones, in the round that begins; 0 leaves it to the target alone."""
        return self.settings.limits(rows)

    def drafting(self, rows: Sequence[int]) -> None:
        """Told before `after_token` which rows of the call may draft another token behind this one: the others have stopped, or have no room."""

    def after_token(
        self, input_ids: torch.Tensor, scores: Any, *, rows: Sequence[int], features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Stop each row after the token it has just drafted?

        Args:
            input_ids (`torch.LongTensor` of shape `(B, length)`): the last column is the token just drafted.
            scores (tuple of `torch.FloatTensor` of shape `(B, V)`): the last one holds the draft's logits that the token
                came from: raw ones in this package's engine, processed ones in Transformers' own loop.
            rows (B,): the number in the call of each row. Finished rows are among them; their answers do not matter.
            features (`torch.FloatTensor` of shape `(B, H)`, *optional*): the hidden state that `settings.features` specifies.

        Returns: `torch.BoolTensor` of shape `(B,)`.
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

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Told after each round how many tokens each of `rows` sent to the target, and how many were accepted."""

    def take(self, row: int, other: "StopRun") -> None:
        """Told that another text takes the place of `row`: what is kept for it is from now on what `other`, the run of a call with that text
        alone, keeps for its row 0. A run that keeps something for each row overrides this.
        """

    def interrupted(self) -> None:
        """Told that something else has run since the last round: the seconds in between are not the rounds'."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """`after_token`, as Transformers' own loop calls a `StoppingCriteria`."""
        return self.after_token(input_ids, scores, rows=row_ids(input_ids, kwargs), features=kwargs.get("features"))


def row_ids(input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Sequence[int]:
    """The number in the call of each row of `input_ids`. Transformers' own loop passes none, and has row 0 alone."""
    return kwargs.get("rows") or range(input_ids.shape[0])


def check_stop(name: str, value: Any) -> None:
    """Raise `TypeError` unless `value` is a stop, `ValueError` if another one around it would be one level too many."""
    if not isinstance(value, DraftStop):
        raise TypeError(f"{name}: expected a stop such as SVIP(), got {shown(value)}")
    check_nesting(name, value.depth + 1)


set_base("stop", DraftStop)
