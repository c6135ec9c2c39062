"""The rule with the highest acceptance for a given KL divergence from the target."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from ..registry import register_rule
from ..round import Verified
from ..validation import check_number
from ..vocabulary import at_places, in_parts, looks_are_free, passing
from .distributions import Distributions, DraftedDistributions, cache_for
from .pointwise import Pointwise


LEAST = 1e-300  # lower bound of α: rejects only tokens with p = 0
STEPS = 60  # maximum; four or five are usual
BLIND = 12  # iterations on devices where a convergence check would cost a sync


@dataclass(frozen=True)
class Mentored(Pointwise):
    """Accept as much as possible under KL(p‖π) ≤ D, where π is the output distribution at a drafted position: mentored decoding.

    π = max(p/β, min(q, p/α)) with α ≤ 1 ≤ β such that π is a distribution and KL(p‖π) = D; a(x) = min(1, p/(α·q)), r = norm((p/β − q)⁺)
    (Tran-Thien, huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding, with D = 0.1 to 0.2). If even π = q does not
    exhaust D, α is 0; tokens with p = 0 are still rejected. `split` finds α and β. For sampling. Needs q. Neutral: D = 0.
    """

    budget: float  # D in nats
    modes: ClassVar[tuple[str, ...]] = ("sampling",)
    needs_draft_probs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("Mentored.budget", self.budget, 0.0, math.inf)

    def chance(self, dists: Distributions) -> torch.Tensor:
        if self.budget == 0:
            return dists.strict
        alpha, beta = split(dists.p, dists.draft_probs, self.budget)
        if isinstance(dists, DraftedDistributions):
            dists.keep(self, beta)
        return (dists.px / (alpha * dists.qx)).clamp(max=1.0).to(dists.px.dtype)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        if self.budget == 0:
            return (p - q).clamp_(min=0.0)
        return _above(p, q, split(p, q, self.budget).beta)

    def correction(self, verified: Verified, at: torch.Tensor) -> torch.Tensor:
        cached = cache_for(verified, self) if looks_are_free(at) else None
        if cached is None or verified.q is None:
            return super().correction(verified, at)
        p, q, beta = verified.p_at(at), at_places(verified.q, at), cached.gather(1, at[:, None])
        # Not cached for rows that were fully accepted or cut short by a filter.
        unknown = beta.isnan().squeeze(1).nonzero().squeeze(1)
        if len(unknown):
            beta[unknown] = split(p[unknown], q[unknown], self.budget).beta
        return _above(p, q, beta)


def _above(p: torch.Tensor, q: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Return (p/β − q)⁺, (..., V)."""
    return (p / beta.to(p.dtype)).sub_(q).clamp_(min=0.0)


class Split(NamedTuple):
    """The bounds of π, which differs from q where q > p/α or q < p/β, (..., 1) float64 each."""

    alpha: torch.Tensor
    beta: torch.Tensor


def split(p: torch.Tensor, q: torch.Tensor, budget: float) -> Split:
    """Compute α and β of `Mentored` for distributions (..., V).

    With t = 1/α and s = 1/β, π removes the mass T = Σ (q − t·p)⁺ from q and adds S = Σ (s·p − q)⁺, which must be equal. While the sets of
    tokens below α and above β do not change, T and S are linear, and KL(p‖π) = middle − P(below)·log t − P(above)·log s. Each iteration
    solves these two equations and recomputes the sums over the new sets, until the sums agree to the rounding of p's dtype.
    """
    shape = *p.shape[:-1], 1
    p, q = p.reshape(-1, p.shape[-1]), q.reshape(-1, p.shape[-1])
    tokens = Tokens(p, q, in_parts(log_ratio, p, q))
    whole, lost, most = in_parts(limits, p, q, tokens.log_ratio).double().split(1, dim=-1)
    zero, rounding = torch.zeros_like(whole), 16 * torch.finfo(p.dtype).eps
    found = enough = (whole <= budget) & (lost <= rounding)  # nothing needs to be rejected
    at = Point(torch.where(whole <= budget, most, zero), zero)
    low, high = Point(zero, zero), most
    for step in range(STEPS if looks_are_free(p) else BLIND):
        if looks_are_free(p) and bool(found.all()):
            break
        sums = tokens.sums(at)
        spare, over = sums.taken(at) - sums.put(at), sums.kl - budget
        even, used_up = spare.abs() <= rounding, over.abs() <= rounding * max(1.0, min(budget, 1e3))
        found = found | even & (used_up | (at.x >= most) & (over <= 0))
        # KL decreases as S is raised to T and increases as it is lowered: these points bracket the solution.
        fits, breaks = (over <= 0) & ((spare >= 0) | even), (over > 0) & ((spare <= 0) | even)
        low, high = at.where(fits & (at.x > low.x), low), torch.where(breaks, torch.minimum(high, at.x), high)
        x = torch.minimum(sums.solved(at, over, budget, most), most)
        x = between(x, at.x, low.x, high, math.sqrt(rounding))
        if step >= BLIND // 2:  # steps may oscillate: first solve S = T until the point gives a bound
            x = torch.where(fits | breaks, x, at.x)
        there = Point(x, sums.balanced(x, at.y, low.y))
        found = found | at.near(there)  # same sets of tokens, hence same sums: T and S are too small to agree better
        at = at.where(found, there)
    x, y = at.where(found, low)  # `low` satisfies the budget
    alpha = torch.where(enough | (x >= most), math.log(LEAST), -x).exp()
    return Split(alpha.view(shape), torch.where(enough, zero, y).exp().view(shape))


