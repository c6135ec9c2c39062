"""The two tables of an SV profile: how often the target accepts for given S and A, and the seconds of rounds.

Kim et al. (huggingface.co/papers/2509.24328, §4.2): S = Σ min(q, c) is the agreement of draft and companion at a position, A = min(1, c(x)/q(x))
the companion's acceptance of the drafted token.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


ROUNDING = 1e-6  # of seconds in float32


@dataclass(frozen=True, eq=False)
class Bins:
    """P̂(accept | S, A): cells of S, each with separate cells of A."""

    s_edges: np.ndarray  # (K − 1,) float32     inner edges of the cells of S, not decreasing
    a_edges: np.ndarray  # (K, L − 1) float32   inner edges of the cells of A for each cell of S
    accept: np.ndarray  # (K, L) float64      mean min(1, p/q), smoothed, not decreasing along A
    accept_by_s: np.ndarray  # (K,) float64       the same without A
    counts: np.ndarray  # (K, L) int64       samples in each cell

    def __post_init__(self) -> None:
        tables = (self.s_edges, self.a_edges, self.accept, self.accept_by_s, self.counts)
        shape = k, m = self.s_edges.size + 1, (self.a_edges.shape[-1] if self.a_edges.ndim else 0) + 1
        fits = [x.shape for x in tables] == [(k - 1,), (k, m - 1), shape, (k,), shape]
        if not fits or not all(np.isfinite(x).all() for x in tables):
            raise ValueError("the tables of acceptance have gaps: make the profile again (hf-lossy profile)")
        shares = (*tables[2:4], 1 - self.accept, 1 - self.accept_by_s, self.counts)
        if not all((np.diff(x) >= 0).all() for x in tables[:3]) or any((x < 0).any() for x in shares):
            raise ValueError("the tables of acceptance are out of order: make the profile again (hf-lossy profile)")

    def of_s(self, s: torch.Tensor) -> torch.Tensor:
        """Return the cell of S for each position, int64."""
        return torch.bucketize(s, self._on(s.device, "s_edges"), right=True)

    def of_a(self, s_cell: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        """Return the cell of A, int64, for `a` (…, N) at positions whose cell of S is `s_cell` (…)."""
        edges = self._on(a.device, "a_edges")[s_cell]  # (…, L − 1)
        return torch.searchsorted(edges, a.contiguous(), right=True)

    def tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `accept_by_s` (K,) and `accept` (K, L) on a device, float64."""
        return self._on(device, "accept_by_s"), self._on(device, "accept")

    def _on(self, device: torch.device, name: str) -> torch.Tensor:
        """Return a table on a device, copied once."""
        if (device, name) not in self._copies:
            self._copies[device, name] = torch.from_numpy(getattr(self, name)).to(device)
        return self._copies[device, name]

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, str], torch.Tensor]:
        return {}


@dataclass(frozen=True, eq=False)
class Latency:
    """Measured seconds of one round: target forward, acceptance and bookkeeping; one draft step; the additional cost of the companion.

    `seconds[i][k]` is for `batches[i]` rows and `tokens[i][k]` drafted tokens verified in all of them together.
    """

    batches: np.ndarray  # (N,) int64, ascending
    tokens: np.ndarray  # (N, M) int64, ascending from 0 to γ · batch
    seconds: np.ndarray  # (N, M) float64, non-decreasing
    step: np.ndarray  # (N,) float64   drafting one token per row
    companion: np.ndarray  # (N,) float64   additional cost of a round with the companion
    noise: np.ndarray  # (N,) float64   half the interquartile range, relative to the median

    def __post_init__(self) -> None:
        lists, tables = (self.batches, self.step, self.companion, self.noise), (self.tokens, self.seconds)
        fits = all(x.shape == (self.batches.size,) for x in lists) and self.tokens.shape == self.seconds.shape
        fits = fits and self.tokens.ndim == 2 and self.tokens.shape[0] == self.batches.size > 0 < self.tokens.shape[1]
        if not fits or not all(np.isfinite(values).all() for values in (*lists, *tables)):
            raise ValueError("the latency table has gaps: measure it again (hf-lossy profile)")
        rising = (np.diff(self.batches) > 0).all() and (np.diff(self.tokens, axis=1) > 0).all() and self.batches[0] > 0
        falling = (np.diff(self.seconds, axis=1) < 0).any() or (self.seconds[:, 0] <= 0).any()
        least = min(x.min() for x in (self.step, self.companion, self.noise))
        if not rising or falling or (self.tokens[:, 0] != 0).any() or least < 0:
            raise ValueError("the latency table is out of order: measure it again (hf-lossy profile)")

    @property
    def convex(self) -> bool:
        """Whether each batch size's seconds are convex in the tokens, up to rounding, which makes the schedule optimal."""
        m, s = self.tokens, self.seconds
        share = (m[:, 1:-1] - m[:, :-2]) / (m[:, 2:] - m[:, :-2])
        chord = s[:, :-2] + share * (s[:, 2:] - s[:, :-2])
        return bool((s[:, 1:-1] <= chord * (1 + ROUNDING)).all())

    def of(self, batch: int, gamma: int) -> np.ndarray:
        """Return the seconds of a round of `batch` rows that drafts, and then verifies 0, 1, … `batch`·`gamma` tokens, float64.

        Interpolated linearly between measured batch sizes; beyond them scaled from the nearest one by the number of rows.
        """
        per_row = np.arange(batch * gamma + 1) / batch  # tokens verified for each row
        curves = np.stack(
            [np.interp(per_row, m / b, s) for b, m, s in zip(self.batches, self.tokens, self.seconds, strict=True)]
        )
        return self._between(batch, curves + (self.companion + gamma * self.step)[:, None])

    def unobserved(self, batch: int, gamma: int) -> float:
        """Return the seconds of a round without a companion that verifies all γ tokens of each row."""
        return float(self.of(batch, gamma)[-1] - self._between(batch, self.companion))

    def _between(self, batch: int, values: np.ndarray) -> np.ndarray:
        """Interpolate values for batch sizes, (N, …), at `batch`, (…)."""
        # Linear extrapolation could fall below measured values, or below 0.
        if not self.batches[0] < batch < self.batches[-1]:
            nearest = 0 if batch <= self.batches[0] else -1
            return values[nearest] * batch / self.batches[nearest]
        i = int(np.searchsorted(self.batches, batch))
        share = (batch - self.batches[i - 1]) / (self.batches[i] - self.batches[i - 1])
        return values[i - 1] + share * (values[i] - values[i - 1])
