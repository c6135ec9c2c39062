"""A decoder on a cache of rows: any number of rows, each with its own length, rolled back by assignment."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .inspect import attention_of, base_of, device_of, has_fixed_rows, is_tested, learned_positions
from .packing import ORDINARY, Layout, packed
from .rope import ChangingRope
from .row_cache import RowCache, visibility
from .temperature import with_temperature


PACKED_BELOW = 0.9  # of a padded block's tokens: packing costs a little itself


# Products that the padding must waste in each layer, tokens × weights, before packing pays for its own copies: on two CPU cores a
# layer of 0.11 million weights breaks even at about 100 tokens (docs/log.md).
PACKED_FROM = 1e7


class RowModel:
    """A decoder on a `RowCache`: any number of rows, each with its own length."""

    needs_prefill = outlives_call = False

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        limit: int,
        vocabulary: int | None = None,
        types: torch.Tensor | None = None,
    ):
        """`limit`: the most tokens that a row can come to hold; `vocabulary`: the target's, if it may be larger.

        `types` (B, n): `token_type_ids` of each row's first n tokens; those behind have the last one's.
        """
        base = base_of(model)
        config = base.config.get_text_config(decoder=True)
        self.model, self.config = model, config
        self.cache = RowCache(config.num_hidden_layers, limit)
        self.lengths = [0] * rows
        self._open: torch.Tensor | None = None
        self.device = device_of(base)
        self.types = None if types is None else types.to(self.device)
        # Padding alone lies beyond the limit; beyond a table of positions, rows for which this draft guesses no more.
        self.last = min(limit, learned_positions(base) or limit) - 1
        self.dtype = base.get_input_embeddings().weight.dtype
        self.known = base.get_input_embeddings().weight.shape[0]
        self.narrow = vocabulary is not None and self.known < vocabulary
        # An early exit's blocks look at the config of the model that they belong to.
        own = all(getattr(module, "config", config) is config for module in base.modules())
        self.rope = ChangingRope.of(base, rows)
        self.run: Callable[..., Any] = with_temperature(model, base)
        if self.rope is not None:
            self.run = partial(self.rope.run, self.run)
        # Attention of tested models goes through Transformers' table of attention functions and knows no other cache position.
        self.packs = (
            attention_of(config) == ORDINARY
            and is_tested(base)
            and own
            and self.run is model
            and not has_fixed_rows(base)
        )
        self.weights = sum(p.numel() for p in base.parameters()) / max(
            config.num_hidden_layers, 1
        )  # of a layer, about
        self.keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        self.mask_each_row = not is_tested(base)  # XGLM's attention checks for it
        kinds = getattr(config, "layer_types", None)
        window = getattr(config, "sliding_window", None)
        if not getattr(config, "use_sliding_window", True):
            window = None
        self.windows = dict.fromkeys(kinds or [], None) or {"sliding_attention" if window else "full_attention": None}
        if "sliding_attention" in self.windows:
            self.windows["sliding_attention"] = window
        self.chunk = getattr(config, "attention_chunk_size", None) if "chunked_attention" in self.windows else None

    @property
    def reach(self) -> float:
        """How many tokens every layer sees whatever their places: its shortest window or chunk."""
        limits = [*self.windows.values(), self.chunk]
        return min((limit for limit in limits if limit is not None), default=float("inf"))

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device)
        if self.narrow:  # shown an id beyond its own, it guesses badly, and the guess is verified as any other
            tokens = tokens.clamp(max=self.known - 1)
        width = tokens.shape[1]
        prefill = not any(self.lengths)
        if keep == width and not prefill and sum(counts) > 0:
            wasted = max(counts) * len(counts) - sum(counts)
            pays = wasted >= (1 - PACKED_BELOW) * max(counts) * len(counts) and wasted * self.weights >= PACKED_FROM
            if self.packs and pays:
                return self._feed_packed(tokens, counts)
            if max(counts) < width:  # columns that no row needs
                short = self.feed(tokens[:, : max(counts)], counts, max(counts))
                return torch.nn.functional.pad(short, (0, 0, 0, width - max(counts)))
        slots = self.cache.plan(self.lengths, width, self.device)
        positions = slots if self.cache.visible <= self.last + 1 else slots.clamp(max=self.last)
        keep = width if keep is None else keep
        extra: dict[str, Any] = {"logits_to_keep": max(keep, 1)} if self.keeps_logits and keep < width else {}
        if self.types is not None:
            places = slots.clamp(max=self.types.shape[1] - 1).expand(len(self.types), -1)
            extra["token_type_ids"] = self.types.gather(1, places)
        out = self.run(
            input_ids=tokens,
            position_ids=positions,
            # Right padding is hidden by causality alone, so a prefill keeps the fast causal kernel.
            attention_mask=None if prefill else self._mask(slots),
            past_key_values=self.cache,
            use_cache=True,
            **extra,
        )
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return out.logits[:, out.logits.shape[1] - keep :]

    def _feed_packed(self, tokens: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """`feed` without the padding of short rows; their logits behind `counts[b]` are zeros."""
        layout = Layout(counts, tokens.shape[1], self.device)
        starts = torch.tensor(self.lengths, device=self.device)
        slots = starts[layout.rows] + layout.places  # (N,)
        ends = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.cache.plan_packed(layout.rows, slots, min(self.lengths), max(ends))
        places = starts[:, None] + torch.arange(layout.shape[1], device=self.device)  # (B, Q)
        extra: dict[str, Any] = {}
        if self.types is not None:
            extra["token_type_ids"] = self.types[layout.rows, slots.clamp(max=self.types.shape[1] - 1)][None]
        with packed(self.config, layout):
            out = self.model(
                input_ids=layout.pack(tokens[:, : layout.shape[1]]),
                position_ids=slots[None],
                attention_mask=self._mask(places),
                past_key_values=self.cache,
                use_cache=True,
                **extra,
            )
        self.lengths = ends
        return layout.pad(out.logits, layout.width)

    def _mask(self, positions: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """An additive mask (1 or B, 1, Q, visible) in the model's dtype, one for each kind of layer if there are several."""
        visible = self.cache.visible
        if positions.shape == (1, 1) and all(
            (w is None or visible <= w) and kind != "chunked_attention" for kind, w in self.windows.items()
        ):
            # One token that sees everything before it needs no mask. On a CPU a ready one is still cheaper than the model's own
            # way of finding that out (0.29 ms against 0.34 ms for the demo draft's step).
            return self._open_mask(visible) if self.device.type == "cpu" else None
        lowest = torch.finfo(self.dtype).min
        masks = {}
        for kind, window in self.windows.items():
            seen = visibility(positions, visible, window, self.chunk if kind == "chunked_attention" else None)
            masks[kind] = torch.zeros_like(seen, dtype=self.dtype).masked_fill_(~seen, lowest)
            if self.mask_each_row:
                masks[kind] = masks[kind].expand(len(self.lengths), -1, -1, -1)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _open_mask(self, visible: int) -> torch.Tensor | dict[str, torch.Tensor]:
        if self._open is None or self._open.shape[-1] < visible:
            self._open = torch.zeros(1, 1, 1, self.cache.capacity, dtype=self.dtype, device=self.device)
        mask = self._open[..., :visible]
        if self.mask_each_row:
            mask = mask.expand(len(self.lengths), -1, -1, -1)
        return mask if len(self.windows) == 1 else dict.fromkeys(self.windows, mask)

    def rollback(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.cache.select(torch.tensor(rows, device=self.device))
        self.lengths = [self.lengths[r] for r in rows]
        if self.types is not None:
            self.types = self.types[list(rows)]
        if self.rope is not None:
            self.rope.select(rows)

    def renew(self, row: int, tokens: torch.Tensor) -> None:
        """Write a row's cache anew from `tokens` (n,), where its rotary frequencies change for the whole text."""
        assert self.rope is not None and self.rope.renewed_after is not None
        self.rope.first[row] = self.rope.renewed_after + 1
        if len(tokens):
            alone = self.row(row)
            alone.lengths = [0]
            alone.feed(tokens[None], [len(tokens)], keep=0)
        self.lengths[row] = len(tokens)

    def row(self, row: int) -> "RowModel":
        """One row alone, on the same storage: what is fed to it is in this model's cache too. Its length is its own."""
        alone = RowModel(self.model, 1, self.cache.limit)
        alone.cache, alone.lengths = self.cache.row(row), [self.lengths[row]]
        alone.types = None if self.types is None else self.types[row : row + 1]
        if alone.rope is not None and self.rope is not None:
            alone.rope.first = [self.rope.first[row]]
        return alone

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` of each row at once: storage that `row` shares must not be replaced by a larger one."""
        self.cache.capacity = tokens

    def export(self, rows: int, mask: torch.Tensor | None) -> DynamicCache | None:
        """Of a call with one row: rows of a batch end at different places, also where one row alone is left."""
        return None if rows > 1 else self.as_dynamic_cache(None if mask is None else mask[0].ne(0))

    def as_dynamic_cache(self, seen: torch.Tensor | None = None) -> DynamicCache:
        """A one-row copy that Transformers can go on with (`past_key_values` of the output).

        `seen` (width,) bool: which tokens of the prompt as given the mask shows. The others have their place in a cache of
        Transformers' own; here they get zeros there, since the mask that goes with the text hides them.
        """
        out, length = DynamicCache(config=self.config), self.lengths[0]
        for i, layer in enumerate(self.cache.layers):
            kept = [states[:, :, :length] for states in (layer.keys, layer.values)]
            if seen is None:
                out.update(*(states.clone() for states in kept), i)
                continue
            places = torch.nn.functional.pad(seen.to(kept[0].device), (0, length - int(seen.sum())), value=True)
            spread = [states.new_zeros(*states.shape[:2], len(places), states.shape[3]) for states in kept]
            for new, old in zip(spread, kept, strict=True):
                new[:, :, places] = old
            out.update(*spread, i)
        return out
