"""Samples for SV's table, by hand and at random."""

import numpy as np

from hf_lossy_assist.methods.sv.acceptance_table import Samples


def samples(s, a, x, reached=None, **others):
    n = len(s)
    nothing = np.zeros(n, dtype=np.int64)
    fields = {
        "s": np.asarray(s, dtype=np.float32), "a": np.asarray(a, dtype=np.float32), "x": np.asarray(x, dtype=np.float64),
        "similarity": np.zeros(n, dtype=np.float32), "slot": nothing, "text": nothing, "round": np.arange(n), "gamma": nothing,
        "reached": np.ones(n) if reached is None else np.asarray(reached, dtype=np.float64),
    }  # fmt: skip
    return Samples(**fields | others)


def random_samples(law, n=40_000, seed=0):
    """S and A uniform; X is 0 or 1, 1 with probability `law(s, a)`; reached by chance, whatever X is."""
    random = np.random.default_rng(seed)
    s, a = random.random((2, n), dtype=np.float32)
    return samples(s, a, random.random(n) < law(s, a), random.random(n))
