"""AUROC with a confidence interval for tokens that are grouped in texts."""

import math

import lazy_loader
import numpy as np

from .intervals import RESAMPLES, SEED, Estimate


scipy = lazy_loader.load("scipy")  # of the extra `train`; slow to import
NEAR = 1e-9  # distance within which an AUROC counts as 0 or 1


def auroc(
    scores: np.ndarray,
    positive: np.ndarray,
    texts: np.ndarray,
    strata: np.ndarray | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """Return P(a positive token scores higher than a negative one), ties counting half, and its interval.

    The interval takes the wider bound of two at each end: a percentile bootstrap that resamples whole texts, since tokens of one text are
    correlated, and Newcombe's by the numbers of tokens (`newcombe`), since a bootstrap without a misordered pair reports certainty
    whatever the number of tokens.

    Args:
        scores: (N,).
        texts: (N,) index of each token's text.
        positive: (N,) bool, or the probability from 0 to 1 that each token is positive.
        strata: (N,) int, if scores are comparable only within a part (fold): the value is the mean over the parts.

    Returns: an estimate whose bounds are None for a single text. Raises: `ValueError` if a part lacks one of the labels.
    """
    positive = np.asarray(positive, dtype=float)
    strata = np.zeros(len(scores), dtype=int) if strata is None else strata
    ranked = [_Ranked(scores, positive, mask) for mask in (strata == stratum for stratum in np.unique(strata))]
    whole = np.ones(len(scores))
    if any(math.isnan(stratum.auroc(whole)) for stratum in ranked):
        raise ValueError("an AUROC needs tokens of both labels, and here there is only one")
    value = _mean(ranked, whole)
    names, index = np.unique(texts, return_inverse=True)
    if len(names) < 2:
        return Estimate(value, None, None)
    random = np.random.default_rng(SEED)
    draws = (random.integers(0, len(names), len(names)) for _ in range(RESAMPLES))
    resampled = np.array([_mean(ranked, np.bincount(draw, minlength=len(names))[index]) for draw in draws])
    tail = (1 - confidence) / 2
    # A resample without one of the labels has no AUROC.
    low, high = np.quantile(resampled[~np.isnan(resampled)], (tail, 1 - tail))
    other = newcombe(value, positive.sum(), (1 - positive).sum(), confidence)
    return Estimate(value, min(float(low), other[0]), max(float(high), other[1]))


def newcombe(value: float, positives: float, negatives: float, confidence: float = 0.95) -> tuple[float, float]:
    """Return the bounds of an AUROC, given the numbers of positives and negatives.

    Method 5 of Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic", part 2, Statistics in
    Medicine 25 (2006): the θ with |value − θ| = z·s(θ), where s is Hanley and McNeil's standard error with both numbers replaced by
    their mean inside it.
    """
    z, mean = float(scipy.stats.norm.ppf((1 + confidence) / 2)), (positives + negatives) / 2

    def beyond(theta: float) -> float:
        inside = 1 + (mean - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return abs(value - theta) - z * math.sqrt(theta * (1 - theta) / (positives * negatives) * inside)

    # s is 0 at 0 and at 1, so such a value cannot end a bracket.
    low = 0.0 if value < NEAR else scipy.optimize.brentq(beyond, 0.0, value - NEAR)
    high = 1.0 if value > 1 - NEAR else scipy.optimize.brentq(beyond, value + NEAR, 1.0)
    return float(low), float(high)


class _Ranked:
    """The tokens of one part, selected by `mask` (N,) bool, ranked by score."""

    def __init__(self, scores: np.ndarray, positive: np.ndarray, mask: np.ndarray):
        self.mask, self.positive = mask, positive[mask]
        self.rank = np.unique(scores[mask], return_inverse=True)[1]

    def auroc(self, weights: np.ndarray) -> float:
        """Return the AUROC for `weights` (N,) of all tokens; NaN if a label has no weight."""
        inside = weights[self.mask]
        above, below = (np.bincount(self.rank, inside * label) for label in (self.positive, 1 - self.positive))
        pairs = float(above.sum() * below.sum())
        return float((above * (below.cumsum() - below / 2)).sum()) / pairs if pairs else math.nan


def _mean(ranked: list[_Ranked], weights: np.ndarray) -> float:
    """Return the mean over the parts with both labels."""
    values = [value for value in (stratum.auroc(weights) for stratum in ranked) if not math.isnan(value)]
    return sum(values) / len(values) if values else math.nan
