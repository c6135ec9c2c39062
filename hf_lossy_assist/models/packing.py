"""Rows of different length in one forward without padding: their tokens side by side, and attention row by row.

Everything in a decoder but attention treats tokens one by one, so a block of which row b needs `counts[b]` tokens runs as one
sequence of Σ counts tokens. Attention alone puts them back into (B, Q): `packed_attention` does, under a name of its own among
Transformers' attention functions. A config belongs to all threads that use its model, so under that name a forward that is
not packed is an ordinary one.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .introspection import NAME, ORDINARY


_layout: ContextVar["Layout | None"] = ContextVar(
    "layout", default=None
)  # of the packed forward under way in this thread
_columns: ContextVar[torch.Tensor | None] = ContextVar(
    "columns", default=None
)  # (B, n) of each row's tokens, where they are padded on the left
_forwards: Counter[int] = Counter()  # packed ones under way in all threads, by the `id` of their config
_lock = threading.Lock()


class Layout:
    """Where each token of a packed sequence belongs: row `rows[n]`, place `places[n]`, (N,) int64 each."""

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
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """`query` (1, heads, N, d) of a packed sequence, `key` and `value` (B, heads, slots, d) → (1, N, heads, d)."""
    layout, attention = _layout.get(), ALL_ATTENTION_FUNCTIONS[ORDINARY]
    if layout is None:  # another thread's
        return attention(module, query, key, value, attention_mask, **kwargs)
    padded = layout.pad(query.transpose(1, 2)).transpose(1, 2)  # (B, heads, Q, d)
    out, weights = attention(module, padded, key, value, attention_mask, **kwargs)
    return layout.pack(out), weights


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])  # without it no mask is made at all


def unpacked(states: torch.Tensor) -> torch.Tensor:
    """States from inside a forward as the padded block has them, (B, Q, …), whether it is packed or not."""
    layout, columns = _layout.get(), _columns.get()
    if columns is not None:
        return states[torch.arange(len(columns), device=states.device)[:, None], columns.to(states.device)]
    return states if layout is None else layout.pad(states, layout.width)


@contextmanager
def padded_left(mask: torch.Tensor | None) -> Iterator[None]:
    """Forwards here take rows side by side as `generate` has them; `mask` (B, Q): 0 where a token is hidden, None: nowhere."""
    token = _columns.set(None if mask is None else mask.eq(0).long().argsort(dim=1, stable=True))
    try:
        yield
    finally:
        _columns.reset(token)


@contextmanager
def packed(config: Any, layout: Layout) -> Iterator[None]:
    """Forwards of the model of `config`, which has `ORDINARY` attention, take a packed sequence here."""
    token, counted = _layout.set(layout), False
    try:  # around all that is to be undone: a stop from the keyboard may come between any two lines
        with _lock:
            _forwards[id(config)] += 1
            counted = True
            config._attn_implementation = NAME
        yield
    finally:
        with _lock:
            _forwards[id(config)] -= counted
            if not _forwards[id(config)]:
                del _forwards[id(config)]
                config._attn_implementation = ORDINARY
        _layout.reset(token)
