"""Shared by several tests."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

import hf_lossy_assist as hla
from hf_lossy_assist import SVIP, AcceptanceRule, Confidence, Constant, Heuristic, Strict
from support import formulas


GREEDY, SAMPLING = "greedy", "sampling"

BOTH = (GREEDY, SAMPLING)

INF = math.inf


@dataclass(frozen=True)
class Case:
    """One rule: its neutral setting, settings from strict to loose, and the formula of each of these (sampling, or greedy alone)."""

    neutral: AcceptanceRule | None
    ladder: tuple[AcceptanceRule, ...]
    formulas: tuple[Callable[..., Any], ...] = ()
    modes: tuple[str, ...] = BOTH
    above_strict: bool = True  # never accepts less than strict acceptance, whatever the coins
    monotone: bool = True  # a looser setting accepts a superset
    rare: bool = False  # a short text may have nothing that it accepts and strict acceptance does not
    # Greedy rounds of one row, in order: a rule, then for each round the target's logits (γ + 1, V), the drafted tokens, how many pass.
    by_hand: tuple[tuple[AcceptanceRule, tuple[tuple[list[list[float]], list[int], int], ...]], ...] = ()


CASES = {
    "strict": Case(Strict(), (Strict(),), (formulas.strict,)),
    "top_k": Case(
        hla.TopK(0), tuple(hla.TopK(k) for k in (0, 1, 2, 4)), tuple(formulas.top_k(k) for k in (0, 1, 2, 4))
    ),
    "relaxed_top_k": Case(
        hla.RelaxedTopK(1, 0.6),
        (hla.RelaxedTopK(1, 0.2), hla.RelaxedTopK(2, 0.2), hla.RelaxedTopK(4, 0.2), hla.RelaxedTopK(4, 0.6)),
        tuple(formulas.relaxed_top_k(*x) for x in ((1, 0.2), (2, 0.2), (4, 0.2), (4, 0.6))),
        (GREEDY,),
    ),
    "top_k_tolerance": Case(
        hla.TopKTolerance(),
        (hla.TopKTolerance(1, 1.0), hla.TopKTolerance(3, 0.5), hla.TopKTolerance(3, 2.0), hla.TopKTolerance(5, 2.0)),
        tuple(formulas.top_k_tolerance(*x) for x in ((1, 1.0), (3, 0.5), (3, 2.0), (5, 2.0))),
        (GREEDY,),
    ),
    "typical": Case(
        hla.Typical(1.0, INF),
        (hla.Typical(1.0, 1.0), hla.Typical(0.5, 1.0), hla.Typical(0.5, 0.6), hla.Typical(), hla.Typical(0.0)),
        tuple(formulas.typical(*x) for x in ((1.0, 1.0), (0.5, 1.0), (0.5, 0.6), (0.09, 0.3), (0.0, 0.3))),
    ),
    "entropy_verify": Case(
        hla.EntropyVerify(0.0, 1.0),
        (hla.EntropyVerify(0.0, 0.95), hla.EntropyVerify(), hla.EntropyVerify(2.0, 0.95), hla.EntropyVerify(2.0, 0.1)),
        tuple(formulas.entropy_verify(*x) for x in ((0.0, 0.95), (0.4, 0.95), (2.0, 0.95), (2.0, 0.1))),
        (SAMPLING,),
    ),
    "thresholds": Case(
        hla.Thresholds(),
        (hla.Thresholds(0.6), hla.Thresholds(0.6, 0.5), hla.Thresholds(0.2, 0.5), hla.Thresholds(0.2, 0.1)),
        tuple(formulas.thresholds(*x) for x in ((0.6, 1.0), (0.6, 0.5), (0.2, 0.5), (0.2, 0.1))),
        (SAMPLING,),
    ),
    "ensemble": Case(
        hla.Ensemble(1.0),
        tuple(hla.Ensemble(w) for w in (0.9, 0.5, 0.0)),
        tuple(formulas.ensemble(w) for w in (0.9, 0.5, 0.0)),
    ),
    "lenience": Case(
        hla.Lenience(1.0),
        tuple(hla.Lenience(x) for x in (0.8, 0.4, 0.05)),
        tuple(formulas.lenience(x) for x in (0.8, 0.4, 0.05)),
    ),
    "cascade": Case(
        hla.Cascade(-INF),
        tuple(hla.Cascade(a) for a in (-0.5, 0.0, 0.5, 1.0)),
        tuple(formulas.cascade(a, "opt") for a in (-0.5, 0.0, 0.5, 1.0)),
    ),
    "cascade chow": Case(
        hla.Cascade(-INF, "chow"),
        tuple(hla.Cascade(a, "chow") for a in (0.3, 0.5, 0.7, 0.9)),
        tuple(formulas.cascade(a, "chow") for a in (0.3, 0.5, 0.7, 0.9)),
    ),
    "cascade diff": Case(
        hla.Cascade(-INF, "diff"),
        tuple(hla.Cascade(a, "diff") for a in (-0.1, 0.0, 0.3)),
        tuple(formulas.cascade(a, "diff") for a in (-0.1, 0.0, 0.3)),
    ),
    "cascade token": Case(
        hla.Cascade(-INF, "token"),
        tuple(hla.Cascade(a, "token") for a in (0.0, 0.5, 0.95)),
        tuple(formulas.cascade(a, "token") for a in (0.0, 0.5, 0.95)),
        above_strict=False, monotone=False,
    ),
    "kl_judge": Case(
        hla.KLJudge(0.0),
        (hla.KLJudge(0.2, 0.5), hla.KLJudge(0.8, 0.5), hla.KLJudge(0.8), hla.KLJudge(INF, 1.0)),
        tuple(formulas.kl_judge(*x) for x in ((0.2, 0.5), (0.8, 0.5), (0.8, 0.9), (INF, 1.0))),
    ),
    "mars": Case(
        hla.MARS(1.0),
        (hla.MARS(0.9), hla.MARS(0.5), hla.MARS(0.0)),
        (formulas.strict,) * 3,  # of log-probabilities, none of which is above 0
        by_hand=(
            (hla.MARS(), (([[2.0, 1.9, 1.85], [0.0, 0.0, 1.0]], [1], 1), ([[2.0, 1.9, 1.85], [0.0, 0.0, 1.0]], [2], 0),
                          ([[2.0, 1.8, 0.0], [0.0, 0.0, 1.0]], [1], 0), ([[-1.0, -1.01, -9.0], [0.0, 0.0, 1.0]], [1], 0))),
            (hla.MARS(0.5), (([[2.0, 1.1, 1.0], [2.0, 0.9, 0.0], [1.0, 0.0, 0.0]], [1, 1], 1),)),
        ),
    ),
    "csd": Case(
        hla.CSD(1.0, 1, ((0, 1), (2, 1))),
        tuple(hla.CSD(r, 1, ((0, 1), (2, 1), (2, 0), (1, 2))) for r in (0.8, 0.4, 0.0)),
        tuple(formulas.csd(r, ((0, 1), (2, 1), (2, 0), (1, 2))) for r in (0.8, 0.4, 0.0)),
        rare=True,
        by_hand=(
            # rejected twice, then accepted, and only where the target finds it likely enough
            (hla.CSD(0.5), (([[1.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 0),) * 2 + (
                ([[1.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 1), ([[2.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 0),
                ([[0.9, 1.0, 0.0], [0.0, 0.0, 1.0]], [0], 0), ([[1.0, 0.9, 0.0]] * 3, [1, 1], 2))),
            # what was never looked at, behind the rejection, is no rejection
            (hla.CSD(0.5, 1), (([[1.0, 0.9, 0.0], [0.0, 0.9, 1.0], [1.0, 0.0, 0.0]], [2, 1], 0),
                               ([[0.0, 0.9, 1.0], [0.0, 0.0, 1.0]], [1], 0), ([[0.0, 0.9, 1.0], [0.0, 0.0, 1.0]], [1], 1))),
        ),
    ),
    "regret_budget": Case(
        hla.RegretBudget(0.0),
        (
            hla.RegretBudget(9.0, per_block=0), hla.RegretBudget(1.0, 0.2, 1), hla.RegretBudget(2.0, 0.5, 1),
            hla.RegretBudget(2.0, 0.5), hla.RegretBudget(4.0), hla.RegretBudget(INF),
        ),
        modes=(GREEDY,),
    ),
    "fly": Case(
        hla.FLy(1, INF),
        (hla.FLy(3, 0.9), hla.FLy(2, 0.9), hla.FLy(2, 0.3), hla.FLy(1, 0.3), hla.FLy(0, 0.0)),
    ),
    "synthetic_for_benchmarks": Case(
        hla.SyntheticForBenchmarks(),
        tuple(hla.SyntheticForBenchmarks(x) for x in (0.0, 0.3, 0.8, 1.0)),
        tuple(formulas.synthetic(x) for x in (0.0, 0.3, 0.8, 1.0)),
        above_strict=False,
    ),
    "block_verification": Case(None, (hla.BlockVerification(),), above_strict=False),
    "limited": Case(
        hla.Limited(hla.TopK(4), per_request=0),
        (
            hla.Limited(hla.TopK(4), max_top1=0.3, never=(0, 1)), hla.Limited(hla.TopK(4), max_top1=0.5, never=(0, 1)),
            hla.Limited(hla.TopK(4), max_top1=0.5, never=(1,)), hla.Limited(hla.TopK(4)),
        ),
        (
            formulas.limited(formulas.top_k(4), (0, 1), 0.3), formulas.limited(formulas.top_k(4), (0, 1), 0.5),
            formulas.limited(formulas.top_k(4), (1,), 0.5), formulas.top_k(4),
        ),
    ),
    "limited overshoot": Case(
        hla.Limited(hla.TopK(4), max_overshoot=1.0),
        tuple(hla.Limited(hla.TopK(4), max_overshoot=most) for most in (1.0, 1.5, 4.0, INF)),
        tuple(formulas.limited(formulas.top_k(4), max_overshoot=most) for most in (1.0, 1.5, 4.0, INF)),
    ),
    "limited ensemble": Case(  # whose correction is its own where it is allowed, and strict acceptance's elsewhere
        hla.Limited(hla.Ensemble(0.5), per_100=0),
        (hla.Limited(hla.Ensemble(0.5), max_top1=0.5), hla.Limited(hla.Ensemble(0.5), never=())),
        (formulas.limited(formulas.ensemble(0.5), (), 0.5), formulas.ensemble(0.5)),
        (SAMPLING,),
    ),
    "union": Case(
        hla.Union((hla.TopK(0), hla.Typical(1.0, INF))),
        (
            hla.Union((hla.TopK(0),)), hla.Union((hla.TopK(0), hla.Typical())),
            hla.Union((hla.TopK(2), hla.Typical())), hla.Union((hla.TopK(2), hla.Typical(), hla.Lenience(0.1))),
        ),
        (
            formulas.strict, formulas.union(formulas.strict, formulas.typical(0.09, 0.3)),
            formulas.union(formulas.top_k(2), formulas.typical(0.09, 0.3)),
            formulas.union(formulas.top_k(2), formulas.typical(0.09, 0.3), formulas.lenience(0.1)),
        ),
    ),
    "union ensemble": Case(
        hla.Union((hla.Ensemble(1.0), hla.Lenience(1.0))),
        (hla.Union((hla.Ensemble(0.5), hla.Lenience(0.5))), hla.Union((hla.Ensemble(0.5), hla.Lenience(0.3)))),
        (
            formulas.union(formulas.ensemble(0.5), formulas.lenience(0.5)),
            formulas.union(formulas.ensemble(0.5), formulas.lenience(0.3)),
        ),
        (SAMPLING,),
    ),
}  # fmt: skip


lengths = st.integers(1, 10_000)

amounts = st.floats(0, 1e6) | st.integers(0, 50) | st.just(math.inf)

stops = st.one_of(
    st.builds(Constant, lengths),
    lengths.flatmap(lambda n: st.builds(Heuristic, st.just(n), st.integers(n, 20_000))),
    st.builds(Confidence, st.floats(0, 1), lengths),
    st.builds(SVIP, amounts, amounts, st.sampled_from(["bound", "entropy"]), lengths),
)


@dataclass(frozen=True)
class Unregistered(AcceptanceRule):
    """A lossy rule of a user's own, in no dict of this package."""

    lossless: ClassVar[bool] = False

    def probability(self, block):
        return torch.ones(block.tokens.shape)
