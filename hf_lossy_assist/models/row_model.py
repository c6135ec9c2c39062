"""A decoder on a row cache: any number of rows of different lengths, rolled back by assignment."""

import copy
from collections.abc import Callable, Sequence

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils import ModelOutput

from ..tensors import advance, on_device
from .cached_model import CachedModel, NotJoined
from .facts import CACHE, CHUNKED, ModelFacts, facts_of, forward_of
from .introspection import base_of, has_fixed_rows
from .patching import Layout, packed
from .quirks import patched_forward, patches_of
from .row_cache import RowCache, States


PACKED_BELOW = 0.9  # share of a padded block's tokens: packing has a cost
# Multiplications (tokens × weights) that padding must waste in each layer before packing pays for its copies: on two
# CPU cores a layer of 0.11 million weights breaks even at about 100 tokens (docs/log.md).
PACKED_FROM = 1e7


def visibility(positions: torch.Tensor, visible: int, window: int | None, chunk: int | None) -> torch.Tensor:
    """Return which of the `visible` slots each query may attend to, (1 or B, 1, Q, visible) bool, from its slot in
    `positions` (1 or B, Q)."""
    query, key = positions[:, None, :, None], torch.arange(visible, device=positions.device)
    seen = key <= query
    if window is not None:
        seen = seen & (query - key < window)
    if chunk is not None:
        seen = seen & (query // chunk == key // chunk)
    return seen


def layer_visibility(facts: ModelFacts, kind: str, positions: torch.Tensor, visible: int) -> torch.Tensor:
    """Return which of `visible` tokens a layer of `kind` attends to from `positions` (B, Q), (B, 1, Q, visible)
    bool."""
    return visibility(positions, visible, facts.windows[kind], facts.chunk if kind == CHUNKED else None)


def additive_masks(facts: ModelFacts, slots: torch.Tensor, visible: int) -> dict[str, torch.Tensor]:
    """Return the additive mask over `visible` tokens for each kind of layer, (1 or B, 1, Q, visible).
    Arguments: see `layer_visibility`."""
    seen = {kind: layer_visibility(facts, kind, slots, visible) for kind in facts.windows}
    lowest = torch.finfo(facts.dtype).min
    return {kind: torch.zeros_like(s, dtype=facts.dtype).masked_fill_(~s, lowest) for kind, s in seen.items()}


class Masks:
    """The masks of one decoder on a row cache."""

    def __init__(self, facts: ModelFacts):
        self.facts = facts
        self._open: torch.Tensor | None = None  # zeros, (1, 1, 1, capacity)

    def of(
        self, slots: torch.Tensor, visible: int, rows: int, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        """Return an additive mask (1 or B, 1, Q, visible) in the model's dtype, or one for each kind of layer if there
        are several.

        `slots` (1 or B, Q): those of the forward's tokens; `rows`: B; `capacity`: the largest `visible` to expect.
        """
        facts = self.facts
        if not facts.windows:
            return None
        if slots.shape == (1, 1) and facts.sees_all(visible):
            # One token that attends to everything before it needs no mask. On a CPU a ready-made one is still cheaper
            # than the model's check for that (0.29 ms against 0.34 ms for the demo draft's step).
            if facts.device.type != "cpu":
                return None
            if self._open is None or self._open.shape[-1] < visible:
                self._open = torch.zeros(1, 1, 1, capacity, dtype=facts.dtype, device=facts.device)
            masks = dict.fromkeys(facts.windows, self._open[..., :visible])
        else:
            masks = additive_masks(facts, slots, visible)
        return self.bundle(masks, rows)

    def bundle(self, masks: dict[str, torch.Tensor], rows: int) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """Return the masks of all kinds of layers in the form that the model takes."""
        if not self.facts.is_tested:
            masks = {kind: mask.expand(rows, -1, -1, -1) for kind, mask in masks.items()}
        return masks | dict.fromkeys(self.facts.unmasked) if len(masks) > 1 else next(iter(masks.values()))


class RowModel:
    """A decoder on a `RowCache`: any number of rows, each with a separate length."""

    cache_type = RowCache

    def __init__(self, model: PreTrainedModel, rows: int, limit: int, vocabulary: int | None = None):
        """Take `limit`: the most tokens of a row; `vocabulary`: the target's size, if it may be larger than this
        model's."""
        self.model, self.facts = model, facts_of(model)
        base = base_of(model)
        layers = self.facts.layers or self.facts.config.num_hidden_layers
        self.cache = self.cache_type(layers, limit, self.facts.keeps_states)
        self.needs_prefill = self.facts.keeps_states  # else a rollback would run the prompt's recurrence again
        self.lengths, self._rolled_back = [0] * rows, False
        self.masks = Masks(self.facts)
        self.device, self.dtype = self.facts.device, self.facts.dtype
        # Only padding exceeds the limit; rows that exceed the position table get no more drafts from this model.
        self.last = min(limit, self.facts.table_end or limit) - 1
        self.narrow = vocabulary is not None and self.facts.input_size < vocabulary
        self.reads_whole, self.keeps_logits = self.facts.rope is not None, self.facts.keeps_logits
        forward = patched_forward(model) if patches_of(model) else forward_of(model, base)
        self.run: Callable[..., ModelOutput] = forward
        self.packs = rows > 1 and self.facts.may_pack and not has_fixed_rows(base)
        self.passed: Cache | None = None  # by the caller, to be filled at the end

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device)
        if self.narrow:  # ids outside the draft's vocabulary: verification rejects bad proposals
            tokens = tokens.clamp(max=self.facts.input_size - 1)
        width = tokens.shape[1]
        prefill = not any(self.lengths)
        if keep in (0, width) and sum(counts) > 0:
            wasted = max(counts) * len(counts) - sum(counts)
            # A row that goes back by a token, beside a passed cache, has none to pack.
            pays = self.skips_padding(wasted) and len(counts) > 1 and min(counts) >= 0
            if pays and wasted >= (1 - PACKED_BELOW) * max(counts) * len(counts):
                return self._feed_packed(tokens, counts, keep)
            if keep and not prefill and max(counts) < width:  # columns without a real token
                short = self.feed(tokens[:, : max(counts)], counts, max(counts))
                return torch.nn.functional.pad(short, (0, 0, 0, width - max(counts)))
        if self._rolled_back:
            self._settle()
        slots = self.cache.plan(self.lengths, width, self.device, counts, keep != 0)
        positions = slots.clamp(max=self.last) if self.cache.end > self.last + 1 else slots
        keep = width if keep is None else keep
        extra: dict[str, object] = {"logits_to_keep": max(keep, 1)} if self.keeps_logits and keep < width else {}
        # Causal attention alone hides right padding, so a prefill uses the fast causal kernel.
        mask = None if prefill else self._mask(slots)
        out = self._forward(tokens, positions, mask, **extra)
        self.lengths = advance(self.lengths, counts, self.device)
        if keep == 0:  # a forward without logits is never rolled back
            self._settle()
        return out.logits[:, out.logits.shape[1] - keep :]

    def skips_padding(self, tokens: float) -> bool:
        """Return whether a block of rows of unequal lengths is read without `tokens` of padding, if that is much of
        it."""
        return self.packs and tokens * self.facts.layer_weights >= PACKED_FROM

    def _feed_packed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int) -> torch.Tensor:
        """Feed without the padding of short rows; their logits after `counts[b]` are zeros.
        `keep`: 0 or the width of `tokens`."""
        # A prompt's tokens see all before them: attention then takes its fast causal kernel, and no mask but a small
        # one in its place.
        causal = not any(self.lengths) and self.facts.sees_all(max(counts))
        layout = Layout(counts, tokens.shape[1], self.device, causal)
        starts = on_device(self.lengths, self.device)
        slots = starts[layout.rows] + layout.places  # (N,)
        ends = advance(self.lengths, counts, self.device)
        self.cache.plan_packed(layout.rows, slots, min(self.lengths), max(ends), len(counts))
        columns = starts[:, None] + torch.arange(layout.shape[1], device=self.device)  # (B, Q)
        extra: dict[str, object] = {"logits_to_keep": 1} if keep == 0 and self.keeps_logits else {}
        mask = self._mask(columns[:, :1] if causal else columns)
        with packed(self.facts.config, layout):
            # A prompt may exceed the position table of a draft, which then drafts no more.
            positions = slots[None].clamp(max=self.last)
            out = self._forward(layout.pack(tokens[:, : layout.shape[1]]), positions, mask, **extra)
        self.lengths = ends
        return layout.pad(out.logits, layout.width) if keep else tokens.new_empty(len(counts), 0, out.logits.shape[-1])

    def _mask(self, slots: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        return self.masks.of(slots, self.cache.visible, len(self.lengths), self.cache.capacity)

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: object, **extra: object) -> ModelOutput:
        inputs = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, CACHE: self.cache}
        return self.run(**inputs, use_cache=True, **extra)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.lengths, self._rolled_back = list(lengths), True  # a row may be rolled back twice before it is settled

    def _settle(self) -> None:
        self._rolled_back = False
        self.cache.settle(self.lengths, self.device)

    def select(self, rows: Sequence[int]) -> None:
        self._settle()
        self.cache.select(torch.tensor(rows, device=self.device))
        self.lengths = [self.lengths[r] for r in rows]

    def insert(
        self, slots: Sequence[int], other: "RowModel", rows: Sequence[int], tokens: Sequence[int] | None = None
    ) -> None:
        """Copy rows of `other`, or their first `tokens[i]`, to the rows at `slots`, which may lie after the last
        existing row."""
        for model in (self, other):
            model._settle()
        tokens = [other.lengths[row] for row in rows] if tokens is None else tokens
        count = max(len(self.lengths), 1 + max(slots))
        self.cache.insert(slots, other.cache, rows, tokens, count)
        self.lengths += [0] * (count - len(self.lengths))
        for slot, length in zip(slots, tokens, strict=True):
            self.lengths[slot] = length
        self.last = max(self.last, other.last)

    def part(self, row: int, start: int, end: int) -> States:
        """Copy the cache entries of a row's tokens from `start` to `end`, for `put`."""
        return self.cache.part(row, start, end)

    def put(self, row: int, start: int, states: States, tokens: int) -> None:
        """Append the first `tokens` of a `part` to a row that holds `start` tokens."""
        self.cache.put(row, len(self.lengths), start, states, tokens)
        self.lengths[row] = start + tokens

    def fresh(self, rows: int, limit: int) -> "RowModel":
        """Return `rows` empty rows on the same model, for texts of up to `limit` tokens.

        Raises: `NotJoined`, one line, if a text's cache depends on the other texts of the batch.
        """
        reasons = {
            "its compiled rounds, or its inputs beside the text, keep the rows that a call began with": type(self)
            is not RowModel,
            "its RoPE changes with the length of the text": not joins(self),
            "adapters are named for each row": has_fixed_rows(base_of(self.model)),
        }
        for reason, fits in reasons.items():
            if fits:
                raise NotJoined(f"{type(base_of(self.model)).__name__}: {reason}")
        out = copy.copy(self)
        out.cache, out.lengths, out._rolled_back = self.cache.like(limit), [0] * rows, False
        out.masks, out.packs = Masks(self.facts), self.facts.may_pack
        out.last = min(limit, self.facts.table_end or limit) - 1
        return out

    def copy(self) -> "RowModel":
        """Return a copy of the only row, without spare capacity."""
        self._settle()
        out = copy.copy(self)
        out.lengths, out.cache = list(self.lengths), self.cache.first(self.lengths[0])
        return out

    def row(self, row: int) -> "RowModel":
        """Return one row alone on the same storage: tokens fed to it enter this model's cache, but not its lengths."""
        alone = RowModel(self.model, 1, self.cache.limit)
        alone.cache, alone.lengths = self.cache.row(row), [self.lengths[row]]
        return alone

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in each row now: storage shared by `row` must not be replaced later."""
        self.cache.capacity = tokens

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        """Return a copy of the only row in the form that Transformers can continue from; None for a batch, whose rows
        end at different positions.

        Tokens that `mask` hides take positions filled with zeros, since the text's mask hides them. A cache that the
        caller passed is filled.
        """
        if rows > 1:
            return None
        self._settle()
        whole = self.passed is not None and all(type(layer) is DynamicLayer for layer in self.passed.layers)
        out = DynamicCache() if whole else DynamicCache(config=self.facts.config)
        for layer in self.cache.layers:
            layer.export_to(out, self.lengths[0], None if mask is None else mask[0].ne(0))
        if self.passed is None:
            return out
        self.passed.layers[:] = out.layers
        return self.passed

    def adopt(self, cache: Cache, mask: torch.Tensor | None) -> None:
        """Continue from a copy of a Transformers cache. `mask` (B, width): which of its positions are visible
        tokens."""
        self.lengths = self.cache.adopt(cache, mask, self.device)


def joins(model: CachedModel) -> bool:
    """Return whether a text's cache in the model does not depend on the other texts, so that its row can join a
    batch."""
    return type(model) is RowModel and model.facts.rope is None


def keeps_prompts(model: CachedModel) -> bool:
    """Return whether the model can reuse the cache of a prompt's beginning, apart from the rest."""
    return isinstance(model, RowModel) and joins(model) and not model.facts.keeps_states
