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
from .rules import AcceptanceRule, AllButLast, Judge, Strict, TopK
from .runner import Runner
from .staging import Staged
from .stats import RowStats, SpeculationStats
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
    "Confidence",
    "Constant",
    "DraftStop",
    "FeatureSpec",
    "Head",
    "HeadConfig",
    "HeadStop",
    "Heuristic",
    "Judge",
    "LinearHead",
    "LossyPolicy",
    "MLPHead",
    "ModelIdentity",
    "MovingAverage",
    "Profile",
    "RowStats",
    "Runner",
    "SpecDecPP",
    "SpeculationStats",
    "SpeculativeVerification",
    "Sprinter",
    "Staged",
    "StoppingCandidateGenerator",
    "Strict",
    "TopK",
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
