"""A decoder on rows whose blocks run as one compiled function, on storage of a fixed capacity written at positions
given by a tensor.

A block's shapes are (rows, one of `WIDTHS`, capacity), whatever was accepted: short blocks are padded on the right, and
the next block overwrites the padding as it overwrites rejected tokens. Prompts, and blocks wider than the widest, run
as in `RowModel`: a graph for prompts of any length took as long to compile as all rounds together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ...round import Reading
from ..facts import CACHE, ModelFacts
from ..hidden_state_hook import NORMED
from ..introspection import base_of, blocks_of, is_tested, remember
from ..patching import unpacked
from ..row_cache import SPARE
from ..row_model import RowModel, additive_masks
from .compilation import FAILURES, Compilation, Signature, compiled_once, failure, graphs_made
from .static_cache import BufferLease, StaticRowCache


M = TypeVar("M")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, SPARE)  # of blocks; each width that a call needs is compiled once


class StaticRowModel(RowModel):
    """A `RowModel` that runs blocks after the prompt compiled where possible; else `eager_because` gives the reason."""

    cache_type = StaticRowCache
    cache: StaticRowCache

    def __init__(self, *args: Any, compilation: Compilation):
        super().__init__(*args)
        self.cache.model = base_of(self.model)
        self.compilation, self.eager_because = compilation, self._why_not()
        self._signature: Signature | None = None
        self._layers: tuple[int, ...] = ()  # layers whose hidden states are kept
        self._states: torch.Tensor | None = None  # of the latest forward, (B, Q, layers · H)
        if self.eager_because is None and compilation.replays({self.device}):
            self.cache.lease = BufferLease(self.model, len(self.cache.layers))
        # A first block that included the prompt would have an extra shape.
        self.needs_prefill |= self.eager_because is None
        # Blocks that ran compiled in this call, and graphs compiled for them.
        self.num_compiled = self.num_graphs = 0

    def _why_not(self) -> str | None:
        """Return why this model's blocks cannot be compiled, as far as known before prefill, or None."""
        base, name = base_of(self.model), type(base_of(self.model)).__name__
        if not is_tested(base) or self.model is not base:
            return f"{name} is none of the architectures that are tested compiled"
        if self.facts.rope is not None:
            return f"{name}'s RoPE changes with the length of the text"
        return None

    @property
    def replays(self) -> bool:
        """Whether the compiled functions are CUDA graphs, recorded when they run for the second time."""
        return self.cache.lease is not None

    @property
    def tensors(self) -> "StaticBlock":
        """The parts of this model that are passed to a compiled function."""
        return StaticBlock(self.model, self.facts, self.cache, self.narrow, self._layers)

    def keep_states(self, layers: Sequence[int]) -> bool:
        """Keep the hidden states of these layers from each forward as outputs of it, numbered as in `HiddenStateHook`;
        return whether that is possible.

        It is not for the states after the last block and before the norm, which Transformers' forwards do not return.
        """
        base = base_of(self.model)
        blocks = len(blocks_of(base) or ())
        if self.eager_because is not None or not all(layer == NORMED or 0 <= layer < blocks for layer in layers):
            return False

        def install() -> None:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                base(token, attention_mask=token + 1, output_hidden_states=True, use_cache=False)

        # Transformers installs hooks on the first request for hidden states, which cannot be traced.
        remember(base, "hidden states", install)
        self._layers = tuple(layers)
        return True

    def take_states(self) -> torch.Tensor | None:
        """Return and release the kept states of the latest forward; None: no forward has run since."""
        states, self._states = self._states, None
        return states

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width = tokens.shape[1]
        if not self.is_ready() or width > WIDTHS[-1]:
            return super().feed(tokens, counts, keep)
        wide = next(size for size in WIDTHS if size >= width)
        self.cache.reserve(max(self.lengths) + wide)
        # A graph serves one stride, and this may be a slice.
        padded = torch.nn.functional.pad(tokens.to(self.device), (0, wide - width)).flatten().view(-1, wide)
        starts = torch.tensor(self.lengths, device=self.device)
        graphs_before = graphs_made()
        try:
            compiled = compiled_once(run_block, self.compilation, [(self.model, self.signature)])
            logits, states = compiled(self.tensors, padded, starts)
        except FAILURES as error:
            self.eager_because = failure(error)
            return super().feed(tokens, counts, keep)
        self.num_graphs += graphs_made() - graphs_before
        self._states = None if states is None else states[:, :width]
        self.num_compiled += 1
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits[:, width - (width if keep is None else keep) : width]

    def skips_padding(self, tokens: float) -> bool:
        return not self.is_ready() and super().skips_padding(tokens)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: object, **extra: object) -> ModelOutput:
        """Run an uncompiled forward."""
        if not self._layers:
            return super()._forward(tokens, positions, mask, **extra)
        out = super()._forward(tokens, positions, mask, output_hidden_states=True, **extra)
        self._states = unpacked(side_by_side(out.hidden_states, self._layers))
        return out

    def allocate(self, tokens: int) -> None:
        """Allocate storage for `tokens` per row, unless there is some."""
        if not self.cache.layers[0].is_initialized:
            name = "storage", self.signature.key, len(self.cache.layers)
            self.cache.allocate(remember(base_of(self.model), name, self._one_slot), len(self.lengths), tokens)

    def _one_slot(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return one token's keys and values of each layer, (1, heads, 1, d): not every config has them."""
        alone = RowModel(self.model, 1, 1)
        alone.feed(torch.zeros(1, 1, dtype=torch.long), [1], keep=0)
        return [(layer.keys[:, :, :1], layer.values[:, :, :1]) for layer in alone.cache.layers]

    def is_ready(self) -> bool:
        """Return whether the next block runs compiled: it can be, and a prompt was fed, so the storage exists."""
        return any(self.lengths) and self.cache.layers[0].is_initialized and self.can_compile()

    def can_compile(self) -> bool:
        """Return whether this model's blocks can be compiled."""
        if self.eager_because is not None:
            return False
        if self._signature is None:
            self.eager_because = self.signature.hooked
            if len(self.signature.devices) > 1:
                self.eager_because = f"{type(self.model).__name__} is on several devices"
        return self.eager_because is None

    def close(self) -> None:
        """Return the storage that outlives the call."""
        if self.cache.lease is not None:
            self.cache.lease.give_back()

    @property
    def signature(self) -> Signature:
        """The model's signature, read once per call when its hooks are installed."""
        if self._signature is None:
            self._signature = Signature.of(self.model)
        return self._signature


class StaticBlock(NamedTuple):
    """A model and its cache, as passed to a compiled function."""

    model: PreTrainedModel
    facts: ModelFacts
    cache: StaticRowCache
    narrow: bool  # it knows fewer token ids than it may be fed
    layers: tuple[int, ...]  # whose hidden states are outputs

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, num_drafted: torch.Tensor, memory: M
    ) -> tuple[torch.Tensor, M]:
        """Return the logits (B, V) of drafted token `num_drafted` () of a round. Same interface as `DraftBlock`."""
        logits, _ = run_block(self, inputs, cached + 1 + num_drafted - inputs.shape[1])
        return logits[:, -1], memory

    def learn(self, reading: Reading) -> tuple[()]:
        """Do nothing: a draft model does not read the target's states."""
        return ()


