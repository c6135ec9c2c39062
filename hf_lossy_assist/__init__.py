"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy."""

from . import demo
from .artifacts.features import FeatureSpec
from .artifacts.heads import Head, HeadConfig, LinearHead, MLPHead
from .artifacts.profile import Profile
from .drafters import AssistantDrafter, CompositeDrafter, Drafter, DrafterRun, SuffixDrafter, SuffixMemory
from .filters.base import VerifyAll, VerifyFilter
from .filters.staged import Staged
from .filters.sv import Verification
from .generation.enable import disable, enable, is_enabled
from .generation.runner import Runner
from .generation.stock import StockRule, StoppingCandidateGenerator, stock_stop
from .models.early_exit import early_exit
from .models.identity import ModelIdentity
from .policy.methods import AutoJudge, SpeculativeVerification, Sprinter, as_policy
from .policy.policy import LossyPolicy
from .round import Draft, Selection, Verdict, Verified
from .rules import (
    AcceptanceRule,
    AllButLast,
    BlockVerification,
    Cascade,
    Distributions,
    Ensemble,
    EntropyVerify,
    FLy,
    Judge,
    KLJudge,
    Lenience,
    Limited,
    Mentored,
    OwnRule,
    Pointwise,
    RegretBudget,
    RelaxedTopK,
    RuleRun,
    Strict,
    SyntheticForBenchmarks,
    Thresholds,
    TopK,
    TopKTolerance,
    Typical,
    Union,
)
from .stats.report import RowStats, SpeculationStats
from .stops import (
    DISCO,
    SVIP,
    AdaEDL,
    AllOf,
    AnyOf,
    AtLeast,
    BatchSchedule,
    Confidence,
    Constant,
    DraftStop,
    Fallback,
    HeadStop,
    Heuristic,
    MovingAverage,
    SpecDecPP,
    StopRun,
)


__version__ = "0.1.0"

__all__ = [
    "DISCO",
    "SVIP",
    "AcceptanceRule",
    "AdaEDL",
    "AllButLast",
    "AllOf",
    "AnyOf",
    "AssistantDrafter",
    "AtLeast",
    "AutoJudge",
    "BatchSchedule",
    "BlockVerification",
    "Cascade",
    "CompositeDrafter",
    "Confidence",
    "Constant",
    "DraftStop",
    "Ensemble",
    "EntropyVerify",
    "FLy",
    "Fallback",
    "FeatureSpec",
    "Head",
    "HeadConfig",
    "HeadStop",
    "Heuristic",
    "Judge",
    "KLJudge",
    "Distributions",
    "Lenience",
    "Limited",
    "LinearHead",
    "LossyPolicy",
    "MLPHead",
    "Mentored",
    "ModelIdentity",
    "MovingAverage",
    "OwnRule",
    "Pointwise",
    "Profile",
    "RegretBudget",
    "RelaxedTopK",
    "RowStats",
    "Runner",
    "SpecDecPP",
    "SpeculationStats",
    "SpeculativeVerification",
    "Sprinter",
    "Staged",
    "StockRule",
    "StopRun",
    "StoppingCandidateGenerator",
    "Strict",
    "SuffixDrafter",
    "SuffixMemory",
    "SyntheticForBenchmarks",
    "Thresholds",
    "TopK",
    "TopKTolerance",
    "Typical",
    "Union",
    "Draft",
    "Drafter",
    "DrafterRun",
    "RuleRun",
    "Selection",
    "Verdict",
    "Verified",
    "Verification",
    "VerifyAll",
    "VerifyFilter",
    "as_policy",
    "demo",
    "disable",
    "early_exit",
    "enable",
    "is_enabled",
    "stock_stop",
]
