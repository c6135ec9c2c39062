"""The rule that accepts most of all rules that stay within a budget of KL divergence."""

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


LEAST = 1e-300  # of α: all tokens pass but those with p = 0
STEPS = 60  # at most; four or five are usual
BLIND = 12  # where a look at whether one more is needed would cost more than the step


@dataclass(frozen=True)
class Mentored(Pointwise):
    """Mentored decoding: of all distributions π with KL(p‖π) ≤ D at every drafted place, the one whose draft is rejected least.

    π = max(p/β, min(q, p/α)) with α ≤ 1 ≤ β such that π is a distribution and KL(p‖π) = D; a(x) = min(1, p/(α·q)), r = norm((p/β − q)⁺)
    (Tran-Thien, huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding, with D = 0.1 to 0.2). Where even π = q does not
    use up D, α is 0; a token with p = 0 is rejected all the same. `split` finds α and β. For sampling. Needs q. Neutral: D = 0.
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
        # Unknown: of rows that were accepted whole, or that a filter cut short.
        unknown = beta.isnan().squeeze(1).nonzero().squeeze(1)
        if len(unknown):
            beta[unknown] = split(p[unknown], q[unknown], self.budget).beta
        return _above(p, q, beta)


def _above(p: torch.Tensor, q: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Return (p/β − q)⁺, (..., V)."""
    return (p / beta.to(p.dtype)).sub_(q).clamp_(min=0.0)


class Split(NamedTuple):
    """The places where π leaves q: below p/α and above p/β, (..., 1) float64 each."""

    alpha: torch.Tensor
    beta: torch.Tensor


def split(p: torch.Tensor, q: torch.Tensor, budget: float) -> Split:
    """α and β of `Mentored` for distributions (..., V).

    With t = 1/α and s = 1/β, π takes T = Σ (q − t·p)⁺ from q and puts S = Σ (s·p − q)⁺ on top, and both must be equal. While the same tokens
    lie below α and above β, T and S are linear, and KL(p‖π) = middle − P(below)·log t − P(above)·log s. Each step solves these two
    equations, and sums anew over the tokens that lie there then, until the sums agree to the rounding of p's dtype.
    """
    shape = *p.shape[:-1], 1
    p, q = p.reshape(-1, p.shape[-1]), q.reshape(-1, p.shape[-1])
    tokens = Tokens(p, q, in_parts(log_ratio, p, q))
    whole, lost, most = in_parts(limits, p, q, tokens.log_ratio).double().split(1, dim=-1)
    zero, rounding = torch.zeros_like(whole), 16 * torch.finfo(p.dtype).eps
    found = enough = (whole <= budget) & (lost <= rounding)  # nothing need be rejected
    at = Point(torch.where(whole <= budget, most, zero), zero)
    low, high = Point(zero, zero), most
    for step in range(STEPS if looks_are_free(p) else BLIND):
        if looks_are_free(p) and bool(found.all()):
            break
        sums = tokens.sums(at)
        spare, over = sums.taken(at) - sums.put(at), sums.kl - budget
        even, used_up = spare.abs() <= rounding, over.abs() <= rounding * max(1.0, min(budget, 1e3))
        found = found | even & (used_up | (at.x >= most) & (over <= 0))
        # Raising S to T makes KL fall, and lowering it makes KL grow: so these points say on which side of them the solution is.
        fits, breaks = (over <= 0) & ((spare >= 0) | even), (over > 0) & ((spare <= 0) | even)
        low, high = at.where(fits & (at.x > low.x), low), torch.where(breaks, torch.minimum(high, at.x), high)
        x = torch.minimum(sums.solved(at, over, budget, most), most)
        x = between(x, at.x, low.x, high, math.sqrt(rounding))
        if step >= BLIND // 2:  # steps may go back and forth: S = T first, until the point says a side
            x = torch.where(fits | breaks, x, at.x)
        there = Point(x, sums.balanced(x, at.y, low.y))
        found = found | at.near(there)  # the same tokens, and so the same sums: T and S are too small to agree better
        at = at.where(found, there)
    x, y = at.where(found, low)  # `low` keeps the budget
    alpha = torch.where(enough | (x >= most), math.log(LEAST), -x).exp()
    return Split(alpha.view(shape), torch.where(enough, zero, y).exp().view(shape))


def between(
    found: torch.Tensor, now: torch.Tensor, low: torch.Tensor, high: torch.Tensor, slack: float
) -> torch.Tensor:
    """`found` where it lies between `low` and `high`, but for `slack`, else half of the way from `now` to the bound that it passes."""
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
        """Equal up to rounding, (n, 1) bool."""
        return ((self.x - other.x).abs() <= 1e-13 * (1 + self.x)) & ((self.y - other.y).abs() <= 1e-12 * (1 + self.y))


class Sums(NamedTuple):
    """Over the tokens below α and over those above β, and KL(p‖π), (n, 1) float64 each."""

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
        """−log s with S = T for a log t of `x`, not far above `y`; half of the way down to `low` where no token lies above β."""
        found = -((self.low_q + self.high_q - self.low_p * x.exp()) / self.high_p).clamp(min=0.0).log()
        return torch.where(self.high_p > 0, torch.minimum(found.clamp(min=0.0), y + 7.0), (low + y) / 2)

    def solved(self, at: Point, over: torch.Tensor, budget: float, most: torch.Tensor) -> torch.Tensor:
        """log t with S = T and KL(p‖π) = D; `over`: by how much `at` is over D, `most`: beyond which log t changes nothing."""
        both = self.low_q + self.high_q
        middle = self.kl + self.low_p * at.x - self.high_p * at.y - budget
        # KL is convex in −log s, with a slope that goes from 0 at s = t to P(above). At s = t = 1 it begins by its second derivative.
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
    """The parts of n distributions that all steps read, (n, V) each."""

    p: torch.Tensor
    q: torch.Tensor
    log_ratio: torch.Tensor  # log(p/q); 0 where both are 0: such a token has no part in it

    def sums(self, at: Point) -> Sums:
        bars = torch.cat([-at.x, at.y], dim=-1).to(self.p.dtype)
        return Sums(*in_parts(sums_at, self.p, self.q, self.log_ratio, bars).double().split(1, dim=-1))


def log_ratio(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """log(p/q), and 0 where both are 0, (n, V)."""
    return (p / q).log_().nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


def limits(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """KL(p‖q); what q gives to tokens with p = 0; the largest finite −log(p/q); (n, V) each → (n, 3)."""
    kl = (p * ratio).nan_to_num_(nan=0.0, posinf=math.inf)
    lost = passing(torch.eq, p, p.new_zeros(1)).mul_(q)
    least = ratio.nan_to_num(neginf=0.0).amin(dim=-1, keepdim=True)
    return torch.cat([total(kl), total(lost), -least.clamp(max=0.0)], dim=-1)


def sums_at(p: torch.Tensor, q: torch.Tensor, ratio: torch.Tensor, bars: torch.Tensor) -> torch.Tensor:
    """Return `Sums` of tokens (n, V) with `bars` log α and log β, (n, 2) → (n, 5)."""
    alpha, beta = bars[..., :1], bars[..., 1:]
    below, above = passing(torch.lt, ratio, alpha), passing(torch.gt, ratio, beta)
    kl = torch.minimum(torch.maximum(ratio, alpha), beta).mul_(p)  # log(p/π) = log(p/q), but within log α and log β
    return torch.cat([*(total(x * mask) for mask in (below, above) for x in (p, q)), total(kl)], dim=-1)


def total(x: torch.Tensor) -> torch.Tensor:
    """(n, V) → (n, 1)."""
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
