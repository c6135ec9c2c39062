"""Seconds of forwards on this machine, for a plan of rounds: of models that have the sizes asked for, and random weights."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..models.row_model import RowModel
from ..stats.clock import wait_for
from .spread_costs import Load, Seconds, part_of


WIDTHS = (
    1,
    2,
    4,
    6,
    9,
    17,
)  # tokens of each row in the forwards that are timed; between them seconds are interpolated


def random_model(config: Any, device: str, dtype: Any) -> Any:
    """A model of these sizes, whose weights mean nothing."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def forward_seconds(model: Any, load: Load, widths: Sequence[int] = WIDTHS, repeats: int = 5) -> Seconds:
    """Of this model's forwards behind `load.context` cached tokens of each row: medians, after one that warms up."""
    device = model.device
    cached = RowModel(model, load.rows, load.context + max(widths))
    ids = torch.randint(model.config.vocab_size, (load.rows, load.context + max(widths)), device=device)
    medians = []
    with torch.inference_mode():
        if load.context:
            cached.feed(ids[:, : load.context], [load.context] * load.rows, keep=0)
        for width in widths:
            block, took = ids[:, -width:], []
            for _ in range(repeats + 1):
                cached.rollback([load.context] * load.rows)
                wait_for(device)
                began = time.perf_counter()
                cached.feed(block, [width] * load.rows)
                wait_for(device)
                took.append(time.perf_counter() - began)
            medians.append(statistics.median(took[1:]))
    return lambda tokens: float(np.interp(tokens, widths, medians))


def part_seconds(config: Any, ranks: int, load: Load, device: str, dtype: Any, repeats: int = 5) -> Seconds:
    """Of what one of `ranks` computes of a model with this config."""
    return forward_seconds(random_model(part_of(config, ranks), device, dtype), load, repeats=repeats)


def between(points: dict[int, float]) -> Seconds:
    """Seconds that are given for some numbers of tokens, on a straight line through the first and the last."""
    (few, first), (many, last) = min(points.items()), max(points.items())
    return lambda tokens: first + (last - first) * (tokens - few) / (many - few)


def timed_link(all_reduce: Callable[[torch.Tensor], object], sizes: Sequence[int] = (1, 1 << 20), repeats: int = 9) -> list[float]:  # fmt: skip
    """Median seconds of `all_reduce` on tensors of so many float32 numbers."""
    found = []
    for size in sizes:
        numbers, took = torch.zeros(size), []
        for _ in range(repeats + 2):
            began = time.perf_counter()
            all_reduce(numbers)
            took.append(time.perf_counter() - began)
        found.append(statistics.median(took[2:]))
    return found
