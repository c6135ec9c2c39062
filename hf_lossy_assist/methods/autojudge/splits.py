"""Which problems a judge is fitted to, and which it is judged on: one split, or folds."""

from collections.abc import Sequence

import numpy as np

from ...training.head_quality import FEWEST


HELD_OUT = 0.1  # of the problems, without folds
FEWEST_PROBLEMS = 8
FOLDS = 5  # where one split holds out too few tokens of a label

Parts = Sequence[tuple[np.ndarray, np.ndarray]]  # (training, held out), each (N,) bool


def split(
    problem: np.ndarray, folds: int, seed: int, important: np.ndarray | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(training, held out) (N,) bool masks that share no problem: one pair, or one of each fold.

    `important` (N,) bool: the folds then share out alike the problems that have an important token and those that have none.
    """
    names = np.unique(problem)
    if len(names) < max(FEWEST_PROBLEMS, folds):
        raise ValueError(
            f"the dataset has mismatches in {len(names)} problems; at least {max(FEWEST_PROBLEMS, folds)} are needed to split "
            "by problem: mine more"
        )
    shuffled = np.random.default_rng(seed).permutation(names)
    if folds and important is not None:
        without = ~np.isin(shuffled, problem[important])
        shuffled = shuffled[np.argsort(without, kind="stable")]
    groups = [shuffled[k::folds] for k in range(folds)] or [shuffled[: max(1, round(HELD_OUT * len(names)))]]
    held = [np.isin(problem, group) for group in groups]
    return [(~mask, mask) for mask in held]


def folds_for(problem: np.ndarray, important: np.ndarray, seed: int) -> int:
    """0 where one split holds out `FEWEST` tokens of each label, else `FOLDS`, or as many as there are problems with each label."""
    if len(np.unique(problem)) < FEWEST_PROBLEMS:
        return 0  # `split` says so
    [(_, held)] = split(problem, 0, seed)
    if min(important[held].sum(), (~important[held]).sum()) >= FEWEST:
        return 0
    folds = min(FOLDS, *(len(np.unique(problem[mask])) for mask in (important, ~important)))
    return folds if folds > 1 else 0
