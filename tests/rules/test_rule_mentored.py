"""Mentored decoding keeps its budget and rejects as little as a generic convex solver can, on random laws with and without holes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from support.formulas import divergence

import hf_lossy_assist as hla
from hf_lossy_assist.rules.mentored import split


pytestmark = pytest.mark.slow


def laws(seed: int, size: int, holes: float) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    out = []
    for _ in range(2):
        law = random.dirichlet(np.ones(size)) * (random.random(size) >= holes)
        law[random.integers(size)] += 0.05
        out.append(law / law.sum())
    return out[0], out[1]


def output(p: np.ndarray, q: np.ndarray, budget: float) -> tuple[np.ndarray, float]:
    """The law that the rule emits, and how often it rejects."""
    tp, tq = torch.from_numpy(p), torch.from_numpy(q)
    rule = hla.Mentored(budget)
    law = rule.output_distribution(tp.log(), tq).numpy()
    a = (np.minimum(law, q) / np.where(q > 0, q, 1)) * (q > 0)
    return law, float(1 - (q * a).sum())


def solved(p: np.ndarray, q: np.ndarray, budget: float) -> float:
    """The least rejection by SLSQP: minimise Σ s, s ≥ q − π, s ≥ 0, over laws π with KL(p‖π) ≤ D and π = 0 where p = 0."""
    some = p > 0
    p_, q_, lost = p[some], q[some], q[~some].sum()
    n = len(p_)
    constraints = [
        {"type": "eq", "fun": lambda z: z[:n].sum() - 1},
        {"type": "ineq", "fun": lambda z: budget - (p_ * np.log(p_ / z[:n])).sum()},
        {"type": "ineq", "fun": lambda z: z[n:] - (q_ - z[:n])},
    ]
    best = math.inf
    for start in (p_, np.maximum((p_ + q_ / max(q_.sum(), 1e-9)) / 2, 1e-6)):
        found = minimize(
            lambda z: z[n:].sum(), np.concatenate([start, np.maximum(q_ - start, 0)]), method="SLSQP",
            bounds=[(1e-9, 1)] * n + [(0, 1)] * n, constraints=constraints, options={"maxiter": 500, "ftol": 1e-12},
        )  # fmt: skip
        fits = all(c["fun"](found.x).min() > -1e-7 if c["type"] == "ineq" else True for c in constraints)
        if fits and abs(found.x[:n].sum() - 1) < 1e-7:
            best = min(best, found.fun)
    return best + lost


@pytest.mark.parametrize("holes", [0.0, 0.3])
@pytest.mark.parametrize("budget", [0.001, 0.05, 0.2, 1.0])
def test_within_the_budget_and_minimal(budget, holes):
    below_strict, compared = 0, 0
    for seed in range(25):
        p, q = laws(seed, 3 + seed % 6, holes)
        law, rejected = output(p, q, budget)
        assert law.sum() == pytest.approx(1, abs=1e-12) and law.min() >= 0
        assert divergence(p, law) <= budget + 1e-9
        assert rejected <= np.maximum(q - p, 0).sum() + 1e-12, "no more than strict acceptance"
        below_strict += rejected < np.maximum(q - p, 0).sum() - 1e-3
        least = solved(p, q, budget)
        if math.isfinite(least):
            compared += 1
            assert rejected <= least + 1e-6, (seed, "the solver rejects less")
    assert compared >= 20 and below_strict > 5


def test_the_solver_finds_the_same_minimum():
    """Not only no better one: where it converges, its value is ours."""
    same = 0
    for seed in range(20):
        p, q = laws(seed, 5, 0.0)
        if abs(output(p, q, 0.05)[1] - solved(p, q, 0.05)) < 1e-5:
            same += 1
    assert same >= 18


@settings(max_examples=50)
@given(st.integers(0, 2**31), st.floats(1e-4, 2), st.integers(2, 300))
def test_a_larger_budget_rejects_less(seed, budget, size):
    p, q = laws(seed, size, 0.2)
    small, large = split(*map(torch.from_numpy, (p, q)), budget), split(*map(torch.from_numpy, (p, q)), 2 * budget)
    assert large.alpha <= small.alpha <= 1 <= small.beta * (1 + 1e-12)
    law, _ = output(p, q, budget)
    assert divergence(p, law) <= budget + 1e-9


def test_what_p_rules_out_is_never_accepted():
    """Whatever the budget: a processor may have forbidden it."""
    p, q = torch.tensor([0.6, 0.4, 0.0]), torch.tensor([0.5, 0.3, 0.2])
    law = hla.Mentored(math.inf).output_distribution(p.log(), q)
    assert law[2] == 0 and law[:2].sum() == pytest.approx(1)
    assert (law[:2] >= q[:2]).all()


def test_close_laws_are_accepted_whole():
    p, q = torch.tensor([0.6, 0.4]), torch.tensor([0.58, 0.42])
    torch.testing.assert_close(hla.Mentored(0.1).output_distribution(p.log(), q), q)


def test_in_float32_over_a_large_vocabulary():
    """As in decoding: 50 000 tokens, laws with long tails."""
    torch.manual_seed(0)
    p, q = (torch.randn(3, 50_000) * 3).softmax(-1), (torch.randn(3, 50_000) * 3).softmax(-1)
    q = (p + q) / 2
    for budget in (0.01, 0.1):
        law = hla.Mentored(budget).output_distribution(p.log(), q).double()
        torch.testing.assert_close(law.sum(-1), torch.ones(3, dtype=torch.float64), atol=1e-4, rtol=0)
        kl = (p.double() * (p.double() / law).log()).sum(-1)
        assert (kl <= budget + 1e-4).all() and (kl > budget * 0.98).all()
