"""RowCache: keys and values in preallocated storage where each row has its own length.

Row b's token number i has its key at slot i, whatever the other rows hold. A forward writes its tokens at slots
`starts[b] … starts[b] + Q − 1` and a mask hides everything after each token. Rolling back is forgetting: the caller starts
the next write earlier and rejected tokens are overwritten. No crop, no copy, and rows of a batch need not agree.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from transformers import Cache

from .recurrent.recording import recorded, run_again
from .recurrent.steps import History, Source
from .row_layer import RowLayer


STEP = 256  # storage grows by doubling, and by no less than this many slots
SPARE = 48  # slots behind the longest text, for the padding of a block's short rows


class RowCache(Cache):
    """A `RowLayer`, or a layer of another kind, for each layer of a model, and the plan of the coming forward."""

    def __init__(
        self,
        layers: int | Sequence[Callable[["RowCache", int], Any]],
        limit: int,
        recurrences: Sequence[Any] | None = None,
    ):
        """`layers`: their number, or what makes each of them; `limit`: no row will ever be longer than this many tokens.

        `recurrences`: of layers that keep states, as `recurrence.modules_of`.
        """
        self.kinds = [RowLayer] * layers if isinstance(layers, int) else list(layers)
        self.history = None if recurrences is None else History(recurrences)
        self.limit, self.capacity = limit, 0
        self.start = self.visible = self.adopted = 0
        self.rows: torch.Tensor | None = None  # (B, 1), where `slots` are not None
        self.slots: torch.Tensor | None = None  # (B, Q), or None when all rows start at `start`
        super().__init__(layers=[kind(self, number) for number, kind in enumerate(self.kinds)])

    def like(self, limit: int) -> "RowCache":
        """An empty cache of the same kind of model."""
        return RowCache(self.kinds, limit, None if self.history is None else self.history.modules)

    def plan(
        self,
        starts: Sequence[int],
        width: int,
        device: torch.device,
        counts: Sequence[int] | None = None,
        keeps: bool = True,
    ) -> torch.Tensor:
        """Say where the next forward of `width` tokens writes; returns the `position_ids`, (1 or B, width) int64.

        `counts`: how many of its tokens are real in each row, None being all; `keeps`: rows may be rolled back into it.
        """
        if self.history is not None:
            found = self._found(self.history, starts, device)
            step = self.history.open(starts, [width] * len(starts) if counts is None else counts, width, keeps)
            for layer in self.with_states:
                layer.open(found, step)
        self.start, self.visible = min(starts), max(starts) + width
        if self.visible > self.capacity:
            self.capacity = self.capacity_for(self.visible)
        if len(set(starts)) == 1:
            self.slots = None
            return torch.arange(self.start, self.visible, device=device)[None]
        first = torch.tensor(starts, device=device)[:, None]
        self.rows = torch.arange(len(starts), device=device)[:, None]
        self.slots = first + torch.arange(width, device=device)
        return self.slots

    def plan_packed(self, rows: torch.Tensor, slots: torch.Tensor, start: int, visible: int) -> None:
        """Say where the next forward of a packed sequence writes: token n at slot `slots[n]` of row `rows[n]`, (N,) int64 each.

        `start` and `visible`: the least slot of all rows to begin at, and the end of the furthest.
        """
        self.rows, self.slots, self.start, self.visible = rows[None], slots[None], start, visible
        if self.visible > self.capacity:
            self.capacity = self.capacity_for(self.visible)

    def plan_static(self, slots: torch.Tensor) -> None:
        """Say that the next forward writes at `slots` (B, Q), all of them within the capacity, and sees all of it."""
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.slots, self.start, self.visible = slots, 0, self.capacity

    def forget_plan(self) -> None:
        """The forward has run: let go of the tensors that said where."""
        self.rows = self.slots = None

    def capacity_for(self, visible: int) -> int:
        """How many slots to have where `visible` are needed, which is more than there are."""
        return max(visible, min(self.limit + SPARE, max(2 * self.capacity, visible + STEP)))

    def storage(self, place: tuple[int, str], like: torch.Tensor, written: int) -> torch.Tensor:
        """Room for `capacity` slots of rows such as `like`'s (B, heads, any, d), of which the caller fills the first `written` at once.

        `place`: the layer's number, and "keys" or "values".
        """
        storage = like.new_empty(like.shape[0], like.shape[1], self.capacity, like.shape[3])
        # Zeros, not garbage: a hidden slot has weight 0, but 0 · NaN would still be NaN.
        storage[:, :, written:].zero_()
        return storage

    @property
    def with_states(self) -> list[Any]:
        """The layers that keep more than keys and values."""
        return [layer for layer in self.layers if hasattr(layer, "settle")]

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward that was planned."""
        return nullcontext() if self.history is None else recorded(self.history)

    def settle(self, lengths: Sequence[int], device: torch.device) -> None:
        """Rows go on behind these many tokens each, and never before them: keys need no word of it, but states do."""
        if self.history is not None and self.history.settled is not None:
            found = self._found(self.history, lengths, device)
            for layer in self.with_states:
                layer.settle(found)
            self.history.close(lengths)

    def _found(self, history: History, lengths: Sequence[int], device: torch.device) -> list[Source] | None:
        """Where the states behind `lengths[b]` tokens of each row are; those that no forward left are found for all layers together."""
        found = history.find(lengths, device)
        for layer in self.with_states:
            layer.close()
        run_again(
            [[kept for layer in self.with_states for kept in layer.kept[s]] for s in range(len(history.steps))], found
        )
        return found

    def adopt(self, given: Cache, mask: torch.Tensor | None, device: torch.device) -> list[int]:
        """Copy the rows of a cache of Transformers' own; returns their lengths. `mask` as in `RowModel.adopt`."""
        self.adopted, rows = int(given.get_seq_length()), _rows_of(given)
        seen = torch.ones(rows, self.adopted) if mask is None else mask[:, : self.adopted].ne(0)
        lengths: list[int] = seen.long().sum(dim=1).tolist()
        columns = (seen == 0).long().argsort(dim=1, stable=True)[:, : max(lengths)]  # those of tokens first
        # What is hidden stands behind a row's own tokens, where the next ones are written.
        self.plan([0] * rows, max(lengths), device, lengths, keeps=False)
        for mine, theirs in zip(self.layers, given.layers, strict=True):
            mine.adopt(theirs, columns)
        if self.history is not None:
            self.history.close(lengths)
            # A prompt goes on with more than one token, or its token is a step of its own.
            self.history.prompts = list(lengths)
            for layer in self.with_states:
                layer.settle(None)
        return lengths

    def row(self, b: int) -> "RowCache":
        """Row b alone on the same storage: what is written there is written here, but for states. Neither may grow afterwards."""
        own = self.like(self.capacity)
        own.capacity = self.capacity
        for mine, layer in zip(own.layers, self.layers, strict=True):
            mine.be_row(b, layer)
        if own.history is not None and self.history is not None and self.history.settled is not None:
            own.history.be_rows([b], self.history)
        return own

    def first(self, tokens: int) -> "RowCache":
        """A copy of so many tokens of each row, with no room for more; with states, of all of them."""
        out = self.like(self.limit)
        out.capacity = tokens
        for mine, layer in zip(out.layers, self.layers, strict=True):
            mine.be_first(tokens, layer)
        if out.history is not None and self.history is not None and self.history.settled is not None:
            out.history.be_rows(range(len(self.history.settled)), self.history)
        return out

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        for layer in self.layers:
            layer.select(rows)
        if self.history is not None:
            self.history.select(rows.tolist())

    def take(self, b: int, other: "RowCache", tokens: int, rows: int) -> None:
        """Row b, the last of `rows` or one of them, has the first tokens of the only row of `other`, as many as `tokens`. They are copied."""
        # No more than the text can come to: what was read beside others may have room for theirs.
        room = max(tokens, min(other.capacity, other.limit + SPARE))
        self.limit, self.capacity = max(self.limit, other.limit), max(self.capacity, room)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.have(rows, theirs)
        self.copy(b, other, 0, tokens)

    def copy(self, b: int, other: "RowCache", a: int, tokens: int) -> None:
        """Row b's first tokens are those of row a in `other`, as many as `tokens`."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            mine.copy_row(b, a, tokens, theirs)
        if self.history is not None and other.history is not None:
            self.history.take(b, other.history, a, tokens)


def _rows_of(cache: Any) -> int:
    """How many texts a cache of Transformers' own holds."""
    kept = [getattr(layer, "keys", None) for layer in cache.layers]
    kept += [state for layer in cache.layers for state in getattr(layer, "recurrent_states", None) or []]
    kept += [state for layer in cache.layers for state in getattr(layer, "conv_states", None) or []]
    return next((len(its) for its in kept if isinstance(its, torch.Tensor) and its.numel()), 1)
