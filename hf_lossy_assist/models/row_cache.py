"""RowCache: keys and values in preallocated storage, where each row has a separate length.

Row b's token number i has its key at slot i, whatever the other rows hold. A forward writes its tokens at slots
`starts[b] … starts[b] + Q − 1`, and a mask hides everything after each token. A rollback costs nothing: the caller
starts the next write earlier and rejected tokens are overwritten. There is no crop and no copy, and rows of a batch
need not agree.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from ..tensors import on_device
from .recurrence import RestorePoint, StepLog


Rows = torch.Tensor | slice
States: TypeAlias = list[tuple[torch.Tensor, torch.Tensor] | None]  # keys and values of each layer that has them
STEP = 256  # storage grows by doubling, but by at least this many slots
SPARE = 48  # slots after the longest text, for padding of short rows in a block


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, (B, heads, capacity, d), written where `RowCache.plan` determined."""

    is_sliding = False  # sliding layers have the same storage; only their mask differs

    def __init__(self, owner: "RowCache", layer_idx: int):
        """Take the layer's `layer_idx` in the model."""
        super().__init__()
        self.owner, self.number = owner, layer_idx

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        written = 0 if self.owner.slots is not None else self.owner.visible
        if self.owner.batch is not None:  # a packed sequence has one row
            key_states, value_states = (x.expand(self.owner.batch, -1, -1, -1) for x in (key_states, value_states))
        self.hold(
            self.owner.storage((self.number, "keys"), key_states, written),
            self.owner.storage((self.number, "values"), value_states, written),
        )

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def grow(self) -> None:
        """Grow to the owner's larger capacity."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self.owner.storage((self.number, name), old, old.shape[2])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def resize(self, rows: int, like: "RowLayer") -> None:
        """Grow to the owner's capacity and `rows` rows, at least as many as before;
        `like`: a layer to take shapes from if this one is empty."""
        if not self.is_initialized and like.is_initialized:
            self.hold(like.keys[:0], like.values[:0])
        if self.is_initialized and (len(self.keys) < rows or self.keys.shape[2] < self.owner.capacity):
            old, capacity = (self.keys, self.values), max(self.keys.shape[2], self.owner.capacity)
            self.hold(*(stored.new_zeros(rows, stored.shape[1], capacity, stored.shape[3]) for stored in old))
            for new, stored in zip((self.keys, self.values), old, strict=True):
                new[: len(stored), :, : stored.shape[2]] = stored

    def copy_from(self, other: "RowLayer", rows: Rows, tokens: int | None = None) -> None:
        """Take over these rows of `other`: a copy of their first `tokens`, or all of them;
        a slice then shares the storage."""
        if other.is_initialized:
            selected = (states[rows] for states in (other.keys, other.values))
            self.hold(*(states if tokens is None else states[:, :, :tokens].clone() for states in selected))

    def copy_rows(self, slots: torch.Tensor, rows: torch.Tensor, tokens: int, other: "RowLayer") -> None:
        """Copy the first `tokens` of `rows` (n,) in `other` to the rows at `slots` (n,)."""
        if other.is_initialized and tokens:
            for new, old in ((self.keys, other.keys), (self.values, other.values)):
                prefix = old[:, :, :tokens]
                prefix = prefix if len(rows) == len(old) == 1 else prefix.index_select(0, rows.to(old.device))
                new[:, :, :tokens].index_copy_(0, slots.to(new.device), prefix)

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Append the only row's first tokens to a Transformers cache, see `RowModel.export`."""
        if self.is_initialized:  # unlike a layer that attends only to an image, in a prompt of text
            out.update(*self.states_of(length, seen), self.number)

    def states_of(self, length: int, seen: torch.Tensor | None) -> list[torch.Tensor]:
        """Return keys and values as in `export_to`."""
        states = [stored[:, :, :length].clone() for stored in (self.keys, self.values)]
        if seen is not None:
            hidden = torch.nn.functional.pad(seen.to(self.keys.device), (0, length - int(seen.sum())), value=True)
            spread = [stored.new_zeros(*stored.shape[:2], len(hidden), stored.shape[3]) for stored in states]
            for new, old in zip(spread, states, strict=True):
                new[:, :, hidden] = old
            states = spread
        return states

    def adopt(self, layer: CacheLayerMixin, columns: torch.Tensor) -> None:
        """Copy a layer of Transformers' cache, in which row b's tokens are at `columns[b]`, (B, n) int64, followed by
        hidden ones."""
        if layer.keys is not None and layer.keys.numel():
            # A sliding window has dropped its first positions, which no token attends to any more.
            forgotten = self.owner.adopted - layer.keys.shape[2]
            spread = [torch.nn.functional.pad(old, (0, 0, forgotten, 0)) for old in (layer.keys, layer.values)]
            index = columns.to(layer.keys.device)[:, None, :, None]
            self.update(*(old.gather(2, index.expand(-1, old.shape[1], -1, old.shape[3])) for old in spread))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, heads, Q, d) at the planned slots; return everything up to the end of the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, visible = self.owner, self.owner.visible
        if self.keys.shape[2] < owner.capacity:
            self.grow()
        if owner.slots is None or owner.rows is None:  # all rows write at the same slots
            self.keys[:, :, owner.start : visible] = key_states
            self.values[:, :, owner.start : visible] = value_states
        else:
            rows, slots = owner.rows.to(self.keys.device), owner.slots.to(self.keys.device)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def get_mask_sizes(self, query_length: int, *args: object) -> tuple[int, int]:
        return self.owner.visible, 0

    def get_seq_length(self, *args: object) -> int:
        return self.owner.start

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name in Transformers before 5.20


