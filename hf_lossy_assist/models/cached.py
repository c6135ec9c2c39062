"""A model and its cache, in the two ways the engine can roll back: `RowModel` (any batch, O(1)) and `CroppingModel`
(Transformers' own cache, one row).

Both keep `lengths`, the tokens that each row's cache holds, and offer the same verbs:
`feed` runs tokens and appends them, `rollback` forgets the tail, `select` drops rows.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from ..batch.positions import learned_positions
from .growing import GrowingInputs
from .packing import ORDINARY, Layout, attention_of, packed
from .rope import ChangingRope
from .row_cache import RowCache, visibility
from .temperature import with_temperature


class CachedModel(Protocol):
    """What the engine needs of a target or a draft."""

    lengths: list[int]
    device: torch.device
    rope: ChangingRope | None

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Run `tokens` (B, Q), of which row b's first `counts[b]` are real, behind what the cache holds.

        Returns the logits of the last `keep` positions, (B, keep, V); None: of all Q; 0: nothing can be read from them.
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget everything behind each row's first `lengths[b]` tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows only."""


def base_of(model: Any) -> Any:
    """The Transformers model inside PEFT's or torch.compile's wrapper, or the model itself."""
    model = getattr(model, "__dict__", {}).get("_modules", {}).get("_orig_mod", model)
    # Of the class: a module looks for an attribute that it lacks for some microseconds.
    return model.get_base_model() if hasattr(type(model), "get_base_model") else model


def device_of(model: Any) -> torch.device:
    """Where a model's embeddings compute: accelerate keeps offloaded weights elsewhere, on no device at all in between."""
    table = base_of(model).get_input_embeddings()
    hook: Any = getattr(table, "_hf_hook", None)
    for its in getattr(hook, "hooks", (hook,)):
        device = getattr(its, "execution_device", None)
        if device is not None:
            return torch.device(device)
    return table.weight.device


def vocabulary_of(model: Any) -> int:
    """How many token ids the model's logits are over: ImageGPT, say, reads one more than it writes."""
    base = base_of(model)
    head, size = base.get_output_embeddings(), base.config.get_text_config(decoder=True).vocab_size
    weight = getattr(head, "weight", None)
    written = getattr(head, "out_features", None) or (len(weight) if isinstance(weight, torch.Tensor) else size)
    return min(size, written)  # and Inkling's has more rows than its logits


def blocks_of(base: Any) -> torch.nn.ModuleList | None:
    """The decoder's blocks, counted in the module: of an encoder-decoder, the config names the encoder's number."""
    lists = [m for m in base.get_decoder().children() if isinstance(m, torch.nn.ModuleList)]
    if len(lists) > 1:
        count = base.config.get_text_config(decoder=True).num_hidden_layers
        lists = [m for m in lists if len(m) == count]
    return lists[0] if len(lists) == 1 else None


# Architectures whose ragged rows the tests compare with `generate`. Any other is tried once on a few tokens before it is
# trusted: some build position biases from the attention mask and would go wrong without a word.
TESTED = frozenset("llama qwen2 qwen3 mistral gemma2 gemma3_text gpt2 gpt_neox phi".split())
# Of these, the ones whose attention goes through Transformers' table of attention functions and knows no other cache position.
PACKABLE = TESTED
PACKED_BELOW = 0.9  # of a padded block's tokens: packing costs a little itself
# Products that the padding must waste in each layer, tokens × weights, before packing pays for its own copies: on two CPU cores a
# layer of 0.11 million weights breaks even at about 100 tokens (docs/log.md).
PACKED_FROM = 1e7


class RowModel:
    """A decoder on a `RowCache`: any number of rows, each with its own length."""

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
        self.packs = (
            attention_of(config) == ORDINARY and base.config.model_type in PACKABLE and own and self.run is model
        )
        self.weights = sum(p.numel() for p in base.parameters()) / max(
            config.num_hidden_layers, 1
        )  # of a layer, about
        self.keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        self.mask_each_row = base.config.model_type not in TESTED  # XGLM's attention checks for it
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
        self.lengths[row], self.rope.first[row] = len(tokens), self.rope.renewed_after + 1
        if len(tokens):
            alone = RowModel(self.model, 1, self.cache.limit)
            assert alone.rope is not None
            alone.cache, alone.rope.first = self.cache.row(row), [self.rope.first[row]]
            alone.types = None if self.types is None else self.types[row : row + 1]
            alone.feed(tokens[None], [len(tokens)], keep=0)

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


