"""Stops that judge each drafted token: by its probability, by the draft's entropy, or by a trained head on the draft's hidden states."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from ..artifacts.features import FeatureSpec
from ..artifacts.head import Head
from ..registry.frozen import Amount, DraftLength, Share
from .base import DraftStop, Scores, StopRun, entropy


SVIPForm = Literal["bound", "entropy"]


def require_features(stop: DraftStop, features: torch.Tensor | None) -> torch.Tensor:
    """Return what the engine passes to the stop. Raises: `ValueError` in a loop that passes nothing."""
    if features is None:
        way_out = "use lossy_policy=… or in_transformers_loop"
        raise ValueError(f"{type(stop).__name__} reads what Transformers' own loop does not pass on: {way_out}")
    return features


class Confidence(DraftStop, name="confidence", paper="Transformers"):
    """Stop after a token whose draft probability is below `threshold`; Transformers' `assistant_confidence_threshold`.

    `threshold=0` never stops early. Transformers' default is 0.4 with at most 20 tokens.
    """

    threshold: Share = 0.4
    max_draft: DraftLength = 20

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: object) -> torch.Tensor:
        q = scores[-1].float().softmax(dim=-1)
        return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1) < self.threshold


class SVIP(DraftStop, name="svip", paper="2411.18462"):
    """Stop after a token whose draft entropy H makes acceptance unlikely: √(c·H) > h, H in nats.

    Zhang et al., SVIP (huggingface.co/papers/2411.18462), Eq. 6: the acceptance rate is at least about 1 − √(c·H). Two forms:

    - `form="bound"` (the authors' code): √(c·H) > h with c = 0.15, h = 0.3, i.e. H > 0.60 nats;
    - `form="entropy"` (Eq. 7 taken literally): √H > h; with the paper's h = 0.3, i.e. H > 0.09 nats.

    The uncertain token stays in the draft, which has 1 to `max_draft` tokens (40 in the paper). `h=math.inf` never stops early.
    """

    h: Amount = 0.3
    c: Amount = 0.15
    form: SVIPForm = "bound"
    max_draft: DraftLength = 40

    def should_stop(self, input_ids: torch.Tensor, scores: Scores, **kwargs: object) -> torch.Tensor:
        scale = self.c if self.form == "bound" else 1.0
        return (scale * entropy(scores[-1])).sqrt() > self.h


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
        return ~(self.head(require_features(self, features)) >= threshold)  # NaN stops too


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
        states = require_features(self.settings, more.get("features"))
        if self.all_accepted is None:  # the state encodes the last committed token
            self.all_accepted = torch.ones(states.shape[0], dtype=torch.float32, device=states.device)
        else:
            self.all_accepted = self.all_accepted * self.settings.head(states)
        return ~(self.all_accepted >= 1 - self.settings.threshold)  # NaN stops too
