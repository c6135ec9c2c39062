"""Rows of different length in one forward without padding: their tokens side by side, and attention row by row.

Everything in a decoder but attention treats tokens one by one, so a block of which row b needs `counts[b]` tokens runs as one sequence of
Σ counts tokens. Attention alone puts them back into (B, Q): `packed_attention` does, under a name among Transformers' attention functions.
A config belongs to all threads that use its model, so under that name a forward that is not packed is an ordinary one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .introspection import ORDINARY, PACKED
from .patching import Forward, Patch, current, running


class Layout:
    """The places of a packed sequence's tokens in the padded block: row `rows[n]`, column `places[n]`, (N,) int64 each."""

    def __init__(self, counts: Sequence[int], width: int, device: torch.device):
        """`counts[b]` tokens of row b, one of them at least; `width`: of the padded block."""
        self.shape, self.width = (len(counts), max(counts)), width  # (B, Q)
        number = torch.tensor(counts, device=device)
        self.rows = torch.repeat_interleave(torch.arange(len(counts), device=device), number, output_size=sum(counts))
        first = number.cumsum(dim=0) - number
        self.places = torch.arange(sum(counts), device=device) - first[self.rows]

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """(B, Q, …) → (1, N, …)."""
        return padded[self.rows, self.places][None]

    def pad(self, packed: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """(1, N, …) → (B, Q or `width`, …), zeros where a row has no token."""
        batch, longest = self.shape
        out = packed.new_zeros(batch, longest if width is None else width, *packed.shape[2:])
        out[self.rows, self.places] = packed[0]
        return out


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from `query` (1, heads, N, d) of a packed sequence to `key` and `value` (B, heads, slots, d) → (1, N, heads, d)."""
    attention, layout = ALL_ATTENTION_FUNCTIONS[ORDINARY], (current() or Forward()).layout
    if layout is None:  # another thread's
        return attention(module, query, key, value, attention_mask, **kwargs)
    padded = layout.pad(query.transpose(1, 2)).transpose(1, 2)  # (B, heads, Q, d)
    out, weights = attention(module, padded, key, value, attention_mask, **kwargs)
    return layout.pack(out), weights


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])  # without it no mask is made at all


def unpacked(states: torch.Tensor) -> torch.Tensor:
    """Return states from inside a forward as the padded block has them, (B, Q, …), whether it is packed or not."""
    forward = current() or Forward()
    if forward.columns is not None:
        columns = forward.columns.to(states.device)
        return states[torch.arange(len(columns), device=states.device)[:, None], columns]
    return states if forward.layout is None else forward.layout.pad(states, forward.layout.width)


def padded_left(mask: torch.Tensor | None) -> AbstractContextManager[None]:
    """Run forwards on rows side by side as `generate` has them; `mask` (B, Q): 0 where a token is hidden, None: nowhere."""
    return running(Forward(columns=None if mask is None else mask.eq(0).long().argsort(dim=1, stable=True)))


def packed(config: PreTrainedConfig, layout: Layout) -> AbstractContextManager[None]:
    """Run forwards of the model of `config`, which has `ORDINARY` attention, on a packed sequence."""
    return running(Forward(layout=layout), [Patch(config, "_attn_implementation_internal", PACKED)])
