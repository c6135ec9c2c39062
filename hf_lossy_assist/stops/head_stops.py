"""Stops with a trained head on the draft's hidden states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from ..artifacts.features import FeatureSpec
from ..artifacts.head import Head
from ..registry.frozen import DraftLength, Share
from .base import DraftStop, Scores, StopRun


@dataclass(frozen=True, eq=False)
class HiddenStateStop(DraftStop):
    """The base of stops with a head, which must have been trained on the draft's state at position `reads[0]`."""

    head: Head
    reads: ClassVar[tuple[str, str]]  # the position, and a description of the state for errors

    def __post_init__(self) -> None:
        super().__post_init__()
        name, (position, what) = type(self).__name__, self.reads
        spec, polarity = self.head.config.features, self.head.config.polarity
        if (spec.model, spec.position, polarity) != ("draft", position, "acceptable"):
            raise ValueError(
                f"{name}.head: needs P(acceptable) from the draft's state that {what}; this head computes P({polarity}) from the {spec}"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HiddenStateStop) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[object, ...]:
        return type(self), self.head.digest, *(getattr(self, f.name) for f in fields(self) if f.name != "head")

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.head.config.features

    def require_states(self, features: torch.Tensor | None) -> torch.Tensor:
        """Return `features`, the draft's hidden states (B, H). Raises: `ValueError` if None."""
        if features is None:
            raise ValueError(
                f"{type(self).__name__} reads the draft's hidden states, which Transformers' own loop does not pass on: "
                "use lossy_policy=… or in_transformers_loop"
            )
        return features


class HeadStop(HiddenStateStop, eq=False, name="head", paper="2502.04557", example={"head": "folder or org/name"}):
    """Stop after a token whose acceptance probability V, predicted by a trained head, is below `threshold`.

    V = `head`(draft hidden state) (Zhong et al., Algorithm 1, huggingface.co/papers/2502.04557; τ = 0.5 and at most 20 tokens are the
    paper's). A threshold of 1 stops at every token, 0 at none. With the rule `AllButLast` it is SPRINTER. `patience` 1 waits for the
    row that drafts longest; 0 ends the round for all rows when the first one stops, by the head, an end token or its limit.
    """

    threshold: Share = 0.5  # "we observe that τ = 0.5 is sufficient" (A.5)
    max_draft: DraftLength = 20  # the authors' code
    patience: Share = 1.0
    reads: ClassVar[tuple[str, str]] = ("predicting", "predicts a token")

    def should_stop(
        self, input_ids: torch.Tensor, scores: Scores, features: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        threshold = self.threshold if self.threshold < 1 else math.inf  # a sigmoid may round to 1
        return ~(self.head(self.require_states(features)) >= threshold)  # NaN stops too


class SpecDecPP(HiddenStateStop, eq=False, name="specdec", paper="2405.19715", example={"head": "folder or org/name"}):
    """Stop when the draft is likely to contain a rejection: 1 − Π a > `threshold`, a: the head's P(accepted) of each token.

    Huang et al., SpecDec++ (huggingface.co/papers/2405.19715), Algorithm 1; `threshold` is the paper's h. The head (`hf-lossy fit specdec`)
    reads the state that encodes a token, which the draft step for the next token computes. As in the authors' code, a token is therefore
    judged one step late, and a draft has at least 2 tokens. `threshold=1` never stops early.
    """

    threshold: Share = 0.7
    max_draft: DraftLength = 20
    reads: ClassVar[tuple[str, str]] = ("token", "encodes a token")

    def start(self, rows: int) -> "SpecDecPPRun":
        return SpecDecPPRun(self)


class SpecDecPPRun(StopRun):
    """The run of `SpecDecPP`. `all_accepted` (B,): P(all tokens judged so far in this round are accepted); None before the first token."""

    settings: SpecDecPP

    def __init__(self, settings: SpecDecPP):
        super().__init__(settings)
        self.all_accepted: torch.Tensor | None = None

    def begin_round(self, rows: list[int]) -> list[int]:
        self.all_accepted = None
        return super().begin_round(rows)

    def after_token(
        self, input_ids: torch.Tensor, scores: Scores, *, rows: Sequence[int], **more: torch.Tensor | None
    ) -> torch.Tensor:
        """Return which rows stop, (B,) bool; `features` (B, H): the state that predicted the token, which encodes the one before it."""
        states = self.settings.require_states(more.get("features"))
        if self.all_accepted is None:  # the state encodes the last committed token
            self.all_accepted = torch.ones(states.shape[0], dtype=torch.float32, device=states.device)
        else:
            self.all_accepted = self.all_accepted * self.settings.head(states)
        return ~(self.all_accepted >= 1 - self.settings.threshold)  # NaN stops too
