"""A draft model that attends to the first and the last tokens of a text only, so that a drafted token costs the same however long the text is.

The first tokens ("sinks") take attention that has nowhere else to go: Xiao et al., "Efficient Streaming Language Models with Attention Sinks"
(huggingface.co/papers/2309.17453). Keys stay at their places of the text, rotated as they were written. Drafts are verified, so a window changes
only how many of their tokens are accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..uploads import on_device
from ..validation import check_int, is_int, shown
from .architecture import Architecture
from .cached_model import NotJoined
from .compat import takes_positions
from .encoder_decoder import reads_encoder
from .introspection import base_of, has_fixed_rows
from .masks import Columns, Masks
from .probe import why_not_rows
from .row_cache import LayerKind, RowCache
from .row_model import RowModel


SINKS = 4  # StreamingLLM's
CHUNK = 256  # most tokens of a forward, and slots that a draft may write before those that it may be rolled back to are lost


class DraftWindow(NamedTuple):
    """The part of a text that a draft model sees before each token: the latest `last` tokens, itself included, and the first `sinks`."""

    last: int
    sinks: int = SINKS

    @classmethod
    def of(cls, given: object) -> "DraftWindow | None":
        """Return the window for `draft_window=`: a number of tokens, or a pair `(last, sinks)`. Raises: `TypeError` or `ValueError`, one line."""
        if given is None:
            return None
        pair = (given, SINKS) if is_int(given) else given
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise TypeError(f"draft_window: expected a number of tokens, or (last, sinks), got {shown(given)}")
        last, sinks = (int(part) if is_int(part) else part for part in pair)
        check_int("draft_window", last, 1)
        check_int("draft_window: sinks", sinks, 0)
        return cls(last, sinks)


def why_not_windowed(model: PreTrainedModel) -> str | None:
    """Return why a draft model cannot have a window; None if it can."""
    base = base_of(model)
    reason = why_not_rows(base)
    if reason is not None:
        return reason
    facts = Architecture.of(base)
    reasons = {
        "it keeps a recurrent state": facts.keeps_states,
        "it reads an encoder": reads_encoder(base),
        "it attends in chunks": facts.chunk is not None,
        "its forward takes no position_ids": not takes_positions(base),
        "its RoPE changes with the length of the text": facts.rope is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class RingCache(RowCache):
    """Token i is at slot i while there is room; then those after the sinks share a ring, in which each overwrites the one `ring` tokens earlier."""

    def __init__(self, layers: int | Sequence[LayerKind], sinks: int, ring: int):
        super().__init__(layers, sinks + ring)
        self.sinks, self.ring = sinks, ring
        self.lasts: torch.Tensor | None = (
            None  # (B, 1): the last token that the planned forward writes, if the ring is in use
        )

    @property
    def size(self) -> int:
        return self.sinks + self.ring

    def plan(
        self,
        starts: Sequence[int],
        width: int,
        device: torch.device,
        counts: Sequence[int] | None = None,
        records: bool = True,
    ) -> torch.Tensor:
        self.lasts, end = None, max(starts) + width
        if end <= self.size:
            return super().plan(starts, width, device)
        places = on_device(starts, device)[:, None] + torch.arange(width, device=device)
        self.rows, self.lasts = torch.arange(len(starts), device=device)[:, None], places[:, -1:]
        self.slots = torch.where(places < self.sinks, places, self.sinks + (places - self.sinks) % self.ring)
        self._see(0, self.size)
        self.end = end
        return places

    def tokens_at(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the token at each slot (n,) after the planned forward, (1 or B, n); negative where none was written."""
        if self.lasts is None:
            return slots[None]
        found = self.lasts - (self.lasts - slots) % self.ring
        return torch.where(slots < self.sinks, slots, found.masked_fill(found < self.sinks, -1))


