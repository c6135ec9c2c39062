"""How likely a drafted token is accepted, by the draft's entropy at it: SVIP's bound, moved to what was counted."""

import math

import numpy as np
import torch


KEEP = 1 - 1 / 64  # of what was counted before a round: about 64 rounds are remembered
BINS, WIDTH = 24, 0.125  # of √H, H in nats; the last bin has everything above
MIDDLES = (np.arange(BINS) + 0.5) * WIDTH
EDGES = (torch.arange(1, BINS) * WIDTH) ** 2  # of H
PRIOR = 4.0  # tested tokens that SVIP's bound weighs in each bin


def bins_of(entropies: torch.Tensor, edges: torch.Tensor = EDGES) -> torch.Tensor:
    """The bin of each entropy in nats, (B,) float32 → (B,) int64; `edges`: `EDGES` on their device.

    NaN, of logits that make no distribution, is in the last one.
    """
    return torch.bucketize(entropies, edges, right=True)


def falling(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The nearest values (n,) that do not rise, by squared distance with `weights` (n,): neighbours out of order share their mean."""
    groups: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while groups and groups[-1][0] < mean:
            before, heavy, many = groups.pop()
            mean = (before * heavy + mean * total) / (heavy + total)
            total, count = heavy + total, many + count
        groups.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in groups], [count for _, _, count in groups])


class Accepted:
    """How many drafted tokens were tested and accepted by the draft's entropy at each, weighted by age."""

    def __init__(self) -> None:
        self.tested, self.accepted = np.zeros(BINS), np.zeros(BINS)

    def chances(self, c: float) -> np.ndarray:
        """a(H), P(accepted) of a token in each bin, (BINS,), not rising: SVIP's bound moved to what was counted."""
        bound = np.maximum(1 - math.sqrt(c) * MIDDLES, 0)
        weights = self.tested + PRIOR
        return falling((self.accepted + PRIOR * bound) / weights, weights)

    @property
    def share(self) -> float:
        """ā, of tested tokens."""
        return (float(self.accepted.sum()) + 1) / (float(self.tested.sum()) + 2)

    def learn(self, bins: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> None:
        """A round: the bins of its tokens (B, γ), how many of them each row drafted and how many were accepted, (B,) each."""
        place = np.arange(bins.shape[1])
        taken = place < accepted[:, None]
        tested = place < np.minimum(accepted + 1, drafted)[:, None]  # behind the first rejected token nothing is
        self.tested = KEEP * self.tested + np.bincount(bins[tested], minlength=BINS)
        self.accepted = KEEP * self.accepted + np.bincount(bins[taken], minlength=BINS)
