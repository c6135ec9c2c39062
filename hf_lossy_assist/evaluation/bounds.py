"""Upper bounds on what a lossy setting costs, from paired answers; exact, so right for every number of problems.

*Harm* is an answer that the target has right and the policy wrong. Its rate is never below the net loss of accuracy, which also counts what
the policy has right and the target wrong.
"""

from functools import cache

from ..validation import check_int, check_number


@cache
def harm_bound(harms: int, problems: int, delta: float) -> float:
    """Clopper and Pearson's upper bound (1934) on the rate of harm; the truth is above it with probability δ at most."""
    from scipy.stats import binomtest

    if problems == 0:
        return 1.0
    return float(binomtest(harms, problems, alternative="less").proportion_ci(1 - delta, method="exact").high)


@cache
def gain_bound(gains: int, problems: int, delta: float) -> float:
    """The lower bound of the same kind, on the rate of answers that the policy has right and the target wrong."""
    from scipy.stats import binomtest

    if problems == 0:
        return 0.0
    return float(binomtest(gains, problems, alternative="greater").proportion_ci(1 - delta, method="exact").low)


def net_bound(harms: int, gains: int, problems: int, delta: float) -> float:
    """An upper bound on the loss of accuracy, harm minus gain: one bound on each, δ/2 for either."""
    return harm_bound(harms, problems, delta / 2) - gain_bound(gains, problems, delta / 2)


def problems_needed(harms: int, max_loss: float, delta: float) -> int:
    """The fewest problems with which `harms` of them certify a harm rate of at most `max_loss`."""
    check_int("harms", harms, 0)
    check_number("max_loss", max_loss, 1e-9, 1.0)
    low, high = harms, max(harms, 1)
    while harm_bound(harms, high, delta) > max_loss:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if harm_bound(harms, middle, delta) <= max_loss else (middle, high)
    return high


def harms_allowed(problems: int, max_loss: float, delta: float) -> int:
    """The most harms among `problems` that still certify `max_loss`; −1 where not even none do."""
    low, high = -1, problems
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if harm_bound(middle, problems, delta) <= max_loss else (low, middle - 1)
    return low
