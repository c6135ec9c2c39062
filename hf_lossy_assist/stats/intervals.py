"""Intervals and tests of what was measured, each named by its method."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np


RESAMPLES = 2000
SEED = 0  # the same figures give the same interval


class Estimate(NamedTuple):
    """A figure and its interval; both bounds are None where there are too few measurements for one."""

    value: float
    low: float | None
    high: float | None


def wilson(hits: int, count: int, confidence: float = 0.95) -> Estimate:
    """The share `hits` / `count` with Wilson's score interval. `count` ≥ 1."""
    from scipy.stats import binomtest

    found = binomtest(hits, count).proportion_ci(confidence, method="wilson")
    return Estimate(hits / count, float(found.low), float(found.high))


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p-value of McNemar's test: of the pairs that differ, as many are better as are worse."""
    from scipy.stats import binomtest

    return 1.0 if better + worse == 0 else float(binomtest(worse, better + worse).pvalue)


def rate(amounts: Sequence[float], seconds: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Amount per second over all units, with a bootstrap interval over the units (percentiles, `RESAMPLES` of them)."""
    return _bootstrap(_rate, (amounts, seconds), confidence)


def ratio(
    amounts: Sequence[float],
    seconds: Sequence[float],
    other_amounts: Sequence[float],
    other_seconds: Sequence[float],
    confidence: float = 0.95,
) -> Estimate:
    """How many times the second rate the first one is, on the same units, which are resampled together."""
    return _bootstrap(_ratio, (amounts, seconds, other_amounts, other_seconds), confidence)


def _rate(amounts: np.ndarray, seconds: np.ndarray, axis: int = -1) -> np.ndarray:
    return amounts.sum(axis=axis) / seconds.sum(axis=axis)


def _ratio(
    amounts: np.ndarray, seconds: np.ndarray, others: np.ndarray, their_seconds: np.ndarray, axis: int = -1
) -> np.ndarray:
    return _rate(amounts, seconds, axis) / _rate(others, their_seconds, axis)


def _bootstrap(statistic: Any, samples: tuple[Sequence[float], ...], confidence: float) -> Estimate:
    from scipy.stats import bootstrap

    arrays = tuple(np.asarray(sample, dtype=float) for sample in samples)
    value = float(statistic(*arrays))
    if len(arrays[0]) < 2 or all(np.ptp(array) == 0 for array in arrays):
        return Estimate(value, None, None)
    found = bootstrap(
        arrays,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        confidence_level=confidence,
        method="percentile",
        random_state=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))
