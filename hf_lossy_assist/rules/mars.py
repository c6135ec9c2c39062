"""A rule that takes the target's second choice where the first is hardly better."""

from dataclasses import dataclass

import torch

from ..registry import register_rule
from ..validation import check_number
from ..vocabulary import largest
from .distributions import Distributions
from .pointwise import Pointwise


@dataclass(frozen=True)
class MARS(Pointwise):
    """Accept the target's second choice where its logit is nearly that of the first.

    a(x) = 1 where x is the second choice and z₂/z₁ > `threshold`, z₁ ≥ z₂ the target's two largest processed logits, else strict; greedy
    the same; r = norm((p − q)⁺) (MARS, huggingface.co/papers/2601.15498; 0.9 is the authors'). The ratio does not change with the
    temperature, but with a number that is added to all logits: where z₁ ≤ 0, as after a logit normalisation, nothing is accepted so.
    Neutral: threshold 1.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        check_number("MARS.threshold", self.threshold, 0.0, 1.0)

    def keeps(self, dists: Distributions) -> torch.Tensor:
        first, second = largest(dists.logits, 2).split(1, dim=-1)  # (..., 1) each
        close = (first > 0) & (second > self.threshold * first)
        return close & (dists.at(dists.logits) >= second)


register_rule(
    "mars", MARS, guarantee="lossy", neutral={"threshold": 1.0}, paper="2601.15498",
    summary="Accept the target's second choice where its logit is nearly that of the first.",
    ladder=("threshold", (0.95, 0.9, 0.8, 0.7)),
)  # fmt: skip