LayerKind = Callable[["RowCache", int], CacheLayerMixin]  # constructs a cache's layer with this number


class RowCache(Cache):
    """A layer for each layer of a model, `RowLayer` or another kind, and the plan of the next forward."""

    def __init__(self, layers: int | Sequence[LayerKind], limit: int, keeps_states: bool = False):
        """Take `layers`: their number, or a constructor for each; `limit`: the most tokens of a row.

        `keeps_states`: some are of `recurrent_layers.py`.
        """
        self.kinds: list[LayerKind] = [RowLayer] * layers if isinstance(layers, int) else list(layers)
        self.log = StepLog() if keeps_states else None
        self.limit, self.capacity = limit, 0
        self.start = self.visible = self.adopted = 0
        self.end = 0  # the last place of a token that the planned forward writes, and one
        self.rows: torch.Tensor | None = None  # (B, 1), unless `slots` is None
        self.slots: torch.Tensor | None = None  # (B, Q); None: all rows start at `start`
        self.batch: int | None = None  # the number of rows of a packed sequence, whose storage may not exist yet
        super().__init__(layers=[kind(self, layer_idx) for layer_idx, kind in enumerate(self.kinds)])
        self.with_states: list[CacheLayerMixin] = [layer for layer in self.layers if hasattr(layer, "settle")]

    def like(self, limit: int) -> "RowCache":
        """Return an empty cache with the same kinds of layers."""
        return RowCache(self.kinds, limit, self.log is not None)

    def plan(
        self,
        starts: Sequence[int],
        width: int,
        device: torch.device,
        counts: Sequence[int] | None = None,
        records: bool = True,
    ) -> torch.Tensor:
        """Plan where the next forward of `width` tokens writes; return the `position_ids`, (1 or B, width) int64.

        `counts`: real tokens of each row, None: all; `records`: whether rows may be rolled back into the forward.
        """
        if self.log is not None:
            points = self._restore_points(self.log, starts, device)
            step = self.log.open(starts, [width] * len(starts) if counts is None else counts, width, records)
            for layer in self.with_states:
                layer.open(points, step)
        self._see(min(starts), max(starts) + width)
        if len(set(starts)) == 1:
            self.slots = None
            return torch.arange(self.start, self.visible, device=device)[None]
        first = on_device(starts, device)[:, None]
        self.rows = torch.arange(len(starts), device=device)[:, None]
        self.slots = first + torch.arange(width, device=device)
        return self.slots

    def plan_packed(self, rows: torch.Tensor, slots: torch.Tensor, start: int, visible: int, batch: int) -> None:
        """Plan that the next forward writes token n of a packed sequence of `batch` rows at slot `slots[n]` of row
        `rows[n]`, (N,) each."""
        self._see(start, visible)
        self.rows, self.slots, self.batch = rows[None], slots[None], batch

    def _see(self, start: int, visible: int) -> None:
        self.start, self.visible, self.end, self.batch = start, visible, visible, None
        if visible > self.capacity:
            self.capacity = self.capacity_for(visible)

    def plan_static(self, slots: torch.Tensor) -> None:
        """Plan that the next forward writes at `slots` (B, Q), all within the capacity, and attends to the whole
        capacity."""
        self.rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.slots, self.start, self.visible = slots, 0, self.capacity

    def forget_plan(self) -> None:
        """Release the plan's tensors after the forward."""
        self.rows = self.slots = None

    def capacity_for(self, visible: int) -> int:
        """Return the new capacity when `visible` slots are needed, more than there are."""
        return max(visible, min(self.limit + SPARE, max(2 * self.capacity, visible + STEP)))

    def storage(self, key: tuple[int, str], like: torch.Tensor, written: int) -> torch.Tensor:
        """Return `capacity` slots for rows like `like`'s (B, heads, any, d); the caller fills the first `written`.
        `key`: layer and name."""
        storage = like.new_empty(like.shape[0], like.shape[1], self.capacity, like.shape[3])
        # Zeros, since a hidden slot has weight 0, but 0 · NaN would still be NaN.
        storage[:, :, written:].zero_()
        return storage

    def settle(self, lengths: Sequence[int], device: torch.device) -> None:
        """Make a rollback to these lengths final. Only layers with states need it; keys are overwritten."""
        if self.log is not None and self.log.settled is not None:
            points = self._restore_points(self.log, lengths, device)
            for layer in self.with_states:
                layer.settle(points)
            self.log.settle(lengths)

    def _restore_points(self, log: StepLog, lengths: Sequence[int], device: torch.device) -> list[RestorePoint] | None:
        points = log.find(lengths, device)
        for layer in self.with_states:
            layer.close()
        return points

    def adopt(self, cache: Cache, mask: torch.Tensor | None, device: torch.device) -> list[int]:
        """Copy the rows of a Transformers cache; return their lengths. `mask` as in `RowModel.adopt`."""
        self.adopted, rows = int(cache.get_seq_length()), _rows_of(cache)
        seen = torch.ones(rows, self.adopted) if mask is None else mask[:, : self.adopted].ne(0)
        lengths: list[int] = seen.long().sum(dim=1).tolist()
        columns = (seen == 0).long().argsort(dim=1, stable=True)[:, : max(lengths)]  # visible ones first
        # Hidden entries end up after a row's tokens, where the next ones are written.
        self.plan([0] * rows, max(lengths), device, lengths, records=False)
        for layer, source in zip(self.layers, cache.layers, strict=False):  # not those of index keys
            layer.adopt(source, columns)
        if self.log is not None:
            self.log.settle(lengths)
            # The next forward begins with tokens that are not the prompt's.
            self.log.prompts = list(lengths)
            for layer in self.with_states:
                layer.settle(None)
        return lengths

    def row(self, b: int) -> "RowCache":
        """Return row b alone on the same storage, so writes to its keys appear in this cache, but not states.
        Neither may grow afterwards."""
        return self._part(slice(b, b + 1), self.capacity, self.capacity)

    def first(self, tokens: int) -> "RowCache":
        """Return a copy of the first `tokens` of each row, without spare capacity; with states, of all tokens."""
        return self._part(slice(None), self.limit, tokens, tokens)

    def _part(self, rows: slice, limit: int, capacity: int, tokens: int | None = None) -> "RowCache":
        out = self.like(limit)
        out.capacity = capacity
        for layer, source in zip(out.layers, self.layers, strict=True):
            layer.copy_from(source, rows, tokens)
        if out.log is not None and self.log is not None:
            out.log.copy_from(range(len(self.log.prompts))[rows], self.log)
        return out

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        for layer in self.layers:
            layer.copy_from(layer, rows)
        if self.log is not None:
            self.log.copy_from(rows.tolist(), self.log)

    def insert(
        self, slots: Sequence[int], other: "RowCache", rows: Sequence[int], tokens: Sequence[int], count: int
    ) -> None:
        """Copy the first `tokens[i]` of row `rows[i]` in `other` to the row at `places[i]`, growing to `count` rows."""
        self.limit, longest = max(self.limit, other.limit), max(tokens, default=0)
        if longest > self.capacity:
            self.capacity = self.capacity_for(longest)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.resize(count, source)
        self.copy(slots, other, rows, tokens)

    def part(self, row: int, start: int, end: int) -> States:
        """Copy a row's keys and values from token `start` to `end`, (1, heads, tokens, d) for each layer, or None for
        layers without any."""
        region = slice(row, row + 1), slice(None), slice(start, end)
        return [
            (layer.keys[region].clone(), layer.values[region].clone()) if layer.is_initialized else None
            for layer in self.layers
        ]

    def put(self, row: int, rows: int, start: int, pieces: States, tokens: int) -> None:
        """Write the first `tokens` of a `part` to row `row` of `rows`, from token `start` on."""
        for layer, states in zip(self.layers, pieces, strict=True):
            if states is not None:
                if not layer.is_initialized:
                    layer.hold(*(stored[:, :, :0].expand(rows, -1, -1, -1) for stored in states))
                layer.resize(rows, layer)
                for stored, new in zip((layer.keys, layer.values), states, strict=True):
                    stored[row, :, start : start + tokens] = new[0, :, :tokens]

    def copy(self, slots: Sequence[int], other: "RowCache", rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Copy the first `tokens[i]` of row `rows[i]` in `other` to the row at `places[i]`."""
        index, source_index = torch.tensor(slots), torch.tensor(rows)
        for layer, source in zip(self.layers, other.layers, strict=True):
            layer.copy_rows(index, source_index, max(tokens, default=0), source)
        if self.log is not None and other.log is not None:
            for slot, row, count in zip(slots, rows, tokens, strict=True):
                self.log.copy_row(slot, other.log, row, count)


def _rows_of(cache: Cache) -> int:
    """Return the number of texts in a Transformers cache."""
    states = [getattr(layer, "keys", None) for layer in cache.layers]
    for name in ("recurrent_states", "conv_states"):
        states += [state for layer in cache.layers for state in (getattr(layer, name, None) or {}).values()]
    return next((len(state) for state in states if isinstance(state, torch.Tensor) and state.numel()), 1)
