"""Interface of a model with its cache, the growing inputs of a prompt, and marks of a Transformers cache."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map_only
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from .introspection import base_of


ModelInputs = dict[str, Any]  # of a forward, by argument name: tensors, caches, flags


class NotJoined(Exception):
    """Rows of several calls cannot be decoded as one batch; the message gives the reason."""


class NotInRows(ValueError):
    """A model cannot be decoded in rows, so that this package's loop cannot run it."""

    def __init__(self, model: PreTrainedModel, reason: str):
        self.reason = f"{type(base_of(model)).__name__} cannot be decoded in rows ({reason})"
        super().__init__(
            f"{self.reason}: enable the target and pass lossy_policy=… to its generate, one prompt at a time"
        )


class CachedModel(Protocol):
    """Interface that the engine needs of a target or a draft."""

    lengths: list[int]
    device: torch.device
    reads_whole: bool  # a prompt must be read in one forward, for its rotary frequencies depend on its length
    needs_prefill: bool  # a prompt needs a separate forward before the first block

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        """Run `tokens` (B, Q), the first `counts[b]` of row b being real, after the cached ones.

        Returns the logits of the last `keep` positions, (B, keep, V); None: of all Q; 0: logits that must not be read.
        """

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop everything after each row's first `lengths[b]` tokens."""

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""

    def export(self, rows: int, mask: torch.Tensor | None) -> Cache | None:
        """Return the cache in the form that Transformers can continue from, or None where it does not hold a single
        text.

        `rows`: the rows that the call began with; `mask` (rows, width): the prompt tokens that are not hidden.
        """


class TargetModel(CachedModel, Protocol):
    """A target, whose Transformers model reports read."""

    model: PreTrainedModel


MASK, POSITIONS = "attention_mask", "position_ids"
REPEATED, ZERO = ("token_type_ids", "moe_mm_token_type_ids"), ("mm_token_type_ids",)
GROWING = (MASK, POSITIONS, *REPEATED, *ZERO)


class GrowingInputs:
    """The mask, positions and token types of a prompt (…, width), extended as `generate` extends them when the text
    grows."""

    def __init__(self, model_kwargs: ModelInputs, encoder_decoder: bool, device: torch.device):
        """Move them from `model_kwargs` to `device`. An encoder-decoder's `attention_mask` belongs to its encoder and
        stays."""
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
    """A moment of a Transformers cache to return to, even if a forward was interrupted between two layers, or between
    keys and values.

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
