"""Replacement of Transformers functions, in modelling files and in modules of a model, during forwards of this package;
packed forwards.

Both are shared by all threads. The first forward installs a replacement, and the last one running, in any thread,
restores the original. A replacement checks `current` and calls the original unless its caller is a forward of this
package.

Rows of different lengths run in one forward without padding, as one sequence of their Σ `counts[b]` tokens: except for
attention, a decoder treats tokens independently. `packed_attention`, registered as an attention function of
Transformers, restores the shape (B, Q).
"""

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..tensors import on_device
from .introspection import ORDINARY, PACKED


class Layout:
    """Positions of a packed sequence's tokens in the padded block: row `rows[n]`, column `places[n]`, (N,) int64
    each."""

    def __init__(self, counts: Sequence[int], width: int, device: torch.device, causal: bool = False):
        """Take the number of each row's tokens, the `width` of the padded block, and whether all cached tokens are of
        this block."""
        self.shape, self.width, self.causal = (len(counts), max(counts)), width, causal  # shape: (B, Q)
        sizes = on_device(counts, device)
        self.rows = torch.repeat_interleave(torch.arange(len(counts), device=device), sizes, output_size=sum(counts))
        first = sizes.cumsum(dim=0) - sizes
        self.places = torch.arange(sum(counts), device=device) - first[self.rows]

    def pack(self, padded: torch.Tensor) -> torch.Tensor:
        """Return (B, Q, …) as (1, N, …)."""
        return padded[self.rows, self.places][None]

    def pad(self, packed: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Return (1, N, …) as (B, Q or `width`, …), with zeros where a row has no token."""
        batch, longest = self.shape
        out = packed.new_zeros(batch, longest if width is None else width, *packed.shape[2:])
        out[self.rows, self.places] = packed[0]
        return out


class Patch(NamedTuple):
    """An attribute of a module or modelling file, and its replacement during forwards that have this patch."""

    owner: object
    name: str
    by: Any  # a function called as `by(forward, original, *args, **kwargs)`; or a plain value

    @property
    def key(self) -> tuple[int, str]:
        return id(self.owner), self.name

    def replacement(self, original: object) -> object:
        """Return the replacement of `original` for all threads."""
        if not callable(self.by) or not callable(original):
            return self.by

        @functools.wraps(original)
        def run(*args: object, **kwargs: object) -> object:
            forward = _current.get()
            if forward is None or self.key not in forward.patched:
                return original(*args, **kwargs)
            return self.by(forward, original, *args, **kwargs)

        return run


@dataclass(frozen=True)
class Forward:
    """One forward of this package, as replaced functions see it."""

    cache: Any = None  # the `RowCache` in use
    positions: torch.Tensor | None = None  # of the tokens, (1 or B, Q)
    layout: Layout | None = None  # of a packed sequence
    columns: torch.Tensor | None = None  # (B, n) of each row's tokens, where rows are padded on the left
    patched: frozenset[tuple[int, str]] = frozenset()  # keys of the active patches


_current: ContextVar[Forward | None] = ContextVar("current", default=None)
_lock = threading.Lock()
_running: Counter[tuple[int, str]] = Counter()  # forwards running in all threads, by patch key
_originals: dict[tuple[int, str], object] = {}
ABSENT = object()


def current() -> Forward | None:
    """Return the forward of this package that is running in this thread, or None."""
    return _current.get()


@contextmanager
def running(forward: Forward, patches: Sequence[Patch] = ()) -> Iterator[None]:
    """Run one forward in this thread with these patches; a nested one inherits the outer layout and patches."""
    outer = _current.get() or Forward()
    keys = outer.patched | {patch.key for patch in patches}
    token = _current.set(replace(forward, patched=keys, layout=forward.layout or outer.layout))
    try:
        with installed(patches):
            yield
    finally:
        _current.reset(token)


@contextmanager
def installed(patches: Sequence[Patch]) -> Iterator[None]:
    """Replace attributes, for all threads, until the last context with the same patch ends."""
    counted = []
    # Inside `try` from the start: a KeyboardInterrupt may come between any two lines.
    try:
        with _lock:
            for patch in patches:
                _running[patch.key] += 1
                counted.append(patch)
                if patch.key not in _originals:
                    replacement = patch.replacement(getattr(patch.owner, patch.name))
                    # A method of the class is not in the module's dict, unless somebody (accelerate, say) has replaced
                    # it there.
                    _originals[patch.key] = vars(patch.owner).get(patch.name, ABSENT)
                    vars(patch.owner)[patch.name] = replacement
        yield
    finally:
        with _lock:
            for patch in counted:
                _running[patch.key] -= 1
                if not _running[patch.key]:
                    del _running[patch.key]
                    original = _originals.pop(patch.key, None)  # None: it could not be replaced
                    if original is ABSENT:
                        vars(patch.owner).pop(patch.name, None)
                    elif original is not None:
                        vars(patch.owner)[patch.name] = original


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend from `query` (1, heads, N, d) of a packed sequence to `key` and `value` (B, heads, slots, d) → (1, N,
    heads, d)."""
    attention, layout = ALL_ATTENTION_FUNCTIONS[ORDINARY], (current() or Forward()).layout
    if layout is None:  # a call from another thread
        return attention(module, query, key, value, attention_mask, **kwargs)
    padded = layout.pad(query.transpose(1, 2)).transpose(1, 2)  # (B, heads, Q, d)
    out, weights = attention(module, padded, key, value, None if layout.causal else attention_mask, **kwargs)
    return layout.pack(out), weights


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS[ORDINARY])  # without this no mask is made


def unpacked(states: torch.Tensor) -> torch.Tensor:
    """Return states from inside a forward, packed or not, in the shape of the padded block, (B, Q, …)."""
    forward = current() or Forward()
    if forward.columns is not None:
        columns = forward.columns.to(states.device)
        return states[torch.arange(len(columns), device=states.device)[:, None], columns]
    return states if forward.layout is None else forward.layout.pad(states, forward.layout.width)


def padded_left(mask: torch.Tensor | None) -> AbstractContextManager[None]:
    """Run forwards on left-padded rows, as `generate` does; `mask` (B, Q): 0 where a token is hidden, None: nowhere."""
    return running(Forward(columns=None if mask is None else mask.eq(0).long().argsort(dim=1, stable=True)))


def packed(config: PreTrainedConfig, layout: Layout) -> AbstractContextManager[None]:
    """Run forwards of the model with this `config`, whose attention is `ORDINARY`, on a packed sequence."""
    return running(Forward(layout=layout), [Patch(config, "_attn_implementation_internal", PACKED)])
