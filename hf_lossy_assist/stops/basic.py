"""Stops that need no training: a constant length, the heuristic schedule, confidence, entropy (SVIP)."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int, check_number, shown
from .base import DraftStop, StopRun, entropy


@dataclass(frozen=True)
class Constant(DraftStop):
    """Always draft `gamma` tokens (Leviathan et al.); 5 is the constant baseline of the SVIP and SPRINTER papers."""

    gamma: int = 5
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_int("Constant.gamma", self.gamma, 1, LONGEST_DRAFT)

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
        check_int("Heuristic.initial", self.initial, 1, LONGEST_DRAFT)
        check_int("Heuristic.max_draft", self.max_draft, self.initial, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return self.max_draft

    def with_longest(self, gamma: int) -> "Heuristic":
        return Heuristic(gamma, max(gamma, self.max_draft))

    def start(self, rows: int) -> "HeuristicRun":
        return HeuristicRun(self, rows)


class HeuristicRun(StopRun):
    """`lengths`: how much each row of the call drafts in its next round."""

    settings: Heuristic

    def __init__(self, settings: Heuristic, rows: int):
        super().__init__(settings)
        self.lengths = [settings.initial] * rows

    def begin_round(self, rows: list[int]) -> list[int]:
        return [self.lengths[row] for row in rows]

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            length = self.lengths[row]
            self.lengths[row] = min(length + 2, self.settings.max_draft) if n == d else max(length - 1, 1)

    def take(self, row: int, other: StopRun) -> None:
        assert isinstance(other, HeuristicRun)
        self.lengths[row] = other.lengths[0]


@dataclass(frozen=True)
class Confidence(DraftStop):
    """Stop after a token that the draft gave less than `threshold`; Transformers' `assistant_confidence_threshold`.

    `threshold=0` never stops early. Transformers' default is 0.4 with at most 20 tokens.
    """

    threshold: float = 0.4
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("Confidence.threshold", self.threshold, 0.0, 1.0)
        check_int("Confidence.max_draft", self.max_draft, 1, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return self.max_draft

    def should_stop(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return token_probability(input_ids, scores) < self.threshold


def token_probability(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """q(x) of the token just drafted, (B,) float32; arguments as of `StopRun.after_token`."""
    q = scores[-1].float().softmax(dim=-1)
    return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1)


@dataclass(frozen=True)
class SVIP(DraftStop):
    """Stop after a token whose acceptance is unlikely by the draft's entropy H: √(c·H) > h, H in nats.

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
        check_int("SVIP.max_draft", self.max_draft, 1, LONGEST_DRAFT)
        if self.form not in ("bound", "entropy"):
            raise ValueError(f'SVIP.form: expected "bound" (√(c·H) > h) or "entropy" (√H > h), got {shown(self.form)}')

    @property
    def longest(self) -> int:
        return self.max_draft

    def should_stop(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        scale = self.c if self.form == "bound" else 1.0
        return (scale * entropy(scores[-1])).sqrt() > self.h


register_stop(
    "constant", Constant, paper="2211.17192",
    summary="Always draft `gamma` tokens (Leviathan et al.).",
)  # fmt: skip
register_stop(
    "heuristic", Heuristic, paper="Transformers",
    summary="Two tokens more after a round in which all were accepted, else one less.",
)  # fmt: skip
register_stop(
    "confidence", Confidence, paper="Transformers",
    summary="Stop after a token that the draft gave less than `threshold`.",
)  # fmt: skip
register_stop(
    "svip", SVIP, paper="2411.18462",
    summary="Stop after a token whose acceptance is unlikely by the draft's entropy H: √(c·H) > h, H in nats.",
)  # fmt: skip
