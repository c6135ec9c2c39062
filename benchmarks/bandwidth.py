"""What a forward must read, and how fast a device's memory gives it: the limit of every arm whose forwards are short."""

import time
from typing import Any

import torch
from pairs import synchronize


GIB = 1 << 30
COPIES = 10  # the fastest counts


def measured(device: str) -> float:
    """Bytes a second that a copy of a large tensor reads and writes."""
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


def of_weights(model: Any) -> int:
    """Bytes of weights that one forward reads: of a table of embeddings only some rows, unless it serves the logits as well."""
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return sum(p.nbytes for p in model.parameters()) - (0 if table is head else table.nbytes)


def of_cache(model: Any, length: float) -> float:
    """Bytes of keys and values that one forward behind `length` tokens reads."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return length * 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