def side_by_side(states: Sequence[torch.Tensor], layers: Sequence[int]) -> torch.Tensor:
    """Return some layers of Transformers' `hidden_states`, concatenated: (B, Q, layers · H)."""
    return torch.cat([states[layer] for layer in layers], dim=-1)


def run_block(
    block: StaticBlock, tokens: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run `tokens` (B, Q) after the first `starts[b]` tokens of each row; return the logits (B, Q, V) and the kept
    hidden states.

    Every shape is known beforehand.
    """
    facts, cache = block.facts, block.cache
    slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cache.plan_static(slots)
    masks = additive_masks(facts, slots, cache.capacity)
    return _forward(block, tokens, slots, masks if len(masks) > 1 else next(iter(masks.values())))


def _forward(
    block: StaticBlock, tokens: torch.Tensor, positions: torch.Tensor, mask: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    facts = block.facts
    extra = {"output_hidden_states": True} if block.layers else {}
    if block.narrow:
        tokens = tokens.clamp(max=facts.input_size - 1)
    if facts.table_end is not None:
        positions = positions.clamp(max=facts.table_end - 1)
    out = block.model(
        input_ids=tokens, position_ids=positions, attention_mask=mask, **{CACHE: block.cache}, use_cache=True, **extra
    )
    # tensors of a plan are a CUDA graph's outputs and must be released before the next replay
    block.cache.forget_plan()
    return out.logits, side_by_side(out.hidden_states, block.layers) if block.layers else None
