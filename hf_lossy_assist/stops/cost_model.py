"""The estimates for a pair of models, and their memory: costs of rounds, given or measured, and acceptance by draft entropy."""

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel


T = TypeVar("T")
SHORTEST = 1e-9  # lower bound of a round's seconds, as a divisor
KEEP = 1 - 1 / 64  # decay of earlier counts at each round: a window of about 64 rounds
BINS, WIDTH = 24, 0.125  # bins of √H, H in nats; the last bin is open-ended
MIDDLES = (np.arange(BINS) + 0.5) * WIDTH
EDGES = (torch.arange(1, BINS) * WIDTH) ** 2  # in H
PRIOR = 4.0  # weight of SVIP's bound in each bin, in tested tokens


def bins_of(entropies: torch.Tensor, edges: torch.Tensor = EDGES) -> torch.Tensor:
    """Return the bin of each entropy in nats, (B,) float32 → (B,) int64; `edges`: `EDGES` on their device. NaN goes to the last bin."""
    return torch.bucketize(entropies, edges, right=True)


def falling(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the non-increasing least-squares fit of `values` (n,) with `weights` (n,), by pooling adjacent violators."""
    groups: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while groups and groups[-1][0] < mean:
            before, heavy, many = groups.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, count = heavy + total, many + count
        groups.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in groups], [count for _, _, count in groups])


class AcceptanceEstimate:
    """Acceptance by draft entropy: exponentially decayed counts of tested and accepted tokens, with SVIP's bound as prior."""

    def __init__(self) -> None:
        self.tested, self.accepted = np.zeros(BINS), np.zeros(BINS)

    def chances(self, c: float) -> np.ndarray:
        """Return a(H), P(accepted) of a token in each bin, (BINS,), non-increasing."""
        bound = np.maximum(1 - math.sqrt(c) * MIDDLES, 0)
        weights = self.tested + PRIOR
        return falling((self.accepted + PRIOR * bound) / weights, weights)

    @property
    def share(self) -> float:
        """ā, the smoothed share of tested tokens that were accepted."""
        return (float(self.accepted.sum()) + 1) / (float(self.tested.sum()) + 2)

    def learn(self, bins: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """Add a round: the bins of its tokens (B, γ), and each row's numbers of drafted and accepted tokens, (B,) each."""
        slot = np.arange(bins.shape[1])
        taken = slot < accepted[:, None]
        tested = slot < np.minimum(accepted + 1, drafted)[:, None]  # nothing after the first rejected token was tested
        self.tested = KEEP * self.tested + np.bincount(bins[tested], minlength=BINS)
        self.accepted = KEEP * self.accepted + np.bincount(bins[taken], minlength=BINS)


# Round sizes to store, and measurements of each: measurements of a single size would not separate the costs.
SIZES, EACH = 32, 4
STIFF = 0.03  # weight of the initial guess, in measurements
FAR = 0.2  # relative error beyond which a measurement is down-weighted


class RoundCosts:
    """The costs of rounds: a draft step takes a + b·B, a round without all draft steps but the first a + b·B + c·B·(γ + 1).

    Measured in seconds, or given in any unit.

    Args:
        step: of drafting one token for all rows; None: all costs are measured.
        token: of verifying one more token of a row.
        fixed: of the rest of a round.
    """

    def __init__(self, step: float | None, token: float, fixed: float):
        self.measured = step is None
        if step is None:
            if (token, fixed) != (0.0, 1.0):
                raise ValueError("token and fixed have no effect without step: pass step=… too")
            self.steps, self.rest = CostModel(), CostModel()
        else:
            self.steps, self.rest = CostModel([step, 0.0]), CostModel([step + fixed, -token, token])

    @property
    def ready(self) -> bool:
        """Whether costs are given or some were measured."""
        return not self.measured or bool(self.steps.points and self.rest.points)

    def step(self, rows: int) -> float:
        """Return the cost of one more draft step for `rows` rows."""
        return self.steps.of(1, rows)

    def column(self, rows: int) -> float:
        """Return the cost of verifying one more token of each of `rows` rows."""
        return self.rest.of(0, 0, rows)

    def round(self, rows: int, gamma: float) -> float:
        """Return the cost of a round that drafts and verifies `gamma` tokens for each of `rows` rows."""
        return self.rest.of(1, rows, rows * (gamma + 1)) + (gamma - 1) * self.step(rows)

    def learn(self, rows: int, moments: Sequence[float], end: float, gamma: float) -> None:
        """Add a round that verified `gamma` tokens a row. `moments`: its start and the time after each drafted token; `end`: the next round's start."""
        if not self.measured:
            return
        began, first, *_, last = [*moments, moments[-1]]
        if len(moments) > 2:
            self.steps.add((1, rows), (last - first) / (len(moments) - 2))
        self.rest.add((1, rows, round(rows * (gamma + 1))), end - began - (last - first))


class PairMemory(WeakKeyDictionary[PreTrainedModel, "WeakKeyDictionary[PreTrainedModel, dict[Hashable, T]]"]):
    """A memory that calls of one kind with the same target and draft share. It goes with the models."""

    def recall(self, target: PreTrainedModel, draft: PreTrainedModel, kind: Hashable, value: T) -> T:
        """Return what is shared; before the first call it is `value`."""
        return self.setdefault(target, WeakKeyDictionary()).setdefault(draft, {}).setdefault(kind, value)


class CostModel:
    """Seconds as a linear function of amounts: by `coefficients`, or fitted to recent measurements; outliers are down-weighted."""

    def __init__(self, coefficients: list[float] | None = None) -> None:
        self.points: OrderedDict[tuple[float, ...], deque[float]] = OrderedDict()  # by amounts, most recent last
        self._coefficients = coefficients
        self._added = 0
        self._lock = threading.Lock()  # several threads may share one model

    def add(self, amounts: tuple[float, ...], seconds: float) -> None:
        with self._lock:
            self.points.setdefault(amounts, deque(maxlen=EACH)).append(seconds)
            self.points.move_to_end(amounts)
            if len(self.points) > SIZES:
                self.points.popitem(last=False)
            self._added += 1
            if self._added <= 8 or self._added % 16 == 0:  # a fit costs as much as some draft steps of a tiny model
                self._coefficients = None

    def of(self, *amounts: float) -> float:
        """Return the predicted seconds for these amounts."""
        with self._lock:
            coefficients = self._coefficients = self._coefficients or self._fit()
        return sum(coefficient * amount for coefficient, amount in zip(coefficients, amounts, strict=True))

    def _fit(self) -> list[float]:
        """Fit the seconds per amount: robust least squares with a weak prior of equal parts, which decides if all sizes are equal."""
        points = [(amounts, seconds) for amounts, measured in self.points.items() for seconds in measured]
        x, y = np.array([amounts for amounts, _ in points], float), np.array([seconds for _, seconds in points])
        scale = x.max(axis=0)
        x /= scale
        guess = np.full(x.shape[1], np.median(y / x.sum(axis=1)))
        weights, far = np.ones(len(y)), FAR * np.median(y)
        for _ in range(3):
            gram = (x.T * weights) @ x + STIFF * np.eye(x.shape[1])
            coefficients = guess + np.linalg.solve(gram, (x.T * weights) @ (y - x @ guess))
            off = np.abs(y - x @ coefficients)
            weights = far / np.maximum(off, far) if far > 0 else weights
        return (np.maximum(coefficients, 0) / scale).tolist()
