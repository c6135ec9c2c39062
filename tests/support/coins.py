"""What a round ends with, exactly: every draft and every region of coins, through the package's own `prefix` and `next_distribution`."""

import itertools
from collections import defaultdict

import torch

from hf_lossy_assist.rules import Strict
from hf_lossy_assist.rules.acceptance import next_distribution, prefix
from support.blocks import sampling_block, started
from support.distributions import Tables, V


def blocks(tables: Tables, gamma: int, certain: bool):
    """All drafts (n, γ) with their weights, p (n, γ + 1, V) and q (n, γ, V), float64."""
    drafts = torch.tensor(list(itertools.product(range(V), repeat=gamma)))
    prefixes = [tuple(x) for x in drafts.tolist()]
    q = torch.stack([torch.stack([tables.q[x[:i]] for i in range(gamma)]) for x in prefixes])
    p = torch.stack([torch.stack([tables.p[x[:i]] for i in range(gamma + 1)]) for x in prefixes])
    weights = q.gather(-1, drafts[..., None]).squeeze(-1).prod(dim=1)
    return drafts, weights, p, torch.nn.functional.one_hot(drafts, V).double() if certain else q


def outcomes(rule, tables: Tables, gamma: int, edges, certain: bool = False) -> dict[tuple, float]:
    """The probability of every way in which a round can end: the tokens it commits, as a tuple.

    `edges(block)`: for each place the values, (n, γ, k), where a coin may change the decision.
    """
    drafts, weights, p, q = blocks(tables, gamma, certain)
    possible = weights > 0
    drafts, weights, p, q = drafts[possible], weights[possible], p[possible], q[possible]
    block = sampling_block(p, None if certain else q, drafts)
    at = torch.cat([edges(block), Strict().probability(block)[..., None]], dim=-1).clamp(0, 1)
    ends = torch.nn.functional.pad(at.sort(dim=-1).values, (1, 0))
    ends = torch.nn.functional.pad(ends, (0, 1), value=1.0)  # (n, γ, k + 3)
    middles, widths = (ends[..., 1:] + ends[..., :-1]) / 2, ends.diff(dim=-1)

    out: dict[tuple, float] = defaultdict(float)
    for regions in itertools.product(range(widths.shape[-1]), repeat=gamma):
        weight = weights * torch.stack([widths[:, i, k] for i, k in enumerate(regions)]).prod(dim=0)
        some = weight > 0
        if not some.any():
            continue
        block = sampling_block(p[some], None if certain else q[some], drafts[some])
        coins = torch.stack([middles[some, i, k] for i, k in enumerate(regions)], dim=1)
        run = started(rule, block)
        accepted = prefix(run, block, coins)[0].sum(dim=1)
        law = next_distribution(run, block, coins, accepted)
        law = law / law.sum(dim=1, keepdim=True)
        rows = zip(drafts[some].tolist(), accepted.tolist(), weight[some].tolist(), law.tolist(), strict=True)
        for draft, n, share, after in rows:
            for token, chance in enumerate(after):
                if chance > 0:
                    out[(*draft[:n], token)] += share * chance
    return out


def expected(formula, tables: Tables, gamma: int, certain: bool = False) -> dict[tuple, float]:
    """The same from a and r of `formula(p, q)`, token by token."""
    drafts, weights, p, q = blocks(tables, gamma, certain)
    out: dict[tuple, float] = defaultdict(float)
    for draft, weight, ps, qs in zip(drafts.tolist(), weights.tolist(), p.numpy(), q.numpy(), strict=True):
        alive = weight
        for i, x in enumerate(draft):
            if alive == 0:
                break
            a, r = formula(ps[i], qs[i])
            for token, chance in enumerate(r):
                out[(*draft[:i], token)] += alive * (1 - a[x]) * chance
            alive *= a[x]
        else:
            for token, chance in enumerate(ps[gamma]):
                out[(*draft, token)] += alive * chance
    return out


def distance(one: dict[tuple, float], other: dict[tuple, float]) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def first_tokens(out: dict[tuple, float], tables: Tables, count: int) -> torch.Tensor:
    """The law of the first `count` tokens, (V,) · count, where a shorter round is followed by the target itself."""
    law = torch.zeros((V,) * count, dtype=torch.float64)
    for tokens, chance in out.items():
        for more in itertools.product(range(V), repeat=max(0, count - len(tokens))):
            text, share = (*tokens, *more), chance
            for i in range(len(tokens), count):
                share *= float(tables.p[text[:i]][text[i]])
            law[text[:count]] += share
    return law
