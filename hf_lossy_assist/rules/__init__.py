"""Acceptance rules: which drafted tokens to keep, and from what to draw the token after them.

`base` says what a rule answers, `deciding` how a round ends; every other file holds rules of one kind.
"""

from .base import AcceptanceRule, Strict, draw
from .deciding import decide
from .divergences import KLJudge
from .joint import BlockVerification, FLy, SyntheticForBenchmarks
from .learned import AllButLast, Judge
from .limits import Limited
from .mentored import Mentored
from .mixtures import Cascade, Ensemble
from .nesting import Union
from .pointwise import Laws, OwnRule, Pointwise
from .ranked import RelaxedTopK, TopK, TopKTolerance
from .regret import RegretBudget
from .thresholds import EntropyVerify, Lenience, Thresholds, Typical


__all__ = [
    "RULES",
    "AcceptanceRule",
    "AllButLast",
    "BlockVerification",
    "Cascade",
    "Ensemble",
    "EntropyVerify",
    "FLy",
    "Judge",
    "KLJudge",
    "Laws",
    "Lenience",
    "Limited",
    "Mentored",
    "OwnRule",
    "Pointwise",
    "RegretBudget",
    "RelaxedTopK",
    "Strict",
    "SyntheticForBenchmarks",
    "Thresholds",
    "TopK",
    "TopKTolerance",
    "Typical",
    "Union",
    "decide",
    "draw",
]

RULES: dict[str, type[AcceptanceRule]] = {
    "strict": Strict,
    "all_but_last": AllButLast,
    "block_verification": BlockVerification,
    "cascade": Cascade,
    "ensemble": Ensemble,
    "entropy_verify": EntropyVerify,
    "fly": FLy,
    "judge": Judge,
    "kl_judge": KLJudge,
    "lenience": Lenience,
    "limited": Limited,
    "mentored": Mentored,
    "regret_budget": RegretBudget,
    "relaxed_top_k": RelaxedTopK,
    "synthetic_for_benchmarks": SyntheticForBenchmarks,
    "thresholds": Thresholds,
    "top_k": TopK,
    "top_k_tolerance": TopKTolerance,
    "typical": Typical,
    "union": Union,
}
