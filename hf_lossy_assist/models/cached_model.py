"""A model with its cache, in the two forms that the engine can roll back: `RowModel` (any batch, O(1)) and `CroppingModel` (Transformers' cache,
one row).

Both have `lengths`, the number of tokens in each row's cache, and the same methods: `feed` runs tokens and appends them, `rollback` drops the tail,
`select` drops rows.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .compat import CACHE
from .facts import facts_of
from .introspection import base_of, device_of, tokens_known


ModelInputs = dict[str, Any]  # of a forward, by argument name: tensors, caches, flags


class NotJoined(Exception):
    """Rows of several calls cannot be decoded as one batch; the message gives the reason."""


class CachedModel(Protocol):
    """Interface that the engine needs of a target or a draft."""

    lengths: list[int]
    device: torch.device
    reads_whole: bool  # a prompt must be read in one forward, for its rotary frequencies depend on its length
    needs_prefill: bool  # a prompt needs a separate forward before the first block
    outlives_call: bool  # its cache is returned to the caller

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Run `tokens` (B, Q), the first `counts[b]` of row b being real, after the cached ones.

        Returns the logits of the last `keep` positions, (B, keep, V); None: of all Q; 0: logits that must not be read.
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop everything after each row's first `lengths[b]` tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        """Return the cache in the form that Transformers can continue from, or None where it does not hold a single text.

        `rows`: the rows that the call began with; `mask` (rows, width): the prompt tokens that are not hidden.
        """


class TargetModel(CachedModel, Protocol):
    """A target, whose Transformers model reports read."""

    model: PreTrainedModel


MASK, POSITIONS = "attention_mask", "position_ids"
REPEATED, ZERO = ("token_type_ids", "moe_mm_token_type_ids"), ("mm_token_type_ids",)
GROWING = (MASK, POSITIONS, *REPEATED, *ZERO)


class GrowingInputs:
    """The mask, positions and token types of a prompt (…, width), extended as `generate` extends them when the text grows."""

    def __init__(self, model_kwargs: ModelInputs, encoder_decoder: bool, device: torch.device):
        """Move them from `model_kwargs` to `device`. An encoder-decoder's `attention_mask` belongs to its encoder and stays."""
        prefix = "decoder_" if encoder_decoder else ""
        names = (prefix + MASK, prefix + POSITIONS, *REPEATED, *ZERO)
        given = {name: model_kwargs.pop(name, None) for name in names}
        self.given = {name: value.to(device) for name, value in given.items() if value is not None}
        self.mask = self.given.get(prefix + MASK)  # (B, width), 0 where a token is hidden; None: nothing is hidden

    def up_to(self, length: int) -> dict[str, torch.Tensor]:
        """Return each input for the first `length` positions of the text: (…, length)."""
        return {name: _grown(name, value, length) for name, value in self.given.items()}


def _grown(name: str, value: torch.Tensor, length: int) -> torch.Tensor:
    more = length - value.shape[-1]
    if more <= 0:
        return value[..., :length]
    new = value[..., -1:].expand(*value.shape[:-1], more)
    if name.endswith(POSITIONS):
        new = new + torch.arange(1, more + 1, dtype=value.dtype, device=value.device)
    elif name not in REPEATED:
        new = torch.full_like(new, int(name.endswith(MASK)))
    return torch.cat([value, new], dim=-1)


class CacheMark:
    """A moment of a Transformers cache to return to, even if a forward was interrupted between two layers, or between keys and values.

    Empty layers, and those that drop what leaves a window, are copied; others are cropped.
    """

    def __init__(self, cache: Cache):
        self.layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", [])
        self.marked = [_marked(layer) for layer in self.layers]

    def restore(self) -> None:
        """Return the cache to the marked moment."""
        del self.layers[len(self.marked) :]  # made on first use
        for layer, mark in zip(self.layers, self.marked, strict=True):
            if isinstance(mark, dict):
                vars(layer).update(mark)
            elif (surplus := int(layer.get_seq_length()) - mark) > 0:
                values = layer.values
                layer.crop(-surplus)
                if not isinstance(layer, StaticLayer):
                    layer.values = values[..., :mark, :]


