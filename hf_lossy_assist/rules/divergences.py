"""Rules that trust the draft where both models mean about the same."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import register_rule
from ..validation import check_number
from .pointwise import Distributions, Pointwise


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p‖q) in nats of distributions (..., V), (..., 1); never below 0, which rounding could make it."""
    terms = torch.where(p > 0, p * (p.log() - q.log()), torch.zeros_like(p))
    return terms.sum(dim=-1, keepdim=True).clamp(min=0.0)


@dataclass(frozen=True)
class KLJudge(Pointwise):
    """Accept whatever was drafted where the two distributions are close and the target is not sure of itself: a judge without training.

    a(x) = 1 where KL(p‖q) < `threshold` and max p ≤ `confident`, else strict; greedy the same places; r = norm((p − q)⁺)
    (Sun et al., JuDi, huggingface.co/papers/2601.04766; 0.9 is the authors'). p and q are processed: where top-k or top-p cut off
    other tokens of the draft than of the target, KL is infinite. Needs q. Neutral: threshold 0.
    """

    threshold: float
    confident: float = 0.9
    needs_draft_probs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("KLJudge.threshold", self.threshold, 0.0, math.inf)
        check_number("KLJudge.confident", self.confident, 0.0, 1.0)

    def keeps(self, dists: Distributions) -> torch.Tensor:
        close = kl(dists.p, dists.draft_probs) < self.threshold
        return (close & (dists.top <= self.confident)).expand_as(dists.px)


register_rule(
    "kl_judge", KLJudge, guarantee="lossy", neutral={"threshold": 0.0}, paper="2601.04766",
    summary="Accept whatever was drafted where the two distributions are close and the target is not sure of itself: a judge without training.",
    example={"threshold": 0.1},
)  # fmt: skip
