"""Draft stops: when a row has drafted enough. Each is a `transformers.StoppingCriteria`, so it also works inside
Transformers' own assisted generation (see `drafting.StoppingCandidateGenerator`).

A stop changes how much is drafted and never what is accepted, so under strict acceptance every stop is lossless.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import StoppingCriteria

from .errors import check_int, check_number
from .features import FeatureSpec
from .heads import Head


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Shannon entropy in nats of softmax(logits), (..., V) → (...) float32. A logit of −inf is a probability of 0."""
    logp = logits.float().log_softmax(dim=-1)
    return -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(dim=-1)


@dataclass(frozen=True)
class DraftStop(StoppingCriteria):
    """The base of every stop. Override `__call__`, or the two methods that plan a round ahead."""

    adaptive: ClassVar[bool] = (
        True  # looks at what is drafted; False: `limits` says it all and the drafter need not ask
    )

    features: ClassVar[FeatureSpec | None] = (
        None  # what `__call__` is given as `features=`, if it reads a hidden state
    )
    # In a batch, the share of drafting rows that must have stopped before the round ends: 1 waits for every row, 0 for none.
    # Not annotated, so that a stop may make it a field of its own.
    patience = 1.0

    @property
    def longest(self) -> int:
        """The most tokens that one round may draft for a row (γ at most)."""
        raise NotImplementedError

    def with_longest(self, gamma: int) -> "DraftStop":
        """The same stop with another longest draft; what `num_assistant_tokens=` at the call does."""
        return replace(self, max_draft=gamma)  # type: ignore[call-arg]

    def start(self, rows: int) -> "DraftStop":
        """What one generate call works with. A stop that learns during the call returns a fresh copy, so no state leaks."""
        return self

    def limits(self, rows: list[int]) -> list[int]:
        """The longest draft of each of `rows` in the coming round."""
        return [self.longest] * len(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        """Told after each round what each of `rows` had drafted and accepted."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Stop each row after the token it has just drafted?

        Args:
            input_ids (`torch.LongTensor` of shape `(B, length)`): the last column is the token just drafted.
            scores (tuple of `torch.FloatTensor` of shape `(B, V)`): the last one holds the draft's logits that the token
                came from: raw ones in this package's engine, processed ones in Transformers' own loop.

        Returns: `torch.BoolTensor` of shape `(B,)`.
        """
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@dataclass(frozen=True)
class Constant(DraftStop):
    """Always draft `gamma` tokens (Leviathan et al.); 5 is the constant baseline of the SVIP and SPRINTER papers."""

    gamma: int = 5
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("Constant.gamma", self.gamma, 1)

    @property
    def longest(self) -> int:
        return self.gamma

    def with_longest(self, gamma: int) -> "Constant":
        return Constant(gamma)


@dataclass(frozen=True)
class Heuristic(DraftStop):
    """Two tokens more after a round in which all were accepted, else one less; at least 1, at most `max_draft`.

    Transformers' "heuristic" schedule with the cap of the SVIP paper's baseline. Each row of a batch has its own length.
    """

    initial: int = 5
    max_draft: int = 40
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("Heuristic.initial", self.initial, 1)
        check_int("Heuristic.max_draft", self.max_draft, self.initial)

    @property
    def longest(self) -> int:
        return self.max_draft

    def with_longest(self, gamma: int) -> "Heuristic":
        return Heuristic(gamma, max(gamma, self.max_draft))

    def start(self, rows: int) -> "_HeuristicRun":
        return _HeuristicRun(self.initial, self.max_draft, lengths=[self.initial] * rows)


@dataclass(frozen=True)
class _HeuristicRun(Heuristic):
    lengths: list[int] = field(default_factory=list)  # of every row of the call; `observe` writes into it

    def limits(self, rows: list[int]) -> list[int]:
        return [self.lengths[r] for r in rows]

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            length = self.lengths[row]
            self.lengths[row] = min(length + 2, self.max_draft) if n == d else max(length - 1, 1)


@dataclass(frozen=True)
class Confidence(DraftStop):
    """Stop after a token that the draft gave less than `threshold`; Transformers' `assistant_confidence_threshold`.

    `threshold=0` never stops early. Transformers' default is 0.4 with at most 20 tokens.
    """

    threshold: float = 0.4
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("Confidence.threshold", self.threshold, 0.0, 1.0)
        check_int("Confidence.max_draft", self.max_draft, 1)

    @property
    def longest(self) -> int:
        return self.max_draft

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        q = scores[-1].float().softmax(dim=-1)
        return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1) < self.threshold


