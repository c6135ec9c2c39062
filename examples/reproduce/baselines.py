"""The papers' baselines that lose here, added as a user adds a rule or a stop: mentored decoding, AdaEDL and SmartSpec's moving average.

Importing this module registers their names. On the command line:

    python examples/reproduce/baselines.py compare --policies strict+adaedl,mentored:budget=0.15 …   # hf-lossy with these names
"""

import math
from typing import ClassVar

import numpy as np
import torch

import hf_lossy_assist as hla


SMALLEST = -104.0  # log α below which every token with p > 0 passes: float32 has no smaller p
STEPS = 60  # of bisection
BETA1, BETA2, EPSILON = 0.5, 0.9, 0.01  # of Draft & Verify (huggingface.co/papers/2309.08168)


class Mentored(
    hla.Pointwise,
    name="mentored",
    neutral={"budget": 0.0},
    example={"budget": 0.15},
    paper="huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding",
    ladder=("budget", (0.1, 0.2, 0.5, 1.0)),
):
    """Accept as much as possible under KL(p‖π) ≤ `budget` nats, where π is the output distribution at a drafted position.

    π = max(p/β, min(q, p/α)) with α ≤ 1 ≤ β; a(x) = min(1, p/(α·q)), r = norm((p/β − q)⁺) (Tran-Thien,
    huggingface.co/blog/vivien/optimal-lossy-variant-of-speculative-decoding). Tokens with p = 0 are always rejected. Neutral: 0.
    """

    budget: float
    modes: ClassVar[tuple[str, ...]] = ("sampling",)
    needs_draft_probs: ClassVar[bool] = True

    def chance(self, dists: hla.Distributions) -> torch.Tensor:
        if self.budget == 0:
            return dists.strict
        alpha, _ = find_bounds(dists.p, dists.draft_probs, self.budget)
        return (dists.px / (alpha * dists.qx)).clamp(max=1.0).to(dists.px.dtype)

    def residual(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        beta = find_bounds(p, q, self.budget)[1] if self.budget else torch.ones_like(p[..., :1])
        return (p / beta.to(p.dtype) - q).clamp(min=0.0)


def find_bounds(p: torch.Tensor, q: torch.Tensor, budget: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return α and β of `Mentored` for p and q (..., V), (..., 1) float64 each, by bisection of log α.

    The mass Σ (q − p/α)⁺ that π removes from q is the mass Σ (p/β − q)⁺ that it adds. Over tokens sorted by p/q both are sums of a prefix
    and a suffix, and so is KL(p‖π) = Σ p·clamp(log p/q, log α, log β), which grows as α falls.
    """
    ratio, order = (p.double() / q.double()).nan_to_num(nan=0.0, posinf=math.inf).sort(dim=-1)
    p, q = p.double().gather(-1, order), q.double().gather(-1, order)
    # Sums over the first 0, 1, … V tokens, (..., V + 1).
    p_sums, q_sums, kl_sums = (torch.nn.functional.pad(x.cumsum(-1), (1, 0)) for x in (p, q, torch.xlogy(p, ratio)))
    above_p, above_q = p_sums[..., -1:] - p_sums, q_sums[..., -1:] - q_sums
    added = above_p[..., 1:] / ratio - above_q[..., 1:]  # if β is the token's ratio; falls along the tokens

    def solve(log_alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return KL(p‖π) and β, (..., 1) each."""
        low = torch.searchsorted(ratio, log_alpha.exp())  # tokens below α
        removed = (q_sums.gather(-1, low) - p_sums.gather(-1, low) / log_alpha.exp()).clamp(min=0.0)
        high = torch.searchsorted(-added, -removed).maximum(low)  # tokens not above β
        top = above_p.gather(-1, high)
        beta = (top / (removed + above_q.gather(-1, high))).nan_to_num(nan=1.0, posinf=math.inf).clamp(min=1.0)
        middle = kl_sums.gather(-1, high) - kl_sums.gather(-1, low)
        return middle + p_sums.gather(-1, low) * log_alpha + torch.xlogy(top, beta), beta

    fits = torch.zeros_like(ratio[..., :1])
    breaks = torch.full_like(fits, SMALLEST)
    for _ in range(STEPS):
        log_alpha = (fits + breaks) / 2
        within = solve(log_alpha)[0] <= budget
        fits, breaks = torch.where(within, log_alpha, fits), torch.where(within, breaks, log_alpha)
    return fits.exp(), solve(fits)[1]


class AdaEDL(hla.DraftStop, name="adaedl", paper="2410.18351"):
    """Stop after a token whose draft entropy H gives too low an acceptance bound: 1 − √(`scale`·H) < λ, H in nats.

    Agrawal et al. (huggingface.co/papers/2410.18351). After each round λ, first `threshold`, follows the row's acceptance rate r:
    r̄ ← β₁·r̄ + (1 − β₁)·r, λ ← λ + (1 − β₂)·sign(`goal` − r̄)·ε.
    """

    threshold: float = 0.6
    scale: float = 0.2
    goal: float = 0.9
    max_draft: int = 20

    def start(self, rows: int) -> "AdaEDLRun":
        return AdaEDLRun(self, rows)


class AdaEDLRun(hla.StopRun):
    """`thresholds`: λ of every row of the call; `rates`: r̄."""

    settings: AdaEDL
    row_lists = ("thresholds", "rates")

    def __init__(self, settings: AdaEDL, rows: int):
        super().__init__(settings)
        self.thresholds, self.rates = [settings.threshold] * rows, [settings.goal] * rows

    def after_token(self, input_ids, scores, *, rows, features=None):
        entropy = torch.special.entr(scores[-1].float().softmax(-1)).sum(-1)  # (B,)
        bound = 1 - (self.settings.scale * entropy).sqrt()
        return bound < torch.tensor([self.thresholds[row] for row in rows], device=bound.device)

    def observe(self, rows, drafted, accepted):
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            if d:
                self.rates[row] = BETA1 * self.rates[row] + (1 - BETA1) * n / d
                step = (1 - BETA2) * float(np.sign(self.settings.goal - self.rates[row])) * EPSILON
                self.thresholds[row] = min(max(self.thresholds[row] + step, 0.0), 1.0)


class MovingAverage(hla.DraftStop, name="moving_average", paper="2406.14066"):
    """Draft the lengths with the most expected tokens per second of the round, by a moving average of each row's acceptance.

    Liu et al., SmartSpec (huggingface.co/papers/2406.14066). If a share α of a row's tested tokens is accepted, γ drafted tokens yield
    1 + α + … + α^γ expected ones. α = (accepted + `initial`)/(tested + 1), where each round weighs 1 − 1/`window` of the next one.
    `profile`: the seconds of rounds, of `hf-lossy profile`; `max_draft`: by default the longest profiled one.
    """

    profile: hla.Profile
    window: int = 20
    initial: float = 0.7
    max_draft: int | None = None
    adaptive: ClassVar[bool] = False

    @property
    def longest(self) -> int:
        return self.max_draft or self.profile.gamma

    def check(self, target, draft, tokenizer=None):
        self.profile.check(target, draft, None, tokenizer)
        self.profile.check_length(self.longest)

    def start(self, rows: int) -> "MovingAverageRun":
        return MovingAverageRun(self, rows)

    def seconds(self, rows: int, gamma: int) -> np.ndarray:
        """Return the seconds of a round without a companion that drafts `gamma` tokens and verifies 0, 1, … `rows`·`gamma`, float64."""
        latency = self.profile.latency
        observed = latency.of(rows, gamma)
        return observed - (observed[-1] - latency.unobserved(rows, gamma))


class MovingAverageRun(hla.StopRun):
    """`accepted`, `rejected`: decayed counts of every row's tested tokens, which are the accepted ones and the first rejected one."""

    settings: MovingAverage
    row_lists = ("accepted", "rejected")

    def __init__(self, settings: MovingAverage, rows: int):
        super().__init__(settings)
        self.accepted, self.rejected = [0.0] * rows, [0.0] * rows
        self._seconds: dict[int, list[np.ndarray]] = {}  # number of rows → `settings.seconds` for γ = 0, 1, …

    def begin_round(self, rows):
        if not rows:
            return []
        n, settings = np.array([(self.accepted[row], self.rejected[row]) for row in rows]), self.settings  # (B, 2)
        if len(rows) not in self._seconds:
            self._seconds[len(rows)] = [settings.seconds(len(rows), gamma) for gamma in range(settings.longest + 1)]
        return plan((n[:, 0] + settings.initial) / (n.sum(axis=1) + 1), self._seconds[len(rows)])

    def observe(self, rows, drafted, accepted):
        keep = 1 - 1 / self.settings.window
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            self.accepted[row] = keep * self.accepted[row] + n
            self.rejected[row] = keep * self.rejected[row] + (n < d)


def plan(alpha: np.ndarray, seconds: list[np.ndarray]) -> list[int]:
    """Return the γ of each row that jointly maximise tokens per second, the shortest on a tie: `alpha` (B,), `seconds[γ]` (B·γ + 1,).

    For each longest γ, the batch's drafted tokens are taken in order of their probability of acceptance, as many as pay.
    """
    best, chosen = len(alpha) / float(seconds[0][0]), np.zeros(len(alpha), dtype=np.int64)
    for gamma in range(1, len(seconds)):
        gains = np.cumprod(np.repeat(alpha[:, None], gamma, axis=1), axis=1).reshape(-1)  # (B·γ,) α, α², … of each row
        order = np.argsort(-gains, kind="stable")  # stable: a row's tokens stay in order
        goodput = (len(alpha) + np.cumsum(gains[order])) / seconds[gamma][1:]
        most = int(np.argmax(goodput))
        if goodput[most] > best:
            best, chosen = goodput[most], np.bincount(order[: most + 1] // gamma, minlength=len(alpha))
    return [int(n) for n in chosen]


if __name__ == "__main__":
    from hf_lossy_assist.cli import main

    main()