def _positions(inputs: dict[str, Any], end: int) -> torch.Tensor:
    """Where the tokens of these inputs of a forward stand, (1, Q), on the CPU; they end before place `end`."""
    given = inputs.get("position_ids")
    if given is not None and given.dim() == 2:
        return given.cpu()
    ids = inputs["decoder_input_ids"] if "decoder_input_ids" in inputs else inputs["input_ids"]
    return torch.arange(end - ids.shape[1], end)[None]


class CroppingModel:
    """One row on Transformers' own cache, rolled back with `crop`: encoder-decoders, convolution states, a cache passed in.

    The cache is laid out as Transformers does: a token that the mask hides (padding, a hole) has its place there. `lengths` and
    `feed` count the other tokens alone, as everywhere in this package.
    """

    def __init__(self, model: PreTrainedModel, model_kwargs: dict[str, Any], input_ids: torch.Tensor):
        """`model_kwargs` as `generate` prepared them (cache, encoder outputs, masks); `input_ids` (1, width) the prompt, hidden tokens too."""
        base = base_of(model)
        self.model, self.kwargs = model, dict(model_kwargs)
        self.cache: Cache = self.kwargs["past_key_values"]
        table = base.get_input_embeddings().weight
        self.device, self.known = device_of(base), table.shape[0]
        self.keeps_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        for name in ("logits_to_keep", "cache_position"):
            self.kwargs.pop(name, None)
        self.growing = GrowingInputs.taken_from(self.kwargs, base.config.is_encoder_decoder, self.device)
        self.prompt = input_ids.to(self.device)
        self.seen = self.growing.seen(self.prompt.shape[1])
        held = self.cache.get_seq_length()
        self.ids = self.prompt[:, :held]
        self.lengths = [sum(place < held for place in self.seen)]
        self.rope = ChangingRope.of(base, 1)
        if self.rope is not None and self.rope.renewed_after is not None:  # there places count, hidden ones too
            self.rope.renewed_after -= self.prompt.shape[1] - len(self.seen)
        self.fresh = True

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device).clamp(max=self.known - 1)  # as in RowModel
        width, wide = tokens.shape[1], self.prompt.shape[1]
        if self.fresh and keep != 0:  # a prompt of one token has no prefill: this forward may be rolled back itself
            self.cache.activate_past_recording()
        start, end = self.ids.shape[1], self._places(self.lengths[0] + width)
        behind = max(end - max(start, wide), 0)  # of `tokens`, those behind the prompt
        self.ids = torch.cat([self.ids, self.prompt[:, start:end], tokens[:, width - behind :]], dim=1)
        extra: dict[str, Any] = {}
        if self.keeps_logits and keep is not None and keep < end - start:
            extra["logits_to_keep"] = max(keep, 1)
        given = {"is_first_iteration": self.fresh, **self.kwargs, **self.growing.up_to(end), **extra}
        inputs = self.model.prepare_inputs_for_generation(self.ids, next_sequence_length=end - start, **given)
        if (
            inputs.get("past_key_values") is None
        ):  # Phi-3 writes its cache anew when the text outgrows a certain length
            inputs = self.model.prepare_inputs_for_generation(self.ids, **given | {"past_key_values": None})
            self.cache = DynamicCache(config=base_of(self.model).config.get_text_config(decoder=True))
            self.cache.activate_past_recording()
            inputs["past_key_values"] = self.kwargs["past_key_values"] = self.cache
            if self.rope is not None and self.rope.renewed_after is not None:
                self.rope.first = [max(self.rope.first[0], self.rope.renewed_after + 1)]
        with nullcontext() if self.rope is None else self.rope.at(_positions(inputs, end)):
            out = self.model(**inputs, return_dict=True)
        if self.fresh:
            # After the prefill only: before it, recording would keep every state of the prompt.
            self.fresh = False
            self.cache.activate_past_recording()
        self.lengths = [self.lengths[0] + width]
        return out.logits[:, out.logits.shape[1] - (width if keep is None else keep) :]

    def _places(self, length: int) -> int:
        """How many places of the cache the text's first `length` ≥ 1 tokens take, hidden ones among them too."""
        if length <= len(self.seen):
            return self.seen[length - 1] + 1
        return self.prompt.shape[1] + length - len(self.seen)

    def rollback(self, lengths: Sequence[int]) -> None:
        surplus = self.lengths[0] - lengths[0]
        self.cache.crop(-surplus)
        self.ids = self.ids[:, : self.ids.shape[1] - surplus]
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        if list(rows) != [0]:
            raise AssertionError(f"a cropped cache has one row; asked for {list(rows)}")