@dataclass(frozen=True)
class SVIP(DraftStop):
    """Stop after a token whose draft entropy H says that acceptance is unlikely: √(c·H) > h, H in nats.

    Zhang et al., "Draft Model Knows When to Stop" (huggingface.co/papers/2411.18462), Eq. 6: the acceptance rate is at
    least about 1 − √(c·H). Two forms of one test:

    - `form="bound"` (default, the authors' code): √(c·H) > h with c = 0.15, h = 0.3, that is H > 0.60 nats;
    - `form="entropy"` (the paper's Eq. 7 read literally): √H > h, where c is absorbed into h; with the paper's h = 0.3 this
      stops at H > 0.09 nats, six times stricter.

    The uncertain token itself stays in the draft, so at least 1 token is drafted, and at most `max_draft` (40 in the paper).
    `h=math.inf` never stops early. Lossless; needs no training.
    """

    h: float = 0.3
    c: float = 0.15
    form: str = "bound"
    max_draft: int = 40

    def __post_init__(self) -> None:
        check_number("SVIP.h", self.h, 0.0, math.inf)
        check_number("SVIP.c", self.c, 0.0, math.inf)
        check_int("SVIP.max_draft", self.max_draft, 1)
        if self.form not in ("bound", "entropy"):
            raise ValueError(f'SVIP.form: expected "bound" (√(c·H) > h) or "entropy" (√H > h), got {self.form!r}')

    @property
    def longest(self) -> int:
        return self.max_draft

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        scale = self.c if self.form == "bound" else 1.0
        return (scale * entropy(scores[-1])).sqrt() > self.h


@dataclass(frozen=True, eq=False)
class HeadStop(DraftStop):
    """Stop after a token that a trained head doubts: V < `threshold`.

    V = `head`(the draft's hidden state), the probability that the drafted token is acceptable (Zhong et al., Algorithm 1,
    huggingface.co/papers/2502.04557; τ = 0.5 and at most 20 tokens are the paper's). A threshold above 1 doubts every token,
    0 none. Alone it is lossless, as every stop; with the rule `AllButLast` it is SPRINTER.

    `patience`: in a batch, the share of drafting rows that must have stopped before the round ends. 1 waits for the row that
    drafts longest; 0 ends the round for all rows at the first that stops, by a doubt, an end token or its limit.
    """

    head: Head
    threshold: float = 0.5  # "we observe that τ = 0.5 is sufficient" (A.5)
    max_draft: int = 20  # the authors' code
    patience: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.head, Head):
            raise TypeError(
                f"HeadStop.head: expected a head (hla.Head.from_pretrained(…)), got {type(self.head).__name__}"
            )
        spec, polarity = self.head.config.features, self.head.config.polarity
        if (spec.model, spec.position, polarity) != ("draft", "predicting", "acceptable"):
            raise ValueError(
                f"HeadStop.head: needs P(acceptable) from the draft's state that predicts a token; this head says "
                f"P({polarity}) from the {spec}"
            )
        check_number("HeadStop.threshold", self.threshold, 0.0, math.inf)
        check_int("HeadStop.max_draft", self.max_draft, 1)
        check_number("HeadStop.patience", self.patience, 0.0, 1.0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadStop) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.head.digest, self.threshold, self.max_draft, self.patience

    @property
    def features(self) -> FeatureSpec:  # type: ignore[override]
        return self.head.config.features

    @property
    def longest(self) -> int:
        return self.max_draft

    def __call__(
        self, input_ids: torch.Tensor, scores: Any, features: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """As `DraftStop.__call__`; `features` (B, H): the draft's state that predicted the token."""
        if features is None:
            raise ValueError(
                "HeadStop reads the draft's hidden states, which Transformers' own loop does not hand on: use lossy_policy=…"
            )
        return ~(self.head(features) >= self.threshold)


STOPS: dict[str, type[DraftStop]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "svip": SVIP,
    "head": HeadStop,
}