def between(
    found: torch.Tensor, now: torch.Tensor, low: torch.Tensor, high: torch.Tensor, slack: float
) -> torch.Tensor:
    """Return `found` if it lies in [`low`, `high`] up to `slack`, else halfway from `now` to the bound that it exceeds."""
    bound = torch.where(found < low, low, high)
    halfway = torch.where(bound == now, low + high, bound + now) / 2
    return torch.where((found >= low - slack) & (found <= high + slack), found.clamp(min=0.0), halfway)


class Point(NamedTuple):
    """log t and −log s, (n, 1) float64 each."""

    x: torch.Tensor
    y: torch.Tensor

    def where(self, here: torch.Tensor, other: "Point") -> "Point":
        """Return this point `here`, else the other."""
        return Point(torch.where(here, self.x, other.x), torch.where(here, self.y, other.y))

    def near(self, other: "Point") -> torch.Tensor:
        """Return whether two points are equal up to rounding, (n, 1) bool."""
        return ((self.x - other.x).abs() <= 1e-13 * (1 + self.x)) & ((self.y - other.y).abs() <= 1e-12 * (1 + self.y))


class Sums(NamedTuple):
    """Sums of p and q over the tokens below α and above β, and KL(p‖π), (n, 1) float64 each."""

    low_p: torch.Tensor
    low_q: torch.Tensor
    high_p: torch.Tensor
    high_q: torch.Tensor
    kl: torch.Tensor

    def taken(self, at: Point) -> torch.Tensor:
        """T."""
        return self.low_q - self.low_p * at.x.exp()

    def put(self, at: Point) -> torch.Tensor:
        """S."""
        return self.high_p * (-at.y).exp() - self.high_q

    def balanced(self, x: torch.Tensor, y: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        """Return −log s with S = T at log t = `x`, at most `y` + 7; halfway from `y` to `low` if no token is above β."""
        found = -((self.low_q + self.high_q - self.low_p * x.exp()) / self.high_p).clamp(min=0.0).log()
        return torch.where(self.high_p > 0, torch.minimum(found.clamp(min=0.0), y + 7.0), (low + y) / 2)

    def solved(self, at: Point, over: torch.Tensor, budget: float, most: torch.Tensor) -> torch.Tensor:
        """Return log t with S = T and KL(p‖π) = D; `over`: excess of KL at `at` over D; `most`: bound beyond which log t has no effect."""
        both = self.low_q + self.high_q
        middle = self.kl + self.low_p * at.x - self.high_p * at.y - budget
        # KL is convex in −log s, with slope 0 at s = t rising to P(above). At s = t = 1, start from its second derivative.
        leap = (2 * budget / (self.high_p * (1 + self.high_p / self.low_p))).sqrt()
        least = (self.high_p / (both - self.low_p)).log().clamp(min=0.0)  # where t = 1
        y = torch.maximum(torch.where(at.y > 0, at.y, leap), least)
        for _ in range(8):  # Newton
            s = (-y).exp()
            t = (both - self.high_p * s) / self.low_p
            y = torch.maximum(
                y - (middle - self.low_p * t.log() + self.high_p * y) / (self.high_p * (1 - s / t)), least
            )
        x = ((both - self.high_p * (-y).exp()) / self.low_p).log()
        x = torch.where(self.high_p > 0, x, middle / self.low_p)
        return torch.where(self.low_p > 0, x, torch.where(over <= 0, most, -math.inf))


@dataclass(frozen=True)
class Tokens:
    """Inputs of all iterations for n distributions, (n, V) each."""

    p: torch.Tensor
    q: torch.Tensor
    log_ratio: torch.Tensor  # log(p/q); 0 where both are 0, which contributes nothing

    def sums(self, at: Point) -> Sums:
        bars = torch.cat([-at.x, at.y], dim=-1).to(self.p.dtype)
        return Sums(*in_parts(sums_at, self.p, self.q, self.log_ratio, bars).double().split(1, dim=-1))


def log_ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return log(p/q), 0 where both are 0, (n, V)."""
    return (p / q).log_().nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


def limits(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Return KL(p‖q), the mass of q on tokens with p = 0, and the largest finite −log(p/q), or 0; (n, V) each → (n, 3)."""
    kl = (p * ratio).nan_to_num_(nan=0.0, posinf=math.inf)
    lost = passing(torch.eq, p, p.new_zeros(1)).mul_(q)
    least = ratio.nan_to_num(neginf=0.0).amin(dim=-1, keepdim=True)
    return torch.cat([total(kl), total(lost), -least.clamp(max=0.0)], dim=-1)


def sums_at(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor, bars: torch.Tensor) -> torch.Tensor:
    """Return `Sums` of tokens (n, V) for `bars`, log α and log β, (n, 2) → (n, 5)."""
    alpha, beta = bars[..., :1], bars[..., 1:]
    below, above = passing(torch.lt, ratio, alpha), passing(torch.gt, ratio, beta)
    kl = torch.minimum(torch.maximum(ratio, alpha), beta).mul_(p)  # log(p/π) is log(p/q) clamped to [log α, log β]
    return torch.cat([*(total(x * mask) for mask in (below, above) for x in (p, q)), total(kl)], dim=-1)


def total(x: torch.Tensor) -> torch.Tensor:
    """Sum (n, V) → (n, 1)."""
    return x.sum(dim=-1, keepdim=True)


register_rule(
    "mentored",
    Mentored,
    guarantee="lossy",
    neutral={"budget": 0.0},
    example={"budget": 0.5},
    paper="huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding",
    ladder=("budget", (0.1, 0.2, 0.5, 1.0)),
)
