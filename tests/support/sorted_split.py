"""α and β of mentored decoding once more, by a sort of the vocabulary and bisection: slow, and nothing in common with Newton steps."""

import math

import numpy as np


def split_by_sorting(p: np.ndarray, q: np.ndarray, budget: float) -> tuple[float, float]:
    """log α and log β for distributions (V,) float64; log α = −∞ where all tokens with p > 0 pass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.nan_to_num(p / q, nan=0.0, posinf=math.inf)
    order = ratio.argsort(kind="stable")
    p, q, ratio = p[order], q[order], ratio[order]
    known = (p > 0) & (q > 0)
    terms = np.zeros_like(p)
    terms[known] = p[known] * np.log(ratio[known])
    left_p, left_q, left_kl = (np.concatenate([[0.0], x.cumsum()]) for x in (p, q, terms))

    def beta_of(taken: float) -> tuple[float, int]:
        """β with Σ (p/β − q)⁺ = `taken`, and how many tokens lie not above it."""
        for first in range(len(p) - 1, -1, -1):  # with this many tokens below, β is at least their ratio
            top_p, top_q = left_p[-1] - left_p[first], left_q[-1] - left_q[first]
            beta = top_p / (top_q + taken) if top_q + taken > 0 else math.inf
            if first == 0 or beta >= ratio[first - 1]:
                return max(beta, 1.0), first
        raise AssertionError("no token")

    def kl_of(log_alpha: float) -> tuple[float, float]:
        low = int(np.searchsorted(ratio, math.exp(log_alpha)))
        below = left_p[low] * math.exp(-log_alpha) if left_p[low] > 0 else 0.0
        beta, high = beta_of(left_q[low] - below)
        high = max(high, low)
        top = left_p[-1] - left_p[high]
        return left_kl[high] - left_kl[low] + left_p[low] * log_alpha + (
            top * math.log(beta) if top > 0 else 0.0
        ), beta

    breaks, keeps = min([0.0, *np.log(ratio[known])]) - 1.0, 0.0
    if kl_of(breaks)[0] <= budget:
        return -math.inf, math.log(kl_of(breaks)[1])
    for _ in range(200):
        middle = (keeps + breaks) / 2
        if kl_of(middle)[0] <= budget:
            keeps = middle
        else:
            breaks = middle
    return keeps, math.log(kl_of(keeps)[1])
