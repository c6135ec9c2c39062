"""Interface of a model with its cache, and the growing inputs of a prompt."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import Cache, PreTrainedModel

from .introspection import base_of


ModelInputs = dict[str, Any]  # of a forward, by argument name: tensors, caches, flags


class NotJoined(Exception):
    """Rows of several calls cannot be decoded as one batch; the message gives the reason."""


class NotInRows(ValueError):
    """A model cannot be decoded in rows, so that this package's loop cannot run it."""

    def __init__(self, model: PreTrainedModel, reason: str):
        reason += "; see models/quirks.py" * reason.startswith("a trial")
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
        inputs = {name: model_kwargs.pop(name, None) for name in names}
        self.given = {name: value.to(device) for name, value in inputs.items() if value is not None}
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
