"""Describe the device of a benchmark, and measure its memory bandwidth and the bytes that a forward reads."""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from pairs import synchronize

import hf_lossy_assist as hla


GIB = 1 << 30
COPIES = 10  # the fastest counts


def measured(device: str) -> float:
    """Return the bytes per second that copying a large tensor reads and writes."""
    numbers = (1 if device.startswith("cuda") else 1 / 4) * GIB / 4  # far more than any cache holds
    source = torch.ones(int(numbers), device=device)
    copy, best = torch.empty_like(source), float("inf")
    for _ in range(COPIES):
        synchronize(device)
        began = time.perf_counter()
        copy.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def count_weight_bytes(model: Any) -> int:
    """Return the bytes of weights that one forward reads; of an embedding table only some rows, unless it is also the output layer."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if table is head else table.nbytes)


def count_cache_bytes(model: Any, length: float) -> float:
    """Return the bytes of keys and values that one forward after `length` tokens reads."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return length * 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize


def find_name(device: str) -> str:
    """Return the device's product name."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def environment(device: str) -> dict[str, str]:
    """Return the device, driver, memory and versions by name."""
    found = {"device": find_name(device)}
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
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return lines[0] if lines else "unknown"