def _marked(layer: CacheLayerMixin) -> int | dict[str, object]:
    """Return a layer's length, or its attributes if it cannot be cropped to a length."""
    drops = hasattr(layer, "sliding_window") or hasattr(layer, "conv_states") or not hasattr(layer, "get_seq_length")
    if not isinstance(layer, StaticLayer) and (drops or layer.get_seq_length() == 0):
        return tree_map_only(torch.Tensor, torch.clone, dict(vars(layer)))
    return int(layer.get_seq_length())


class CroppingModel:
    """One row on Transformers' cache, rolled back with `crop`: encoder-decoders, convolution states, a cache passed in.

    The cache has Transformers' layout, in which a token hidden by the mask (padding, a hole) takes a slot. `lengths` and `feed` count only the
    visible tokens, as elsewhere in this package.
    """

    needs_prefill = outlives_call = True

    def __init__(self, model: PreTrainedModel, model_kwargs: ModelInputs, input_ids: torch.Tensor):
        """Take `model_kwargs` as prepared by `generate` (cache, encoder outputs, masks); `input_ids` (1, width): the prompt with hidden tokens."""
        base = base_of(model)
        self.model, self.kwargs = model, dict(model_kwargs)
        self.cache: Cache = self.kwargs[CACHE]
        self.device, self.known, self.keeps_logits = device_of(base), tokens_known(base), facts_of(base).keeps_logits
        for name in ("logits_to_keep", "cache_position"):
            self.kwargs.pop(name, None)
        self.growing = GrowingInputs(self.kwargs, base.config.is_encoder_decoder, self.device)
        self.prompt = input_ids.to(self.device)
        for layer in getattr(self.cache, "layers", ()):
            # A layer that keeps the whole prompt despite its window; the prompt arrives here in two forwards.
            if hasattr(layer, "set_prefill_length"):
                layer.set_prefill_length(self.prompt.shape[1])
        mask = self.growing.mask
        self.seen = list(range(self.prompt.shape[1])) if mask is None else mask[0].nonzero()[:, 0].tolist()
        held = int(self.cache.get_seq_length())  # a static cache returns the tensor that it counts in
        self.ids = self.prompt[:, :held]
        self.lengths = [sum(place < held for place in self.seen)]
        self.reads_whole = facts_of(base).rope is not None
        self.fresh = True
        self.mark, self.drafting = CacheMark(self.cache), False

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        tokens = tokens.to(self.device).clamp(max=self.known - 1)  # as in RowModel
        width, wide = tokens.shape[1], self.prompt.shape[1]
        if keep != 0 and not self.drafting:  # after an error the caller's cache ends with the prompt
            self.mark, self.drafting = CacheMark(self.cache), True
        if self.fresh and keep != 0:  # a prompt of one token has no prefill, so this forward itself may be rolled back
            self.cache.activate_past_recording()
        start, end = self.ids.shape[1], self._places(self.lengths[0] + width)
        later = max(end - max(start, wide), 0)  # how many of `tokens` lie after the prompt
        self.ids = torch.cat([self.ids, self.prompt[:, start:end], tokens[:, width - later :]], dim=1)
        extra: dict[str, object] = {}
        if self.keeps_logits and keep is not None and keep < end - start:
            extra["logits_to_keep"] = max(keep, 1)
        given = {"is_first_iteration": self.fresh, **self.kwargs, **self.growing.up_to(end), **extra}
        inputs = self.model.prepare_inputs_for_generation(self.ids, next_sequence_length=end - start, **given)
        out = self.model(**inputs, return_dict=True)
        if self.fresh:
            # Not before the prefill: recording would keep every state of the prompt.
            self.fresh = False
            self.cache.activate_past_recording()
        self.lengths = [self.lengths[0] + width]
        return out.logits[:, out.logits.shape[1] - (width if keep is None else keep) :]

    def _places(self, length: int) -> int:
        """Return how many cache slots the first `length` ≥ 1 tokens of the text take, hidden ones included."""
        if length <= len(self.seen):
            return self.seen[length - 1] + 1
        return self.prompt.shape[1] + length - len(self.seen)

    def rollback(self, lengths: Sequence[int]) -> None:
        surplus = self.lengths[0] - lengths[0]
        if surplus == 0:  # perhaps nothing was fed, and a cache without recorded tokens refuses `crop`
            return
        self.cache.crop(-surplus)
        self.ids = self.ids[:, : self.ids.shape[1] - surplus]
        self.lengths = list(lengths)

    def select(self, rows: Sequence[int]) -> None:
        assert list(rows) == [0], "a cropped cache has one row"

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache:
        return self.cache
