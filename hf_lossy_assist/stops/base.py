"""What every draft stop is, and the entropy that several of them look at."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import StoppingCriteria

from ..artifacts.features import FeatureSpec


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats of softmax(logits), (..., V) → (...) float32. A logit of −inf is a probability of 0."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


@dataclass(frozen=True)
class DraftStop(StoppingCriteria):
    """The base of every stop. Override `__call__`, or the two methods that plan a round ahead."""

    # Looks at what is drafted; False: `limits` says it all and the drafter need not ask.
    adaptive: ClassVar[bool] = True
    # What `__call__` is given as `features=`, if it reads a hidden state.
    features: ClassVar[FeatureSpec | None] = None
    # In a batch, the share of drafting rows that must have stopped before the round ends: 1 waits for every row, 0 for none.
    # Not annotated, so that a stop may make it a field of its own.
    patience = 1.0

    @property
    def longest(self) -> int:
        """The most tokens that one round may draft for a row (γ at most)."""
        raise NotImplementedError(f"{type(self).__name__} needs a property longest")

    def with_longest(self, gamma: int) -> "DraftStop":
        """The same stop with another longest draft; what `num_assistant_tokens=` at the call does."""
        return replace(self, max_draft=gamma)  # type: ignore[call-arg]

    def start(self, rows: int) -> "DraftStop":
        """What one generate call works with. A stop that learns during the call returns a fresh copy, so no state leaks."""
        return self

    def limits(self, rows: list[int]) -> list[int]:
        """The longest draft of each of `rows`, the unfinished ones, in the coming round; 0 leaves it to the target alone.

        Asked once before each round, so a stop that counts what it sees in a round starts to count here.
        """
        return [self.longest] * len(rows)

    def check(self, target: Any, draft: Any, tokenizer: Any = None) -> None:
        """Refuse models that it was not made for. (Heads are checked wherever they stand in a policy.)"""

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Told after each round what each of `rows` sent to the target and had accepted."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Stop each row after the token it has just drafted?

        Args:
            input_ids (`torch.LongTensor` of shape `(B, length)`): the last column is the token just drafted.
            scores (tuple of `torch.FloatTensor` of shape `(B, V)`): the last one holds the draft's logits that the token
                came from: raw ones in this package's engine, processed ones in Transformers' own loop.
            kwargs: `rows`, the number in the call of each row (see `numbers`); `features`, where `features` names some.

        Returns: `torch.BoolTensor` of shape `(B,)`.
        """
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def numbers(input_ids: torch.Tensor, kwargs: Mapping[str, Any]) -> Sequence[int]:
    """The number in the call of each row of `input_ids`; Transformers' own loop says none and has row 0 alone."""
    return kwargs.get("rows") or range(input_ids.shape[0])
