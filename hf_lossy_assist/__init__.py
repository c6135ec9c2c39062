"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy."""

from . import demo
from .block import Block, Verdict
from .drafting import StoppingCandidateGenerator
from .filters import VerifyAll, VerifyFilter
from .integration import disable, enable, is_enabled, stock_stop
from .policy import LossyPolicy, as_policy
from .rules import AcceptanceRule, Strict
from .runner import Runner
from .stats import RowStats, SpeculationStats
from .stops import SVIP, Confidence, Constant, DraftStop, Heuristic


__version__ = "0.1.0"

__all__ = [
    "SVIP",
    "AcceptanceRule",
    "Block",
    "Confidence",
    "Constant",
    "DraftStop",
    "Heuristic",
    "LossyPolicy",
    "RowStats",
    "Runner",
    "SpeculationStats",
    "StoppingCandidateGenerator",
    "Strict",
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
