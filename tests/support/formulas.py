"""The published formulas of the rules, once more: in plain NumPy and loops, one place at a time, for tests to compare with.

Each takes the target's law p and the draft's q, (V,) float64 each, and gives a and r over the vocabulary. Where a drafted token
was certain, q is 1 on it.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import torch

from hf_lossy_assist.rules import Strict
from hf_lossy_assist.rules.acceptance import next_distribution, prefix
from support.blocks import sampling_block, started
from support.distributions import Tables, V


def strict(p, q):
    with np.errstate(divide="ignore", invalid="ignore"):
        a = np.where(q > 0, np.minimum(1.0, p / q), 1.0)
    return a, rest(p - q, p)


def rest(difference, p):
    """norm((…)⁺), or p where that is nothing: then nothing can be rejected."""
    positive = np.maximum(difference, 0.0)
    return positive / positive.sum() if positive.sum() > 1e-14 else p


def entropy(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def divergence(p, q):
    return sum(x * (math.log(x / y) if y > 0 else math.inf) for x, y in zip(p, q, strict=True) if x > 0)


def surely(accepts):
    """1 where `kept(p, q)` says so, else strict acceptance."""

    def formula(p, q):
        a, r = strict(p, q)
        return np.where(accepts(p, q), 1.0, a), r

    return formula


def top_k(k):
    def accepts(p, q):
        order = sorted(range(len(p)), key=lambda x: (-p[x], x))
        return np.array([order.index(x) < k for x in range(len(p))])

    return surely(accepts)


def relaxed_top_k(k, delta):
    best = top_k(k)
    return lambda p, q: (np.where((best(p, p * 0 + 9)[0] == 1) & (p >= p.max() - delta), 1.0, p == p.max()), None)


def top_k_tolerance(k, tolerance):
    best = top_k(k)

    def formula(p, q):
        gap = np.array([math.log(p.max() / x) if x > 0 else math.inf for x in p])
        return np.where((best(p, p * 0 + 9)[0] == 1) & (gap <= tolerance), 1.0, p == p.max()), None

    return formula


def typical(epsilon, delta):
    return surely(lambda p, q: p > min(epsilon, delta * math.exp(-entropy(p))))


def entropy_verify(alpha, threshold):
    def formula(p, q):
        t = min(threshold, math.exp(-alpha * entropy(p)))
        return strict(p, t * q)[0], strict(p, q)[1]

    return formula


def csd(ratio, known):
    def accepts(p, q):
        y = int(p.argmax())
        return np.array([(y, x) in known and p[x] > ratio * p[y] for x in range(len(p))])

    return surely(accepts)


def thresholds(single, accumulated):
    def formula(p, q):
        a, r = strict(p, q)
        chance = np.minimum(1.0, p / accumulated)
        return np.where((p >= single) & (p > 0), 1.0, np.maximum(a, chance)), r

    return formula


def lenience(factor):
    return lambda p, q: (strict(p, factor * q)[0], strict(p, q)[1])


def ensemble(w):
    def formula(p, q):
        a, _ = strict(w * p + (1 - w) * q, q)
        return a, strict(p, q)[1]

    return formula


def cascade(alpha, form):
    def law(p, q):
        distance = np.abs(p - q).sum() / 2
        bar = {"opt": p.max() - alpha * distance, "chow": 1 - alpha, "diff": p.max() - alpha}
        if form != "token":
            return q if q.max() >= bar[form] else p
        inside = p >= (1 - alpha) * p.max()
        return q * inside + q[~inside].sum() * p

    return lambda p, q: strict(law(p, q), q)


def kl_judge(threshold, confident):
    return surely(lambda p, q: np.full(len(p), divergence(p, q) < threshold and p.max() <= confident))


def synthetic(rate):
    return lambda p, q: (np.full(len(p), rate), p)


def union(*formulas):
    return lambda p, q: (np.max([f(p, q)[0] for f in formulas], axis=0), formulas[0](p, q)[1])


def limited(formula, never=(), max_overshoot=math.inf):
    def both(p, q):
        (a, r), (s, _) = formula(p, q), strict(p, q)
        banned = [x in never or q[x] / max_overshoot > p[x] for x in range(len(p))]
        a = np.where(banned, s, a)
        return a, r

    return both


def blocks(tables: Tables, gamma: int, certain: bool, before: tuple = ()):
    """All drafts (n, γ) behind `before` with their weights, p (n, γ + 1, V) and q (n, γ, V), float64."""
    drafts = torch.tensor(list(itertools.product(range(V), repeat=gamma)))
    prefixes, start = [(*before, *x) for x in drafts.tolist()], len(before)
    q = torch.stack([torch.stack([tables.q[x[: start + i]] for i in range(gamma)]) for x in prefixes])
    p = torch.stack([torch.stack([tables.p[x[: start + i]] for i in range(gamma + 1)]) for x in prefixes])
    weights = q.gather(-1, drafts[..., None]).squeeze(-1).prod(dim=1)
    return drafts, weights, p, torch.nn.functional.one_hot(drafts, V).double() if certain else q


def outcomes(rule, tables: Tables, gamma: int, edges=None, certain=False, before: tuple = ()) -> dict[tuple, float]:
    """The probability of every way in which a round behind `before` can end: the tokens it commits, as a tuple.

    `edges(block)`: for each place the values, (n, γ, k), where a coin may change the decision beside that of the rule's probability.
    """
    drafts, weights, p, q = blocks(tables, gamma, certain, before)
    possible = weights > 0
    drafts, weights, p, q = drafts[possible], weights[possible], p[possible], q[possible]
    block = sampling_block(p, None if certain else q, drafts)
    # Or a wrong a(x) with the formula's decisions passes.
    at = torch.stack([Strict().probability(block), rule.probability(block)], dim=-1)
    at = (at if edges is None else torch.cat([edges(block), at], dim=-1)).nan_to_num().clamp(0, 1)
    ends = torch.nn.functional.pad(at.sort(dim=-1).values, (1, 0))
    ends = torch.nn.functional.pad(ends, (0, 1), value=1.0)  # (n, γ, k + 4)
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


def first_two(rule, tables: Tables, gamma: int, certain: bool = False) -> torch.Tensor:
    """The law (V, V) of the first two tokens, where a round of one token is followed by another round of the rule."""
    law = torch.zeros(V, V, dtype=torch.float64)
    for tokens, chance in outcomes(rule, tables, gamma, None, certain).items():
        if len(tokens) > 1:
            law[tokens[:2]] += chance
            continue
        for after, share in outcomes(rule, tables, gamma, None, certain, tokens).items():
            law[tokens[0], after[0]] += chance * share
    return law
