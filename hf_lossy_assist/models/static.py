"""A decoder on rows whose blocks are one compiled function: storage of a fixed capacity, written at places that a tensor says.

A block's shapes are (rows, `WIDTHS`, capacity) and never depend on what was accepted: short blocks are padded on the right, and the
padding is overwritten by the next block as rejected tokens are. Prompts, and blocks wider than the widest, run as in `RowModel`.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .architecture import Architecture
from .row_cache import SPARE, RowCache
from .row_model import RowModel


LEAST = 256  # slots of the smallest storage
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, SPARE)  # of blocks; each that a call meets is compiled once


@dataclass(frozen=True)
class Compilation:
    """How `torch.compile` is called; the names are its own."""

    backend: str | Callable[..., Any] = "inductor"
    mode: str | None = None
    dynamic: bool | None = None
    fullgraph: bool = True
    options: tuple[tuple[str, Any], ...] = ()


class StaticRowCache(RowCache):
    """A `RowCache` whose capacity is a power of two: blocks of texts of many lengths have one shape."""

    def capacity_for(self, visible: int) -> int:
        return max(LEAST, 1 << (visible - 1).bit_length())

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` of each row, whatever `capacity` is now."""
        if tokens > self.capacity:
            self.capacity = self.capacity_for(tokens)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow()


class StaticRowModel(RowModel):
    """A `RowModel` whose blocks behind the prompt are compiled."""

    needs_prefill = True  # a first block that brings the prompt along would have a shape of its own
    cache_type = StaticRowCache
    cache: StaticRowCache

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        limit: int,
        vocabulary: int | None = None,
        types: torch.Tensor | None = None,
        *,
        compilation: Compilation,
    ):
        super().__init__(model, rows, limit, vocabulary, types)
        self.compilation = compilation
        self.block = compiled_block(model, compilation)

    @property
    def tensors(self) -> "Block":
        """What a compiled function is handed of this model."""
        return Block(self.model, self.facts, self.cache, self.types, self.narrow)

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width = tokens.shape[1]
        if not self.is_filled or width > WIDTHS[-1]:
            return super().feed(tokens, counts, keep)
        wide = wide_enough(width)
        self.cache.reserve(max(self.lengths) + wide)
        tokens = torch.nn.functional.pad(tokens.to(self.device), (0, wide - width))
        starts = torch.tensor(self.lengths, device=self.device)
        logits = self.block(self.tensors, tokens, starts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits[:, width - (width if keep is None else keep) : width]

    @property
    def is_filled(self) -> bool:
        """Whether a prompt has been fed, so that the storage is there."""
        return any(self.lengths) and self.cache.layers[0].is_initialized


class Block(NamedTuple):
    """A model and its cache, as a compiled function takes them."""

    model: Any
    facts: Architecture
    cache: StaticRowCache
    types: torch.Tensor | None
    narrow: bool  # it knows fewer token ids than it may be shown


def wide_enough(width: int) -> int:
    """The narrowest of `WIDTHS` that holds a block of `width` tokens."""
    return next(size for size in WIDTHS if size >= width)


def run_block(block: Block, tokens: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """`tokens` (B, Q) behind the first `starts[b]` of each row: logits (B, Q, V). Every shape is known before it runs."""
    facts, cache = block.facts, block.cache
    if block.narrow:
        tokens = tokens.clamp(max=facts.known - 1)
    slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cache.plan_static(slots)
    extra = {}
    if block.types is not None:
        extra["token_type_ids"] = block.types.gather(1, slots.clamp(max=block.types.shape[1] - 1))
    lowest = torch.finfo(facts.dtype).min
    masks = {}
    for kind in facts.windows:
        seen = facts.visibility(kind, slots, cache.capacity)
        masks[kind] = torch.zeros_like(seen, dtype=facts.dtype).masked_fill(~seen, lowest)
    logits: torch.Tensor = block.model(
        input_ids=tokens,
        position_ids=slots if facts.table_end is None else slots.clamp(max=facts.table_end - 1),
        attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
        past_key_values=cache,
        use_cache=True,
        **extra,
    ).logits
    return logits


_blocks: WeakKeyDictionary[Any, dict[Compilation, Callable[..., torch.Tensor]]] = WeakKeyDictionary()


def compiled_block(model: Any, compilation: Compilation) -> Callable[..., torch.Tensor]:
    """`run_block`, compiled for this model; once for each setting, whatever the number of calls."""
    own = _blocks.setdefault(model, {})
    if compilation not in own:
        own[compilation] = compiled(run_block, compilation)
    return own[compilation]


def compiled(function: Callable[..., Any], compilation: Compilation) -> Callable[..., Any]:
    """`function` through `torch.compile`, with a cache of its own: other models' graphs do not count towards its limit."""
    known = inspect.signature(torch.compile).parameters
    new = {"isolate_recompiles": True, "recompile_limit": 256}  # of torch 2.12
    settings: dict[str, Any] = {name: value for name, value in new.items() if name in known}
    for name in ("backend", "mode", "dynamic", "fullgraph"):
        settings[name] = getattr(compilation, name)
    return torch.compile(function, options=dict(compilation.options) or None, **settings)
