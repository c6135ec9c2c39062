"""A decoder on rows whose blocks are one compiled function: storage of a fixed capacity, written at places that a tensor says.

A block's shapes are (rows, `WIDTHS`, capacity) and never depend on what was accepted: short blocks are padded on the right, and the
padding is overwritten by the next block as rejected tokens are. A prompt's forward is one function whatever its length; blocks wider
than the widest run as in `RowModel`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..architecture import Architecture
from ..compat import CACHE
from ..hidden_state_hook import NORMED
from ..introspection import base_of, blocks_of, is_tested, remember
from ..masks import Columns, additive_masks
from ..patching import unpacked
from ..row_cache import SPARE
from ..row_model import RowModel
from .compilation import FAILURES, Compilation, compiled_once, failure, graphs_made
from .signature import Signature
from .static_cache import BufferLease, StaticRowCache


WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, SPARE)  # of blocks; each that a call meets is compiled once


class StaticRowModel(RowModel):
    """A `RowModel` whose blocks behind the prompt are compiled, where they can be: `eager_because` says why they are not."""

    cache_type = StaticRowCache
    cache: StaticRowCache

    def __init__(self, *args: Any, compilation: Compilation):
        super().__init__(*args)
        self.compilation, self.eager_because = compilation, self._why_not()
        self._signature: Signature | None = None
        self._layers: tuple[int, ...] = ()  # whose hidden states are kept
        self._states: torch.Tensor | None = None  # of the latest forward, (B, Q, layers · H)
        if self.eager_because is None and compilation.replays({self.device}):
            self.cache.lease = BufferLease(self.model, len(self.cache.layers))
        # A first block that brings the prompt along would have a shape of its own.
        self.needs_prefill |= self.eager_because is None
        # Blocks of this call that ran compiled, and what was compiled for them.
        self.num_compiled = self.num_graphs = 0

    def _why_not(self) -> str | None:
        """Return why blocks of this model cannot be compiled, as far as that is known before a prompt is fed, or None."""
        base, name = base_of(self.model), type(base_of(self.model)).__name__
        if not is_tested(base) or self.model is not base:
            return f"{name} is none of the architectures that are tested compiled"
        if self.rope is not None:
            return f"{name}'s RoPE changes with the length of the text"
        if self.types is not None:
            return "token_type_ids are as long as the prompt, and every length would be compiled"
        return None

    def stand_at(self, columns: Columns | None) -> None:
        super().stand_at(columns)
        if self.columns is not None and self.eager_because is None:
            self.eager_because = "windows count the tokens that attention_mask hides in the middle of a row"

    @property
    def replays(self) -> bool:
        """True: its compiled functions are CUDA graphs, each recorded when it runs for the second time."""
        return self.cache.lease is not None

    @property
    def tensors(self) -> "StaticBlock":
        """The part of this model that a compiled function is given."""
        return StaticBlock(self.model, self.facts, self.cache, self.types, self.narrow, self._layers)

    def keep_states(self, layers: Sequence[int]) -> bool:
        """Keep the hidden states of these layers from each forward, as a `HiddenStateHook` numbers them, but as outputs of it; return whether it can.

        Behind the last block alone, before the norm, no forward of Transformers' gives any.
        """
        base = base_of(self.model)
        blocks = len(blocks_of(base) or ())
        if self.eager_because is not None or not all(layer == NORMED or 0 <= layer < blocks for layer in layers):
            return False

        def install() -> None:
            token = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            with torch.no_grad():
                base(token, attention_mask=token + 1, output_hidden_states=True, use_cache=False)

        # Transformers puts hooks there when it is first asked, which cannot be traced.
        remember(base, "hidden states", install)
        self._layers = tuple(layers)
        return True

    def take_states(self) -> torch.Tensor | None:
        """Return the kept states of the latest forward, and let go of them; None: none has run since."""
        states, self._states = self._states, None
        return states

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width = tokens.shape[1]
        if keep == 0 and width > 1 and not any(self.lengths) and self.can_compile():
            return self._fill(tokens, counts)
        if not self.is_ready() or width > WIDTHS[-1]:
            return super().feed(tokens, counts, keep)
        wide = next(size for size in WIDTHS if size >= width)
        self.cache.reserve(max(self.lengths) + wide)
        padded = torch.nn.functional.pad(tokens.to(self.device), (0, wide - width))
        starts = torch.tensor(self.lengths, device=self.device)
        found = self._run(run_block, self.compilation, padded, starts)
        if self.eager_because is not None:
            return super().feed(tokens, counts, keep)
        logits, states = found
        self._states = None if states is None else states[:, :width]
        self.num_compiled += 1
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return logits[:, width - (width if keep is None else keep) : width]

    def _fill(self, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`feed` of the prompts, of which no logits are read."""
        self.allocate(tokens.shape[1])
        tokens = tokens.to(self.device).contiguous()
        torch._dynamo.maybe_mark_dynamic(tokens, 1)
        states = self._run(fill_block, self.compilation.of_any_length(), tokens)
        if self.eager_because is not None:
            return super().feed(tokens, counts, 0)
        self._states = states
        self.lengths = list(counts)
        return tokens.new_zeros(len(counts), 0, 0, dtype=self.dtype)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: object, **extra: object) -> ModelOutput:
        """Run a forward that is not compiled."""
        if not self._layers:
            return super()._forward(tokens, positions, mask, **extra)
        out = super()._forward(tokens, positions, mask, output_hidden_states=True, **extra)
        self._states = unpacked(side_by_side(out.hidden_states, self._layers))
        return out

    def _run(self, function: Callable[..., object], compilation: Compilation, *tensors: torch.Tensor) -> Any:
        """Return what the compiled function returns; where it cannot be compiled, `eager_because` says why from now on."""
        known = graphs_made()
        try:
            out = compiled_once(function, compilation, [(self.model, self.signature)])(self.tensors, *tensors)
        except FAILURES as error:
            self.eager_because = failure(error)
            return None
        self.num_graphs += graphs_made() - known
        return out

    def allocate(self, tokens: int) -> None:
        """Have storage for `tokens` of each row, if there is none yet."""
        if not self.cache.layers[0].is_initialized:
            likes = storage_of(self.model, self.signature, len(self.cache.layers))
            self.cache.allocate(likes, len(self.lengths), tokens)

    def is_ready(self) -> bool:
        """Return whether the next block runs compiled: it can, and a prompt has been fed, so that the storage is there."""
        return any(self.lengths) and self.cache.layers[0].is_initialized and self.can_compile()

    def can_compile(self) -> bool:
        """Return whether blocks of this model can be compiled, as far as that is known now."""
        if self.eager_because is not None:
            return False
        if self._signature is None:
            self.eager_because = self.signature.hooked
            if len(self.signature.devices) > 1:
                self.eager_because = f"{type(self.model).__name__} is on several devices"
        return self.eager_because is None

    def close(self) -> None:
        """Give back the cache's storage that outlives the call."""
        if self.cache.lease is not None:
            self.cache.lease.give_back()

    @property
    def signature(self) -> Signature:
        """The facts that graphs of the model rely on; read once a call, when its hooks are there."""
        if self._signature is None:
            self._signature = Signature.of(self.model)
        return self._signature


