"""Held-out texts as SPRINTER's rounds: what a threshold would have sent to the target, and what it would have given away."""

from dataclasses import dataclass

import numpy as np
import torch

from ...training.dataset import acceptable


@dataclass
class Replay:
    """Rounds that a threshold would give on held-out texts."""

    tokens: int
    calls: int
    drafted: int
    unchecked: int
    distance: float  # sum of d_TV over the unchecked tokens
    texts: int = 1


def replay(
    v: np.ndarray, accept: np.ndarray, distance: np.ndarray, threshold: float, max_draft: int, new_tokens: int
) -> Replay:
    """One text of N positions through SPRINTER's rounds.

    v (N,): the verifier's word on the token proposed at each position; accept (N,) bool: whether the target's strict test would
    pass it; distance (N,): d_TV(p, q) there. V does not depend on the proposed token, so an unchecked token's distribution is q, and its
    distance from p exactly d_TV.
    """
    n = min(len(v), new_tokens)
    out = Replay(0, 0, 0, 0, 0.0)
    at = 0
    while at < n:
        room = min(max_draft, n - at - 1)  # one place is the target's own
        stop = next((i for i in range(room) if v[at + i] < threshold), room - 1)
        drafted = stop + 1 if room > 0 else 0
        seen = at + drafted - 1
        out.unchecked += max(drafted - 1, 0)
        out.distance += float(distance[at : at + max(drafted - 1, 0)].sum())
        out.drafted += drafted
        out.calls += 1
        at += drafted + (1 if drafted == 0 or accept[seen] else 0)
    out.tokens = n
    return out


def replay_all(
    data: dict[str, torch.Tensor], kind: int, threshold: float, max_draft: int, new_tokens: int, seed: int = 0
) -> Replay:
    """`replay` of every held-out text of one kind, added up. The strict test's coins are drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.rand(len(data["p"]), dtype=torch.float32, generator=generator)
    accept = (coins < data["p"] / data["q"]).numpy()
    v, distance, rows = data["v"].numpy(), data["distance"].numpy(), data["row"].numpy()
    total = Replay(0, 0, 0, 0, 0.0, texts=0)
    for row in np.unique(rows[data["kind"].numpy() == kind]):
        mine = rows == row
        one = replay(v[mine], accept[mine], distance[mine], threshold, max_draft, new_tokens)
        for name in vars(total):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    return total


def run_lengths(data: dict[str, torch.Tensor], kind: int, lam: float) -> dict[int, int]:
    """How long acceptable tokens follow each other, from a text's start or behind an unacceptable one: length → count."""
    fits = acceptable(data["p"], data["q"], lam)
    counts: dict[int, int] = {}
    for row in data["row"][data["kind"] == kind].unique():
        run = 0
        for ok in fits[data["row"] == row].tolist():
            if ok:
                run += 1
            else:
                counts[run] = counts.get(run, 0) + 1
                run = 0
        counts[run] = counts.get(run, 0) + 1
    return dict(sorted(counts.items()))
