"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy."""

from . import demo
from .block import Block, Verdict
from .drafting import StoppingCandidateGenerator
from .early_exit import early_exit
from .features import FeatureSpec
from .filters import VerifyAll, VerifyFilter
from .heads import Head, HeadConfig, LinearHead, MLPHead
from .identity import ModelIdentity
from .integration import disable, enable, is_enabled, stock_stop
from .methods import AutoJudge, SpeculativeVerification, Sprinter, as_policy
from .policy import LossyPolicy
from .profile import Profile
from .rules import (
    AcceptanceRule,
    AllButLast,
    BlockVerification,
    Cascade,
    Ensemble,
    EntropyVerify,
    FLy,
    Judge,
    KLJudge,
    Laws,
    Lenience,
    Limited,
    Mentored,
    OwnRule,
    Pointwise,
    RegretBudget,
    RelaxedTopK,
    Strict,
    SyntheticForBenchmarks,
    Thresholds,
    TopK,
    TopKTolerance,
    Typical,
    Union,
)
from .runner import Runner
from .staging import Staged
from .stats import RowStats, SpeculationStats
from .stock_rules import StockRule
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
)
from .verification import Verification


__version__ = "0.1.0"

__all__ = [
    "DISCO",
    "SVIP",
    "AcceptanceRule",
    "AdaEDL",
    "AllButLast",
    "AllOf",
    "AnyOf",
    "AtLeast",
    "AutoJudge",
    "BatchSchedule",
    "Block",
    "BlockVerification",
    "Cascade",
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
    "Laws",
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
    "StoppingCandidateGenerator",
    "Strict",
    "SyntheticForBenchmarks",
    "Thresholds",
    "TopK",
    "TopKTolerance",
    "Typical",
    "Union",
    "Verdict",
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
