"""A decoder on rows whose blocks are one compiled function: storage of a fixed capacity, written at places that a tensor says.

A block's shapes are (rows, `WIDTHS`, capacity) and never depend on what was accepted: short blocks are padded on the right, and the
padding is overwritten by the next block as rejected tokens are. Prompts, and blocks wider than the widest, run as in `RowModel`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .architecture import Architecture
from .compilation import Compilation, Signature, compiled_once, failure, graphs_made
from .inspect import base_of, is_tested
from .row_cache import SPARE, RowCache
from .row_model import RowModel


LEAST = 256  # slots of the smallest storage
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, SPARE)  # of blocks; each that a call meets is compiled once


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
    """A `RowModel` whose blocks behind the prompt are compiled, where they can be: `eager_because` says why they are not."""

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
        self.compilation, self.eager_because = compilation, self._why_not()
        self._signature: Signature | None = None
        # A first block that brings the prompt along would have a shape of its own.
        self.needs_prefill = self.eager_because is None
        # Blocks of this call that ran compiled, and what was compiled for them.
        self.num_compiled = self.num_graphs = 0

    def _why_not(self) -> str | None:
        """Why blocks of this model cannot be compiled, as far as that is known before a prompt is fed, or None."""
        base, name = base_of(self.model), type(base_of(self.model)).__name__
        if not is_tested(base) or self.model is not base:
            return f"{name} is none of the architectures that are tested compiled"
        if self.rope is not None:
            return f"{name}'s RoPE changes with the length of the text"
        if self.types is not None:
            return "token_type_ids are as long as the prompt, and every length would be compiled"
        return None

    @property
    def tensors(self) -> "Block":
        """What a compiled function is handed of this model."""
        return Block(self.model, self.facts, self.cache, self.types, self.narrow)

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width = tokens.shape[1]
        if not self.is_ready() or width > WIDTHS[-1]:
            return super().feed(tokens, counts, keep)
        wide = wide_enough(width)
        self.cache.reserve(max(self.lengths) + wide)
        padded = torch.nn.functional.pad(tokens.to(self.device), (0, wide - width))
        starts = torch.tensor(self.lengths, device=self.device)
        known = graphs_made()
        try:
            block = compiled_once(run_block, self.compilation, [(self.model, self.signature)])
            logits = block(self.tensors, padded, starts)
        except RuntimeError as error:
            self.eager_because = failure(error)
            return super().feed(tokens, counts, keep)
        self.num_compiled += 1
        self.num_graphs += graphs_made() - known
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits[:, width - (width if keep is None else keep) : width]

    def is_ready(self) -> bool:
        """Whether the next block runs compiled: it can, and a prompt has been fed, so that the storage is there."""
        if self.eager_because is not None or not any(self.lengths) or not self.cache.layers[0].is_initialized:
            return False
        if self._signature is None:
            self.eager_because = self.signature.hooked
            if len(self.signature.devices) > 1:
                self.eager_because = f"{type(self.model).__name__} is on several devices"
        return self.eager_because is None

    @property
    def signature(self) -> Signature:
        """What graphs of the model rely on; read once a call, when what the call itself hooks in is there."""
        if self._signature is None:
            self._signature = Signature.of(self.model)
        return self._signature


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
