"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy."""

from . import demo
from .block import Block, Verdict
from .drafting import StoppingCandidateGenerator
from .features import FeatureSpec
from .filters import VerifyAll, VerifyFilter
from .heads import Head, HeadConfig, LinearHead, MLPHead
from .identity import ModelIdentity
from .integration import disable, enable, is_enabled, stock_stop
from .policy import AutoJudge, LossyPolicy, Sprinter, as_policy
from .rules import AcceptanceRule, AllButLast, Judge, Strict, TopK
from .runner import Runner
from .stats import RowStats, SpeculationStats
from .stops import SVIP, Confidence, Constant, DraftStop, HeadStop, Heuristic


__version__ = "0.1.0"

__all__ = [
    "SVIP",
    "AcceptanceRule",
    "AllButLast",
    "AutoJudge",
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
    "RowStats",
    "Runner",
    "SpeculationStats",
    "Sprinter",
    "StoppingCandidateGenerator",
    "Strict",
    "TopK",
    "Verdict",
    "VerifyAll",
    "VerifyFilter",
    "as_policy",
    "demo",
    "disable",
    "enable",
    "is_enabled",
    "stock_stop",
]
