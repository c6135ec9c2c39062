"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy."""

from . import demo
from .artifacts.features import FeatureSpec
from .artifacts.head_config import HeadConfig
from .artifacts.heads import Head, LinearHead, MLPHead
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
from .policy.forms import as_policy
from .policy.methods import AutoJudge, SpeculativeVerification, Sprinter, autojudge, specdec, sprinter, sv, svip
from .policy.policy import LossyPolicy
from .registry import forget, register_drafter, register_filter, register_method, register_rule, register_stop
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
    "Distributions",
    "Draft",
    "DraftStop",
    "Drafter",
    "DrafterRun",
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
    "RuleRun",
    "Runner",
    "Selection",
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
    "Verdict",
    "Verification",
    "Verified",
    "VerifyAll",
    "VerifyFilter",
    "as_policy",
    "autojudge",
    "demo",
    "disable",
    "early_exit",
    "enable",
    "forget",
    "is_enabled",
    "register_drafter",
    "register_filter",
    "register_method",
    "register_rule",
    "register_stop",
    "specdec",
    "sprinter",
    "stock_stop",
    "sv",
    "svip",
]
