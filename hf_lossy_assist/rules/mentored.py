"""The rule that accepts most of all rules that stay within a budget of KL divergence."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..registry import register_rule
from ..validation import check_number
from .pointwise import Distributions, Pointwise


LEAST = 1e-300  # of α: all tokens pass but those with p = 0
STEPS = 50  # of the bisection of log α: α to a relative 1e-12


@dataclass(frozen=True)
class Mentored(Pointwise):
    """Mentored decoding: of all distributions π with KL(p‖π) ≤ D at every drafted place, the one whose draft is rejected least.

    π = max(p/β, min(q, p/α)) with α ≤ 1 ≤ β such that π is a distribution and KL(p‖π) = D; a(x) = min(1, p/(α·q)), r = norm((p/β − q)⁺)
    (Tran-Thien,
    huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding, with D = 0.1 to 0.2). Where D is not used up even by
    π = q, α is 0; a token with p = 0, which a processor may forbid, is rejected all the same. α is found by bisection from the
    side that keeps the budget, and β follows from it, after one sort of the vocabulary by p/q; that takes some 100 bytes for each of
    (B, γ, V) numbers. For sampling. Needs q. Neutral: D = 0.
    """

    budget: float  # D in nats
    modes: ClassVar[tuple[str, ...]] = ("sampling",)
    needs_draft_probs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("Mentored.budget", self.budget, 0.0, math.inf)

    def chance(self, dists: Distributions) -> torch.Tensor:
        if self.budget == 0:
            return dists.strict
        alpha = split(dists.p, dists.draft_probs, self.budget).alpha
        return (dists.px / (alpha * dists.qx)).clamp(max=1.0).to(dists.px.dtype)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        beta = split(p, q, self.budget).beta if self.budget else 1.0
        return (p / beta - q).clamp(min=0.0).to(p.dtype)


class Split(NamedTuple):
    """Where π leaves q: below p/α and above p/β, (..., 1) float64 each."""

    alpha: torch.Tensor
    beta: torch.Tensor


def split(p: torch.Tensor, q: torch.Tensor, budget: float) -> Split:
    """α and β of `Mentored` for distributions (..., V).

    The tokens in the order of p/q fall into three runs: π = p/α below α, π = p/β above β, π = q between. With the sums of p, q
    and p·log(p/q) from the left, each step of the bisection costs two look-ups and no pass over the vocabulary.
    """
    p, q = p.double(), q.double()
    ratio, order = (p / q).nan_to_num(nan=0.0, posinf=math.inf).sort(dim=-1)  # p = q = 0 has no part in it
    p, q = p.gather(-1, order), q.gather(-1, order)
    known = (p > 0) & (q > 0)
    terms = torch.where(known, p * ratio.log(), torch.zeros_like(p))
    left_p, left_q, left_kl = (_sums(x) for x in (p, q, terms))  # (..., V + 1): of the first 0 … V tokens
    all_p, all_q = left_p[..., -1:], left_q[..., -1:]
    # What β = p/q of each token would put on top, Σ (p/β − q)⁺: falls from left to right.
    above = (all_p - left_p[..., :-1]) / ratio - (all_q - left_q[..., :-1])

    def runs(alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """β, and KL(p‖π), for α (..., 1)."""
        low = torch.searchsorted(ratio, alpha)  # tokens below α
        rejected = left_q.gather(-1, low) - left_p.gather(-1, low) / alpha
        high = torch.maximum(torch.searchsorted(-above, -rejected), low)  # tokens not above β
        top_p, top_q = all_p - left_p.gather(-1, high), all_q - left_q.gather(-1, high)
        beta = torch.where(top_p > 0, top_p / (top_q + rejected), torch.ones_like(top_p)).clamp(min=1.0)
        kl = left_kl.gather(-1, high) - left_kl.gather(-1, low) + torch.special.xlogy(left_p.gather(-1, low), alpha)
        return beta, kl + torch.special.xlogy(top_p, beta)

    least = torch.full_like(all_p, LEAST)
    keeps, breaks = torch.zeros_like(all_p), least.log()  # log α, which keeps the budget or not
    for _ in range(STEPS):
        middle = (keeps + breaks) / 2
        fits = runs(middle.exp())[1] <= budget
        keeps, breaks = torch.where(fits, middle, keeps), torch.where(fits, breaks, middle)
    alpha = torch.where(runs(least)[1] <= budget, least, keeps.exp())
    return Split(alpha, runs(alpha)[0])


def _sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of the first 0, 1, … V numbers, (..., V) → (..., V + 1)."""
    return torch.nn.functional.pad(x.cumsum(dim=-1), (1, 0))


register_rule(
    "mentored", Mentored, guarantee="lossy", neutral={"budget": 0.0}, example={"budget": 0.5},
    summary="Mentored decoding: of all distributions π with KL(p‖π) ≤ D at every drafted place, the one whose draft is rejected least.",
    paper="huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding",
)  # fmt: skip
