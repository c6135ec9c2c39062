"""Stops whose threshold follows what the target accepts while a text is written; each row of a batch has its own."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..registry import register_stop
from ..validation import LONGEST_DRAFT, check_int, check_number
from .base import DraftStop, entropy, numbers


FEWEST = 6  # tested tokens of a row before DISCO moves its threshold


@dataclass(frozen=True)
class AdaEDL(DraftStop):
    """Stop after a token whose draft entropy H bounds its acceptance too low: 1 − √(`scale`·H) < λ, H in nats.

    Agrawal et al. (huggingface.co/papers/2410.18351). After each round λ moves against the row's acceptance rate r, the share of its
    drafted tokens that were accepted, by the rule and with the constants of Draft & Verify (huggingface.co/papers/2309.08168):

        r̄ ← β₁·r̄ + (1 − β₁)·r,   λ ← β₂·λ + (1 − β₂)·(λ + sign(`goal` − r̄)·ε),   β₁ = 0.5, β₂ = 0.9, ε = 0.01

    λ starts at `threshold`, r̄ at `goal`, and λ stays in [0, 1]. With ε = 0 this is SVIP's test with h = 1 − λ. The uncertain token itself
    stays in the draft. `scale=0` never stops early.
    """

    threshold: float = 0.6
    scale: float = 0.2
    goal: float = 0.9
    epsilon: float = 0.01
    beta1: float = 0.5
    beta2: float = 0.9
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("AdaEDL.scale", self.scale, 0.0, float("inf"))
        for name in ("threshold", "goal", "epsilon", "beta1", "beta2"):
            check_number(f"AdaEDL.{name}", getattr(self, name), 0.0, 1.0)
        check_int("AdaEDL.max_draft", self.max_draft, 1, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return self.max_draft

    def start(self, rows: int) -> "_AdaEDLRun":
        return _AdaEDLRun(**vars(self), thresholds=[self.threshold] * rows, rates=[self.goal] * rows)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return self._below(scores, self.threshold)

    def _below(self, scores: Any, threshold: torch.Tensor | float) -> torch.Tensor:
        return 1 - (self.scale * entropy(scores[-1])).sqrt() < threshold


@dataclass(frozen=True, eq=False)
class _AdaEDLRun(AdaEDL):
    thresholds: list[float] = field(default_factory=list)  # λ of every row of the call; `observe` writes into both
    rates: list[float] = field(default_factory=list)  # r̄

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            if d == 0:
                continue
            rate = self.rates[row] = self.beta1 * self.rates[row] + (1 - self.beta1) * n / d
            moved = self.thresholds[row] + (1 - self.beta2) * float(np.sign(self.goal - rate)) * self.epsilon
            self.thresholds[row] = min(max(moved, 0.0), 1.0)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        own = [self.thresholds[row] for row in numbers(input_ids, kwargs)]
        return self._below(scores, torch.tensor(own, dtype=torch.float32, device=scores[-1].device))


@dataclass(frozen=True)
class DISCO(DraftStop):
    """Stop after a token that the draft gave less than a threshold, which is fitted again after every round.

    Mamou et al. (huggingface.co/papers/2405.04304), in the form that Transformers ships (`assistant_confidence_threshold` with
    scikit-learn installed): of the q(x) of a row's tested tokens, the threshold t that costs least,

        cost(t) = share of the refused tokens with q(x) ≥ t + `missed` · share of the accepted ones with q(x) < t

    once six tokens have been tested, an accepted and a refused one among them. Until then it is `Confidence(threshold)`.
    """

    threshold: float = 0.4
    missed: float = 3.0
    max_draft: int = 20

    def __post_init__(self) -> None:
        check_number("DISCO.threshold", self.threshold, 0.0, 1.0)
        check_number("DISCO.missed", self.missed, 0.0, 1e6)
        check_int("DISCO.max_draft", self.max_draft, 1, LONGEST_DRAFT)

    @property
    def longest(self) -> int:
        return self.max_draft

    def start(self, rows: int) -> "_DISCORun":
        tested: list[list[tuple[float, bool]]] = [[] for _ in range(rows)]
        return _DISCORun(**vars(self), thresholds=[self.threshold] * rows, tested=tested)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return _of_token(input_ids, scores) < self.threshold


@dataclass(frozen=True, eq=False)
class _DISCORun(DISCO):
    thresholds: list[float] = field(default_factory=list)  # of every row of the call; `observe` writes into both
    tested: list[list[tuple[float, bool]]] = field(default_factory=list)  # (q(x), accepted) of each row
    steps: list[tuple[list[int], torch.Tensor]] = field(default_factory=list)  # of this round: rows, their q(x) (B,)

    def limits(self, rows: list[int]) -> list[int]:
        self.steps.clear()
        return super().limits(rows)

    def observe(self, rows: list[int], drafted: list[int], accepted: list[int]) -> None:
        if not self.steps:
            return
        drawn = dict(zip(self.steps[0][0], torch.stack([q for _, q in self.steps], dim=1).tolist(), strict=True))
        for row, d, n in zip(rows, drafted, accepted, strict=True):
            labels = [True] * n + [False] * (n < d)
            self.tested[row] += list(
                zip(drawn[row], labels, strict=False)
            )  # what is behind the first refused one was not tested
            if len(self.tested[row]) >= FEWEST:
                seen, verdicts = zip(*self.tested[row], strict=True)
                fitted = cheapest(seen, verdicts, self.missed)
                self.thresholds[row] = self.thresholds[row] if fitted is None else fitted

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        rows, q = list(numbers(input_ids, kwargs)), _of_token(input_ids, scores)
        self.steps.append((rows, q))
        return q < torch.tensor([self.thresholds[row] for row in rows], dtype=torch.float32, device=q.device)


def _of_token(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
    """q(x) of the token just drafted, (B,) float32."""
    q = scores[-1].float().softmax(dim=-1)
    return q.gather(-1, input_ids[:, -1:].to(q.device)).squeeze(-1)


def cheapest(q: Any, accepted: Any, missed: float) -> float | None:
    """DISCO's threshold for tokens of probability `q` (N,) and verdict `accepted` (N,) bool; of equals the highest.

    None where all verdicts are the same, for one of the two shares then means nothing.
    """
    q, accepted = np.asarray(q, dtype=np.float64), np.asarray(accepted, dtype=bool)
    if accepted.all() or not accepted.any():
        return None
    levels = np.unique(q)[::-1]  # falling
    kept = q >= levels[:, None]  # (levels, N)
    let = (kept & ~accepted).sum(axis=1) / (~accepted).sum()
    lost = (~kept & accepted).sum(axis=1) / accepted.sum()
    return float(levels[np.argmin(let + missed * lost)])


register_stop(
    "disco", DISCO, paper="2405.04304",
    summary="Stop after a token that the draft gave less than a threshold, which is fitted again after every round.",
)  # fmt: skip
register_stop(
    "adaedl", AdaEDL, paper="2410.18351",
    summary="Stop after a token whose draft entropy H bounds its acceptance too low: 1 − √(`scale`·H) < λ, H in nats.",
)  # fmt: skip
