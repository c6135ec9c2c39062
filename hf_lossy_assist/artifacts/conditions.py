"""Record the conditions of a measurement: the machine, and the sampling settings that affect p and q, named as in `generate`."""

import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch
from transformers import GenerationConfig

from ..validation import check_flag, check_int, check_positive


T = TypeVar("T")
GREEDY = ": pass do_sample=False (--greedy) for greedy decoding"


def describe_machine(device: torch.device) -> str:
    """Return the name of the machine on which times are measured: the GPU, or the processor and torch's number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_find_processor()}, {torch.get_num_threads()} threads"


@cache
def _find_processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def select_sampling(settings: Mapping[str, T]) -> dict[str, T | bool]:
    """Return the settings that affect p and q; in greedy decoding `do_sample` is the only one."""
    names = ("do_sample", "temperature", "top_k", "top_p") if settings.get("do_sample") else ("do_sample",)
    return {name: settings.get(name, False) for name in names}


# Other settings of a `GenerationConfig` that affect p and q, with their neutral values; the second group only in sampling.
NEUTRAL: tuple[dict[str, float], dict[str, float]] = (
    {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0},
    {"min_p": 0.0, "typical_p": 1.0},
)


def read_shaping(config: GenerationConfig, sampling: bool) -> dict[str, float]:
    """Return the other settings that affect p and q; None stands for the neutral value."""
    neutral = NEUTRAL[0] | (NEUTRAL[1] if sampling else {})
    values = {name: getattr(config, name, None) for name in neutral}
    return {name: neutral[name] if value is None else value for name, value in values.items()}


def check_sampling(settings: Mapping[str, object]) -> None:
    """Refuse sampling settings out of range; in greedy decoding only `do_sample` matters. Raises: `ValueError`, `TypeError`, one line."""
    check_flag("do_sample", settings.get("do_sample"))
    if settings["do_sample"]:
        check_positive("temperature", settings.get("temperature"), hint=GREEDY)
        check_positive("top_p", settings.get("top_p"), 1.0)
        check_int("top_k", settings.get("top_k"), 0)


def read_sampling(config: GenerationConfig) -> dict[str, float]:
    """Return the sampling settings of a call's `GenerationConfig`; None stands for the neutral value."""
    settings: dict[str, float] = {"do_sample": bool(config.do_sample), "top_k": config.top_k or 0}
    for name in ("temperature", "top_p"):
        settings[name] = 1.0 if getattr(config, name) is None else getattr(config, name)
    return select_sampling(settings)
