"""Assisted generation for Hugging Face Transformers that is faster, batched and measured, lossless or knowingly lossy.

Names are imported when they are first used: `import hf_lossy_assist` alone loads neither torch nor Transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:  # for type checkers and editors; `_NAMES` says the same at run time
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

# The public names of each module.
_NAMES = {
    "artifacts.features": ("FeatureSpec",),
    "artifacts.head_config": ("HeadConfig",),
    "artifacts.heads": (
        "Head",
        "LinearHead",
        "MLPHead",
    ),
    "artifacts.profile": ("Profile",),
    "drafters": (
        "AssistantDrafter",
        "CompositeDrafter",
        "Drafter",
        "DrafterRun",
        "SuffixDrafter",
        "SuffixMemory",
    ),
    "filters.base": (
        "VerifyAll",
        "VerifyFilter",
    ),
    "filters.staged": ("Staged",),
    "filters.sv": ("Verification",),
    "generation.enable": (
        "disable",
        "enable",
        "is_enabled",
    ),
    "generation.runner": ("Runner",),
    "generation.stock": (
        "StockRule",
        "StoppingCandidateGenerator",
        "stock_stop",
    ),
    "models.early_exit": ("early_exit",),
    "models.identity": ("ModelIdentity",),
    "policy.forms": ("as_policy",),
    "policy.methods": (
        "AutoJudge",
        "SpeculativeVerification",
        "Sprinter",
        "autojudge",
        "specdec",
        "sprinter",
        "sv",
        "svip",
    ),
    "policy.policy": ("LossyPolicy",),
    "registry": (
        "forget",
        "register_drafter",
        "register_filter",
        "register_method",
        "register_rule",
        "register_stop",
    ),
    "round": (
        "Draft",
        "Selection",
        "Verdict",
        "Verified",
    ),
    "rules": (
        "AcceptanceRule",
        "AllButLast",
        "BlockVerification",
        "Cascade",
        "Distributions",
        "Ensemble",
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
        "RuleRun",
        "Strict",
        "SyntheticForBenchmarks",
        "Thresholds",
        "TopK",
        "TopKTolerance",
        "Typical",
        "Union",
    ),
    "stats.report": (
        "RowStats",
        "SpeculationStats",
    ),
    "stops": (
        "AdaEDL",
        "AllOf",
        "AnyOf",
        "AtLeast",
        "BatchSchedule",
        "Confidence",
        "Constant",
        "DISCO",
        "DraftStop",
        "Fallback",
        "HeadStop",
        "Heuristic",
        "MovingAverage",
        "SVIP",
        "SpecDecPP",
        "StopRun",
    ),
}
_MODULE = {name: module for module, names in _NAMES.items() for name in names}

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


def __getattr__(name: str) -> Any:
    if name == "demo":
        return importlib.import_module(".demo", __name__)
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE[name]}", __name__), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
