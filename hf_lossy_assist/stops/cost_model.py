"""Estimates that `JointGoodput` decides by: acceptance by the draft's entropy, and costs of rounds, given or measured."""

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch


KEEP = 1 - 1 / 64  # of what was counted before a round: about 64 rounds are remembered
BINS, WIDTH = 24, 0.125  # of √H, H in nats; the last bin has everything above
MIDDLES = (np.arange(BINS) + 0.5) * WIDTH
EDGES = (torch.arange(1, BINS) * WIDTH) ** 2  # of H
PRIOR = 4.0  # tested tokens that SVIP's bound weighs in each bin


def bins_of(entropies: torch.Tensor, edges: torch.Tensor = EDGES) -> torch.Tensor:
    """Return the bin of each entropy in nats, (B,) float32 → (B,) int64; `edges`: `EDGES` on their device. NaN is in the last one."""
    return torch.bucketize(entropies, edges, right=True)


def falling(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the nearest values (n,) that do not rise, in least squares with `weights` (n,): neighbours out of order share their mean."""
    groups: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while groups and groups[-1][0] < mean:
            before, heavy, many = groups.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, count = heavy + total, many + count
        groups.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in groups], [count for _, _, count in groups])


class AcceptanceEstimate:
    """Counts of tested and accepted drafted tokens by the draft's entropy, weighted by age: SVIP's bound, moved to what was counted."""

    def __init__(self) -> None:
        self.tested, self.accepted = np.zeros(BINS), np.zeros(BINS)

    def chances(self, c: float) -> np.ndarray:
        """Return a(H), P(accepted) of a token in each bin, (BINS,), not rising."""
        bound = np.maximum(1 - math.sqrt(c) * MIDDLES, 0)
        weights = self.tested + PRIOR
        return falling((self.accepted + PRIOR * bound) / weights, weights)

    @property
    def share(self) -> float:
        """ā, the share of tested tokens that was accepted."""
        return (float(self.accepted.sum()) + 1) / (float(self.tested.sum()) + 2)

    def learn(self, bins: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Add a round: the bins of its tokens (B, γ), and how many each row drafted and how many were accepted, (B,) each."""
        place = np.arange(bins.shape[1])
        taken = place < accepted[:, None]
        tested = place < np.minimum(accepted + 1, drafted)[:, None]  # nothing after the first rejected token
        self.tested = KEEP * self.tested + np.bincount(bins[tested], minlength=BINS)
        self.accepted = KEEP * self.accepted + np.bincount(bins[taken], minlength=BINS)


# Sizes of rounds that are remembered, and measurements of each: all of one size would not say what grows with what.
SIZES, EACH = 32, 4
STIFF = 0.03  # measurements that the first guess at what seconds are made of weighs
FAR = 0.2  # of the usual seconds: what a measurement may be off before it counts less


@dataclass(frozen=True)
class FixedCosts:
    """Costs of rounds by the settings of a stop."""

    per_step: float
    per_token: float
    fixed: float
    known: ClassVar[bool] = True

    def step(self, rows: int) -> float:
        """Return the cost of one draft step more for `rows` rows."""
        return self.per_step

    def column(self, rows: int) -> float:
        """Return the cost of verifying one token more of each of `rows` rows."""
        return self.per_token * rows

    def round(self, rows: int, gamma: float) -> float:
        """Return the cost of a round that drafts `gamma` tokens for each of `rows` rows."""
        return self.fixed + gamma * (self.step(rows) + self.column(rows))

    def learn(self, rows: int, moments: Sequence[float], end: float, gamma: int) -> None:
        """Do nothing: the costs are given."""


class MeasuredCosts:
    """Costs of rounds in measured seconds; methods as of `FixedCosts`.

    A draft step is modelled as a + b·B, a round without all steps but the first as a + b·B + c·B·(γ + 1).
    """

    def __init__(self) -> None:
        self.steps, self.rest = CostModel(), CostModel()

    @property
    def known(self) -> bool:
        return bool(self.steps.points and self.rest.points)

    def step(self, rows: int) -> float:
        return self.steps.of(1, rows)

    def column(self, rows: int) -> float:
        return self.rest.of(0, 0, rows)

    def round(self, rows: int, gamma: float) -> float:
        return self.rest.of(1, rows, rows * (gamma + 1)) + (gamma - 1) * self.step(rows)

    def learn(self, rows: int, moments: Sequence[float], end: float, gamma: int) -> None:
        """Add a round that verified `gamma` tokens: `moments` when it began and after each token that it drafted, `end` when the next one began."""
        began, first, *_, last = [*moments, moments[-1]]
        if len(moments) > 2:
            self.steps.add((1, rows), (last - first) / (len(moments) - 2))
        self.rest.add((1, rows, rows * (gamma + 1)), end - began - (last - first))


class CostModel:
    """Seconds as a linear function of amounts, fitted to the last measurements; outliers count little."""

    def __init__(self) -> None:
        self.points: OrderedDict[tuple[float, ...], deque[float]] = OrderedDict()  # by amounts, the latest ones last
        self._parts: list[float] | None = None
        self._added = 0
        self._lock = threading.Lock()  # calls in several threads learn from each other

    def add(self, amounts: tuple[float, ...], seconds: float) -> None:
        with self._lock:
            self.points.setdefault(amounts, deque(maxlen=EACH)).append(seconds)
            self.points.move_to_end(amounts)
            if len(self.points) > SIZES:
                self.points.popitem(last=False)
            self._added += 1
            if self._added <= 8 or self._added % 16 == 0:  # a fit takes as long as some draft steps of a tiny model
                self._parts = None

    def of(self, *amounts: float) -> float:
        """Return the expected seconds of these amounts."""
        with self._lock:
            parts = self._parts = self._parts or self._fit()
        return sum(part * amount for part, amount in zip(parts, amounts, strict=True))

    def _fit(self) -> list[float]:
        """Return the seconds of each amount: least squares, drawn a little towards equal parts, for measurements of one size."""
        points = [(amounts, seconds) for amounts, each in self.points.items() for seconds in each]
        x, y = np.array([amounts for amounts, _ in points], float), np.array([seconds for _, seconds in points])
        scale = x.max(axis=0)
        x /= scale
        guess = np.full(x.shape[1], np.median(y / x.sum(axis=1)))
        weights, far = np.ones(len(y)), FAR * np.median(y)
        for _ in range(3):
            gram = (x.T * weights) @ x + STIFF * np.eye(x.shape[1])
            parts = guess + np.linalg.solve(gram, (x.T * weights) @ (y - x @ guess))
            off = np.abs(y - x @ parts)
            weights = far / np.maximum(off, far) if far > 0 else weights
        return (np.maximum(parts, 0) / scale).tolist()
