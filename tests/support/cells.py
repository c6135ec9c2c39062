"""Shared by several tests."""

import numpy as np
import torch

from hf_lossy_assist.artifacts.profile_tables import Bins


def laws(random, *shape):
    return torch.from_numpy(random.dirichlet(np.ones(shape[-1]), size=shape[:-1]))


def bins(random, rows=3, columns=4):
    accept = np.sort(random.random((rows, columns)), axis=1)
    return Bins(
        np.sort(random.random(rows - 1)), np.sort(random.random((rows, columns - 1)), axis=1), accept, accept.mean(axis=1),
        np.ones((rows, columns), dtype=np.int64),
    )  # fmt: skip


def distance(out, p):
    """How far the first two committed tokens are from the target's laws, at most; the laws do not depend on the prefix here."""
    size = p.shape[-1]
    first, second = np.zeros(size), np.zeros((size, size))
    for tokens, chance in out.items():
        first[tokens[0]] += chance
        if len(tokens) > 1:
            second[tokens[0], tokens[1]] += chance
    worst = np.abs(first - p[0].numpy()).max()
    for x in range(size):
        if second[x].sum() > 1e-9:
            worst = max(worst, np.abs(second[x] / second[x].sum() - p[1].numpy()).max())
    return worst
