"""What a benchmark ran on: device, driver, memory, versions."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from bandwidth import GIB

import hf_lossy_assist as hla


def name_of(device: str) -> str:
    """The device as its maker calls it."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def environment(device: str) -> dict[str, str]:
    """By name, for people to read."""
    found = {"device": name_of(device)}
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        major, minor = torch.cuda.get_device_capability(device)
        found |= {
            "compute capability": f"{major}.{minor}",
            "driver": _driver(),
            "CUDA of torch": str(torch.version.cuda),
            "memory": f"{total / GIB:.1f} GiB, {free / GIB:.1f} free",
        }
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found |= {"threads": str(torch.get_num_threads()), "memory": f"{memory / GIB:.1f} GiB"}
    return found | {
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_lossy_assist": hla.__version__,
        "C++ compiler": "found" if shutil.which("g++") or sys.platform == "win32" else "none",
    }


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown: no nvidia-smi"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return said[0] if said else "unknown"
