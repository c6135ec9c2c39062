"""The name of the machine that seconds are taken on."""

import platform
from functools import cache
from pathlib import Path

import torch


def machine(device: torch.device) -> str:
    """Where seconds are taken: the GPU, or the processor and how many threads torch has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.get_num_threads()} threads"


@cache
def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