class WindowMasks(Masks):
    """The masks of a windowed model; as without a window while every token sees all."""

    def __init__(self, facts: Architecture, window: DraftWindow, cache: RingCache):
        super().__init__(facts)
        self.window, self.cache = window, cache

    @property
    def counts_holes(self) -> bool:
        return self.cache.end > self.window.last

    def of(
        self, slots: torch.Tensor, visible: int, rows: int, capacity: int
    ) -> torch.Tensor | dict[str, torch.Tensor | None] | None:
        if not self.facts.windows or not self.counts_holes:
            return super().of(slots, visible, rows, capacity)
        tokens = self.cache.tokens_at(torch.arange(visible, device=slots.device))[:, None, None]
        back = slots[:, None, :, None] - tokens  # (B, 1, Q, visible)
        seen = (tokens >= 0) & (back >= 0) & ((back < self.window.last) | (tokens < self.window.sinks))
        lowest, masks = torch.finfo(self.facts.dtype).min, dict[str, torch.Tensor]()
        for kind, width in self.facts.windows.items():
            hidden = ~seen if width is None else ~(seen & (back < width))
            masks[kind] = torch.zeros_like(hidden, dtype=self.facts.dtype).masked_fill_(hidden, lowest)
        return self.bundle(masks, rows)


class WindowedRowModel(RowModel):
    """A draft model on a `RingCache`. It reads long inputs in chunks; what a rollback would need and the ring has lost is read again."""

    cache: RingCache
    why_eager = "the draft has a window"

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        limit: int,
        vocabulary: int | None = None,
        types: torch.Tensor | None = None,
        *,
        window: DraftWindow,
    ):
        super().__init__(model, rows, limit, vocabulary, types)
        self.window = window
        self.cache = RingCache(self.cache.kinds, window.sinks, window.last + CHUNK)
        self.masks = WindowMasks(self.facts, window, self.cache)
        self.packs, self.needs_prefill = False, True
        self.written = [0] * rows  # end of each row's latest write

    def feed(self, tokens: torch.Tensor, counts: Sequence[int], keep: int | None = None) -> torch.Tensor:
        width, found = tokens.shape[1], list[torch.Tensor]()
        first = width - (width if keep is None else keep)  # whose logits are returned
        for begin in range(0, width, CHUNK):
            part = tokens[:, begin : begin + CHUNK]
            end = begin + part.shape[1]
            real = [min(max(count - begin, 0), part.shape[1]) for count in counts]
            ends = [length + part.shape[1] for length in self.lengths]
            if end > first or any(real):
                found.append(super().feed(part, real, min(max(end - first, 0), part.shape[1])))
                self.written = [max(pair) for pair in zip(self.written, ends, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def stand_at(self, columns: Columns | None) -> None:
        """Ignore the columns of the prompts: a draft's windows count the tokens of its text."""

    def rollback(self, lengths: Sequence[int]) -> None:
        lost = [end - self.cache.ring for end in self.written]  # tokens before it are overwritten, except the sinks
        needed = [max(length - self.window.last + 1, self.window.sinks) for length in lengths]
        held = [length if n >= gone else 0 for length, n, gone in zip(lengths, needed, lost, strict=True)]
        self.written = [end if length else 0 for end, length in zip(self.written, held, strict=True)]
        super().rollback(held)

    def select(self, rows: Sequence[int]) -> None:
        super().select(rows)
        self.written = [self.written[row] for row in rows]

    def fresh(self, rows: int, limit: int) -> "WindowedRowModel":
        if self.types is not None or has_fixed_rows(base_of(self.model)):
            raise NotJoined(
                f"{type(base_of(self.model)).__name__}: it reads token_type_ids, or adapters are named for each row"
            )
        out = WindowedRowModel(self.model, rows, limit, window=self.window)
        out.narrow = self.narrow
        return out

    def insert(
        self, places: Sequence[int], other: RowModel, rows: Sequence[int], tokens: Sequence[int] | None = None
    ) -> None:
        assert isinstance(other, WindowedRowModel) and tokens is None
        super().insert(places, other, rows, [min(other.written[row], self.cache.size) for row in rows])
        self.written += [0] * (len(self.lengths) - len(self.written))
        for place, row in zip(places, rows, strict=True):
            self.lengths[place], self.written[place] = other.lengths[row], other.written[row]

    def reserve(self, tokens: int) -> None:
        super().reserve(min(tokens, self.cache.size))
