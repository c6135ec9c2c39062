"""Build the table P̂(accept | S, A) from samples; predict the speed of SV on held-out prompts.

Kim et al., §7.4 and Definition D.8, huggingface.co/papers/2509.24328.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ...artifacts.profile_tables import Bins, Latency
from ...filters.sv import choose


PRIOR = 8.0  # pseudo-samples of the row's mean in each cell
CELLS = 16, 17  # of S, and of A in each cell of S
HELD_OUT = 0.2  # of the prompts, for every figure in the report
ROUNDS = 200  # replayed for a predicted speed


@dataclass(frozen=True)
class Samples:
    """Drafted tokens of many rounds, one entry each, (N,)."""

    s: np.ndarray  # float32   Σ min(q, c)
    a: np.ndarray  # float32   min(1, c(x)/q(x))
    x: np.ndarray  # float64   min(1, p(x)/q(x)), the target's acceptance probability
    similarity: np.ndarray  # float32   Σ min(q, p)
    slot: np.ndarray  # int64   position in its draft, from 0
    gamma: np.ndarray  # int64   the longest draft allowed in its round
    text: np.ndarray  # int64   number of the prompt
    round: np.ndarray  # int64   number of the round; its tokens are adjacent and in order
    reached: np.ndarray  # float64   probability that all tokens before it in the draft were accepted

    def of(self, mask: np.ndarray) -> "Samples":
        """Return the samples selected by a mask (N,)."""
        return Samples(**{name: values[mask] for name, values in vars(self).items()})


def compute_quantiles(values: np.ndarray, weights: np.ndarray, cells: int) -> np.ndarray:
    """Return the inner edges of `cells` cells of equal weight, (cells − 1,) float32."""
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / max(weights.sum(), 1e-300)
    at = np.searchsorted(share, np.arange(1, cells) / cells).clip(max=len(values) - 1)
    return values[order][at].astype(np.float32)


def compute_edges(samples: Samples, rows: int, columns: int, adaptive: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return edges of S (rows − 1,) and, for each cell of S, of A (rows, columns − 1): of equal width, or if `adaptive` of equal weight."""
    if not adaptive:
        even = [np.linspace(0, 1, n + 1)[1:-1].astype(np.float32) for n in (rows, columns)]
        return even[0], np.tile(even[1], (rows, 1))
    s_edges = compute_quantiles(samples.s, samples.reached, rows)
    cell = np.searchsorted(s_edges, samples.s, side="right")
    everywhere = compute_quantiles(samples.a, samples.reached, columns)
    a_edges = [
        compute_quantiles(samples.a[cell == k], samples.reached[cell == k], columns)
        if (cell == k).any()
        else everywhere
        for k in range(rows)
    ]
    return s_edges, np.stack(a_edges)


def find_cells(s_edges: np.ndarray, a_edges: np.ndarray, samples: Samples) -> tuple[np.ndarray, np.ndarray]:
    """Return the cell of S and the cell of A of each sample, (N,) each."""
    s = np.searchsorted(s_edges, samples.s, side="right")
    return s, (samples.a[:, None] >= a_edges[s]).sum(axis=1)


def build_table(samples: Samples, rows: int, columns: int, adaptive: bool) -> Bins:
    """Return P̂ of each cell: the mean of X over its samples, weighted by the probability that they are reached.

    `PRIOR` pseudo-samples pull a cell towards its row's mean, which an empty cell has; along A P̂ never decreases.
    """
    from sklearn.isotonic import isotonic_regression

    s_edges, a_edges = compute_edges(samples, rows, columns, adaptive)
    s, a = find_cells(s_edges, a_edges, samples)
    weight, total = np.zeros((rows, columns)), np.zeros((rows, columns))
    np.add.at(weight, (s, a), samples.reached)
    np.add.at(total, (s, a), samples.reached * samples.x)
    mean = float(total.sum() / weight.sum())
    by_s = (total.sum(axis=1) + PRIOR * mean) / (weight.sum(axis=1) + PRIOR)
    accept = (total + PRIOR * by_s[:, None]) / (weight + PRIOR)
    accept = np.stack([isotonic_regression(y, sample_weight=w + PRIOR) for y, w in zip(accept, weight, strict=True)])
    counts = np.zeros((rows, columns), dtype=np.int64)
    np.add.at(counts, (s, a), 1)
    return Bins(s_edges, a_edges, accept.clip(0.0, 1.0), by_s, counts)


def split_samples(samples: Samples, seed: int) -> tuple[Samples, Samples, dict[str, float | None]]:
    """Return samples for building a table, those of held-out prompts, and figures."""
    texts = np.unique(samples.text)
    held_out = np.random.default_rng(seed).permutation(texts)[: max(1, round(HELD_OUT * len(texts)))]
    mask = np.isin(samples.text, held_out)
    fitted, test = samples.of(~mask), samples.of(mask)
    varied = np.ptp(test.s) > 0 and np.ptp(test.similarity) > 0
    metrics = {
        "samples": len(samples.x),
        "held_out": len(test.x),
        "acceptance": float(np.average(samples.x, weights=samples.reached)),
        "correlation": float(np.corrcoef(test.s, test.similarity)[0, 1]) if varied else None,  # Pearson's
    }
    return fitted, test, metrics


def replay_rounds(bins: Bins, samples: Samples, batch: int, gamma: int, seed: int) -> Iterator[np.ndarray]:
    """Yield rounds of γ in random batches, endlessly: P̂ and the true probability of each drafted token, (2, B, γ)."""
    random, samples = np.random.default_rng(seed), samples.of(samples.gamma == gamma)
    rounds, inverse = np.unique(samples.round, return_inverse=True)
    table = np.zeros((2, len(rounds), gamma))
    s, a = find_cells(bins.s_edges, bins.a_edges, samples)
    table[0, inverse, samples.slot] = bins.accept[s, a]
    table[1, inverse, samples.slot] = samples.x
    while True:
        yield table[:, random.choice(len(rounds), batch)]


def predict_speed(bins: Bins, latency: Latency, samples: Samples, batch: int, gamma: int, seed: int) -> float:
    """Predict SV's speed relative to strict acceptance by replaying held-out rounds in random batches with the measured seconds."""
    seconds, alone = latency.of(batch, gamma), latency.unobserved(batch, gamma)
    total = np.zeros(4)  # tokens and seconds of SV, then of strict
    for accept, true in islice(replay_rounds(bins, samples, batch, gamma, seed), ROUNDS):
        counts = choose(accept, seconds, float(batch)).counts
        gain = np.cumprod(true, axis=1)
        sent = np.arange(gamma) < counts[:, None]
        total += (batch + gain[sent].sum(), seconds[counts.sum()], batch + gain.sum(), alone)
    return float(total[0] / total[1] / (total[2] / total[3]))
