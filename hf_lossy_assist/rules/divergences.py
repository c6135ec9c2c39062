"""Rules that trust the draft where both models mean about the same."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..registry import register_rule
from ..validation import check_number
from .distributions import Distributions
from .pointwise import Pointwise


def kl(dists: Distributions) -> torch.Tensor:
    """KL(p‖q) in nats, (..., 1); never below 0, which rounding could make it."""
    below = dists.logits - dists.logits.amax(
        dim=-1, keepdim=True
    )  # log p + log Σ e^(z − max z), and that Σ is 1 / max p
    # 0 · (−∞ − …) and 0 · log 0 are no part of it; −p · log 0 = ∞ is.
    terms = (below - dists.draft_probs.log()).mul_(dists.p).nan_to_num_(nan=0.0, posinf=math.inf)
    return (terms.sum(dim=-1, keepdim=True) + dists.top.log()).clamp(min=0.0)


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
        close = kl(dists) < self.threshold
        return dists.for_tokens(close & (dists.top <= self.confident))


register_rule(
    "kl_judge", KLJudge, guarantee="lossy", neutral={"threshold": 0.0}, paper="2601.04766",
    summary="Accept whatever was drafted where the two distributions are close and the target is not sure of itself: a judge without training.",
    example={"threshold": 0.1},
    ladder=("threshold", (0.05, 0.1, 0.2, 0.5)),
)  # fmt: skip