class StaticBlock(NamedTuple):
    """A model and its cache, as a compiled function takes them."""

    model: PreTrainedModel
    facts: Architecture
    cache: StaticRowCache
    types: torch.Tensor | None
    narrow: bool  # it knows fewer token ids than it may be shown
    layers: tuple[int, ...]  # whose hidden states are outputs

    def step(
        self, inputs: torch.Tensor, cached: torch.Tensor, number: torch.Tensor, memory: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits (B, V) of drafted token `number` () of a round; as of `DraftBlock`."""
        logits, _ = run_block(self, inputs, cached + 1 + number - inputs.shape[1])
        return logits[:, -1], memory

    def learn(self, *given: torch.Tensor) -> None:
        """Keep nothing: a draft model does not read the target's states."""


_storage: WeakKeyDictionary[PreTrainedModel, tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]] = WeakKeyDictionary()


def storage_of(model: PreTrainedModel, signature: Signature, layers: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of one token in each layer, (1, heads, 1, d) each: no config says their shapes for every architecture."""
    key, known = _storage.get(model, (None, []))
    if key != signature.key or len(known) != layers:  # it has another dtype now, or exits early
        alone = RowModel(model, 1, 1)
        alone.feed(torch.zeros(1, 1, dtype=torch.long), [1], keep=0)
        known = [(layer.keys[:, :, :1], layer.values[:, :, :1]) for layer in alone.cache.layers]
        _storage[model] = signature.key, known
    return known


def side_by_side(states: Sequence[torch.Tensor], layers: Sequence[int]) -> torch.Tensor:
    """Return of Transformers' `hidden_states` those of some layers, (B, Q, layers · H)."""
    return torch.cat([states[layer] for layer in layers], dim=-1)


def fill_block(block: StaticBlock, tokens: torch.Tensor) -> torch.Tensor | None:
    """Write `tokens` (B, Q) at the beginning of each row; return the hidden states that are kept.

    What lies behind a shorter row's last one is overwritten by its next block.
    """
    positions = block.cache.plan([0] * tokens.shape[0], tokens.shape[1], tokens.device)
    return _forward(block, tokens, positions, None)[1]  # right padding is hidden by causality alone


def run_block(
    block: StaticBlock, tokens: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits (B, Q, V) of `tokens` (B, Q) behind the first `starts[b]` of each row, and the hidden states that are kept.

    Every shape is known before it runs.
    """
    facts, cache = block.facts, block.cache
    slots = starts[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    cache.plan_static(slots)
    extra = {}
    if block.types is not None:
        extra["token_type_ids"] = block.types.gather(1, slots.clamp(max=block.types.shape[1] - 1))
    masks = additive_masks(facts, slots, cache.capacity)
    return _forward(block, tokens, slots, masks if len(masks) > 1 else next(iter(masks.values())), **extra)


def _forward(
    block: StaticBlock, tokens: torch.Tensor, positions: torch.Tensor, mask: object, **extra: object
) -> tuple[torch.Tensor, torch.Tensor | None]:
    facts = block.facts
    if block.layers:
        extra["output_hidden_states"] = True
    if block.narrow:
        tokens = tokens.clamp(max=facts.known - 1)
    if facts.table_end is not None:
        positions = positions.clamp(max=facts.table_end - 1)
    out = block.model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        **{CACHE: block.cache},
        use_cache=True,
        **extra,
    )
    block.cache.forget_plan()  # what the cache keeps of a graph is a result of it: a CUDA graph's must be let go before the next one
    return out.logits, side_by_side(out.hidden_states, block.layers) if block.layers else None
