"""Acceptance rules: which drafted tokens to keep, and from what to draw the token after them.

`base` says what a rule answers, `accepting` how a round ends; every other file holds rules of one kind.
"""

from collections.abc import Mapping

from ..registry import Names
from .accepting import accept
from .base import AcceptanceRule, RuleRun, Strict, draw
from .divergences import KLJudge
from .joint import BlockVerification, FLy, SyntheticForBenchmarks
from .learned import AllButLast, Judge
from .limits import Limited
from .mentored import Mentored
from .mixtures import Cascade, Ensemble
from .nesting import Union
from .pointwise import Distributions, OwnRule, Pointwise
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
    "Distributions",
    "EntropyVerify",
    "FLy",
    "Judge",
    "KLJudge",
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
    "RuleRun",
    "accept",
    "draw",
]

RULES: Mapping[str, type[AcceptanceRule]] = Names("rule")  # by name, as they register themselves
