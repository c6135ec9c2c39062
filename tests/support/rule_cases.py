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


def ladder_of(neutral, make, formula, *settings, **more) -> Case:
    """The case of a rule that `make` makes and `formula` describes, each of the same settings."""
    rules, laws = (tuple(f(*x) if isinstance(x, tuple) else f(x) for x in settings) for f in (make, formula))
    return Case(neutral, rules, laws, **more)


CASES = {
    "strict": Case(Strict(), (Strict(),), (formulas.strict,)),
    "top_k": ladder_of(hla.TopK(0), hla.TopK, formulas.top_k, 0, 1, 2, 4),
    "relaxed_top_k": ladder_of(
        hla.RelaxedTopK(1, 0.6), hla.RelaxedTopK, formulas.relaxed_top_k, (1, 0.2), (2, 0.2), (4, 0.2), (4, 0.6), modes=(GREEDY,),
    ),
    "top_k_tolerance": ladder_of(
        hla.TopKTolerance(), hla.TopKTolerance, formulas.top_k_tolerance, (1, 1.0), (3, 0.5), (3, 2.0), (5, 2.0), modes=(GREEDY,),
    ),
    "typical": ladder_of(
        hla.Typical(1.0, INF), hla.Typical, formulas.typical, (1.0, 1.0), (0.5, 1.0), (0.5, 0.6), (0.09, 0.3), (0.0, 0.3),
    ),
    "entropy_verify": ladder_of(
        hla.EntropyVerify(0.0, 1.0), hla.EntropyVerify, formulas.entropy_verify, (0.0, 0.95), (0.4, 0.95), (2.0, 0.95), (2.0, 0.1),
        modes=(SAMPLING,),
    ),
    "thresholds": ladder_of(
        hla.Thresholds(), hla.Thresholds, formulas.thresholds, (0.6, 1.0), (0.6, 0.5), (0.2, 0.5), (0.2, 0.1), modes=(SAMPLING,),
    ),
    "lenience": ladder_of(hla.Lenience(1.0), hla.Lenience, formulas.lenience, 0.8, 0.4, 0.05),
    "block_verification": Case(None, (hla.BlockVerification(),), above_strict=False),
    "limited": Case(
        hla.Limited(hla.TopK(4), per_request=0),
        (hla.Limited(hla.TopK(4), never=(0, 1)), hla.Limited(hla.TopK(4), never=(1,)), hla.Limited(hla.TopK(4))),
        (formulas.limited(formulas.top_k(4), (0, 1)), formulas.limited(formulas.top_k(4), (1,)), formulas.top_k(4)),
    ),
    "limited overshoot": ladder_of(
        hla.Limited(hla.TopK(4), max_overshoot=1.0), lambda most: hla.Limited(hla.TopK(4), max_overshoot=most),
        lambda most: formulas.limited(formulas.top_k(4), max_overshoot=most), 1.0, 1.5, 4.0, INF,
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
