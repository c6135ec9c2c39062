"""Stops that need no training: by the probability of the drafted token, or the draft's entropy there (SVIP)."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int, check_number, shown
from .base import DraftStop, entropy


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
    "confidence", Confidence, paper="Transformers",
    summary="Stop after a token that the draft gave less than `threshold`.",
)  # fmt: skip
register_stop(
    "svip", SVIP, paper="2411.18462",
    summary="Stop after a token whose acceptance is unlikely by the draft's entropy H: √(c·H) > h, H in nats.",
)  # fmt: skip
