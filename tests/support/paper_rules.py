"""The lossy rules of examples/reproduce, as a user's classes: registered only within `registered()`, so that no other test sees their names."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hf_lossy_assist as hla
from hf_lossy_assist.registry import list_entries, register
from support import formulas
from support.rule_cases import GREEDY, INF, SAMPLING, Case, ladder_of


sys.path.append(str(Path(__file__).parents[2] / "examples" / "reproduce"))
from lossy_rules import MARS, Cascade, Ensemble, FLy, KLJudge, SyntheticForBenchmarks, find_kl
from stateful_rules import CSD, RegretBudget


__all__ = [
    "CASES", "CSD", "ENTRIES", "MARS", "Cascade", "Ensemble", "FLy", "KLJudge", "RegretBudget", "SyntheticForBenchmarks", "find_kl", "registered",
]  # fmt: skip

ENTRIES = [entry for entry in list_entries("rule") if entry.make.__module__ in ("lossy_rules", "stateful_rules")]
for _entry in ENTRIES:
    hla.forget("rule", _entry.name)


@contextmanager
def registered() -> Iterator[None]:
    """Register the rules' names."""
    for entry in ENTRIES:
        register(entry)
    try:
        yield
    finally:
        for entry in ENTRIES:
            hla.forget("rule", entry.name)


def cascade(form, *alphas, **more):
    made = (lambda alpha: Cascade(alpha, form)), (lambda alpha: formulas.cascade(alpha, form))
    return ladder_of(Cascade(-INF, form), *made, *alphas, **more)


CASES = {
    "ensemble": ladder_of(Ensemble(1.0), Ensemble, formulas.ensemble, 0.9, 0.5, 0.0),
    "cascade": ladder_of(Cascade(-INF), Cascade, lambda a: formulas.cascade(a, "opt"), -0.5, 0.0, 0.5, 1.0),
    "cascade chow": cascade("chow", 0.3, 0.5, 0.7, 0.9),
    "cascade diff": cascade("diff", -0.1, 0.0, 0.3),
    "cascade token": cascade("token", 0.0, 0.5, 0.95, above_strict=False, monotone=False),
    "kl_judge": Case(
        KLJudge(0.0),
        (KLJudge(0.2, 0.5), KLJudge(0.8, 0.5), KLJudge(0.8), KLJudge(INF, 1.0)),
        tuple(formulas.kl_judge(*x) for x in ((0.2, 0.5), (0.8, 0.5), (0.8, 0.9), (INF, 1.0))),
    ),
    "mars": Case(
        MARS(1.0),
        (MARS(0.9), MARS(0.5), MARS(0.0)),
        (formulas.strict,) * 3,  # of log-probabilities, none of which is above 0
        by_hand=(
            (MARS(), (([[2.0, 1.9, 1.85], [0.0, 0.0, 1.0]], [1], 1), ([[2.0, 1.9, 1.85], [0.0, 0.0, 1.0]], [2], 0),
                          ([[2.0, 1.8, 0.0], [0.0, 0.0, 1.0]], [1], 0), ([[-1.0, -1.01, -9.0], [0.0, 0.0, 1.0]], [1], 0))),
            (MARS(0.5), (([[2.0, 1.1, 1.0], [2.0, 0.9, 0.0], [1.0, 0.0, 0.0]], [1, 1], 1),)),
        ),
    ),
    "csd": Case(
        CSD(1.0, 1, ((0, 1), (2, 1))),
        tuple(CSD(r, 1, ((0, 1), (2, 1), (2, 0), (1, 2))) for r in (0.8, 0.4, 0.0)),
        tuple(formulas.csd(r, ((0, 1), (2, 1), (2, 0), (1, 2))) for r in (0.8, 0.4, 0.0)),
        rare=True,
        by_hand=(
            # rejected twice, then accepted, and only where the target finds it likely enough
            (CSD(0.5), (([[1.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 0),) * 2 + (
                ([[1.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 1), ([[2.0, 0.9, 0.0], [0.0, 0.0, 1.0]], [1], 0),
                ([[0.9, 1.0, 0.0], [0.0, 0.0, 1.0]], [0], 0), ([[1.0, 0.9, 0.0]] * 3, [1, 1], 2))),
            # what was never looked at, behind the rejection, is no rejection
            (CSD(0.5, 1), (([[1.0, 0.9, 0.0], [0.0, 0.9, 1.0], [1.0, 0.0, 0.0]], [2, 1], 0),
                               ([[0.0, 0.9, 1.0], [0.0, 0.0, 1.0]], [1], 0), ([[0.0, 0.9, 1.0], [0.0, 0.0, 1.0]], [1], 1))),
        ),
    ),
    "regret_budget": Case(
        RegretBudget(0.0),
        (
            RegretBudget(9.0, per_block=0), RegretBudget(1.0, 0.2, 1), RegretBudget(2.0, 0.5, 1),
            RegretBudget(2.0, 0.5), RegretBudget(4.0), RegretBudget(INF),
        ),
        modes=(GREEDY,),
    ),
    "fly": Case(FLy(1, INF), (FLy(3, 0.9), FLy(2, 0.9), FLy(2, 0.3), FLy(1, 0.3), FLy(0, 0.0))),
    "synthetic_for_benchmarks": ladder_of(
        SyntheticForBenchmarks(), SyntheticForBenchmarks, formulas.synthetic, 0.0, 0.3, 0.8, 1.0, above_strict=False,
    ),
    "limited ensemble": Case(  # whose correction is its own where it is allowed, and strict acceptance's elsewhere
        hla.Limited(Ensemble(0.5), per_request=0),
        (hla.Limited(Ensemble(0.5), never=(0, 1)), hla.Limited(Ensemble(0.5), never=())),
        (formulas.limited(formulas.ensemble(0.5), (0, 1)), formulas.ensemble(0.5)),
        (SAMPLING,),
    ),
    "union ensemble": Case(
        hla.Union((Ensemble(1.0), hla.Lenience(1.0))),
        (hla.Union((Ensemble(0.5), hla.Lenience(0.5))), hla.Union((Ensemble(0.5), hla.Lenience(0.3)))),
        tuple(formulas.union(formulas.ensemble(0.5), formulas.lenience(x)) for x in (0.5, 0.3)),
        (SAMPLING,),
    ),
}  # fmt: skip
