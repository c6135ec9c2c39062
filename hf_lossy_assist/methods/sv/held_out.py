"""What samples of held-out prompts say of a profile: how much S and A tell about acceptance, how fast SV should be."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np

from ...artifacts.profile_tables import Bins, Latency
from ...filters.goodput import choose
from .cells import Samples, cells, entropies


SHAPES = (("5 × 5", 5, 5, False), ("10 × 10", 10, 10, False), ("20 × 20", 20, 20, False), ("adaptive", 16, 17, True))
HELD_OUT = 0.2  # of the prompts, for every figure in the report


def report(samples: Samples, seed: int) -> tuple[Samples, Samples, dict[str, Any]]:
    """Samples to build cells from, those of held-out prompts, and what the latter say of S and A."""
    numbers = np.unique(samples.text)
    held_out = np.random.default_rng(seed).permutation(numbers)[: max(1, round(HELD_OUT * len(numbers)))]
    held = np.isin(samples.text, held_out)
    fitted, kept = samples.of(~held), samples.of(held)
    metrics = {
        "samples": len(samples.x),
        "held_out": len(kept.x),
        "acceptance": float(np.average(samples.x, weights=samples.reached)),
        "information": entropies(fitted, kept, SHAPES),
        "correlation": correlation(kept.s, kept.similarity),
    }
    return fitted, kept, metrics


def expected(bins: Bins, samples: Samples, batch: int, gamma: int, seed: int) -> Iterator[np.ndarray]:
    """Rounds of γ in random batches, without end: what P̂ says of each drafted token and what was true, (2, B, γ)."""
    random, samples = np.random.default_rng(seed), samples.of(samples.gamma == gamma)
    number, inverse = np.unique(samples.round, return_inverse=True)
    table = np.zeros((2, len(number), gamma))
    s, a = cells(bins.s_edges, bins.a_edges, samples)
    table[0, inverse, samples.place] = bins.accept[s, a]
    table[1, inverse, samples.place] = samples.x
    while True:
        yield table[:, random.choice(len(number), batch)]


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's; None where one of them never changes."""
    return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) > 0 and np.ptp(y) > 0 else None


def predicted(bins: Bins, latency: Latency, samples: Samples, batch: int, gamma: int, seed: int) -> float:
    """The speed of SV against strict acceptance, by replaying held-out rounds in random batches with the measured seconds."""
    seconds, alone = latency.of(batch, gamma), latency.unobserved(batch, gamma)
    total = np.zeros(4)  # tokens and seconds of SV, of strict
    for accept, true in islice(expected(bins, samples, batch, gamma, seed), 200):
        kept = choose(accept, seconds, float(batch)).kept
        gain = np.cumprod(true, axis=1)
        sent = np.arange(gamma) < kept[:, None]
        total += (batch + gain[sent].sum(), seconds[kept.sum()], batch + gain.sum(), alone)
    return float(total[0] / total[1] / (total[2] / total[3]))
