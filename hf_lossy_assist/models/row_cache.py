"""RowCache: keys and values in preallocated storage where each row has its own length.

Row b's token number i has its key at slot i, whatever the other rows hold. A forward writes its tokens at slots
`starts[b] … starts[b] + Q − 1` and a mask hides everything after each token. Rolling back is forgetting: the caller starts
the next write earlier and rejected tokens are overwritten. No crop, no copy, and rows of a batch need not agree.
"""

from collections.abc import Sequence

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


STEP = 256  # storage grows by doubling, and by no less than this many slots
SPARE = 48  # slots behind the longest text, for the padding of a block's short rows


class RowLayer(CacheLayerMixin):
    """One layer's storage, (B, heads, capacity, d). Written where `RowCache.plan` said."""

    is_sliding = False  # sliding layers keep the same storage; only their mask differs

    def __init__(self, owner: "RowCache", number: int):
        """`number`: which layer of the model it is."""
        super().__init__()
        self.owner, self.number = owner, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        written = 0 if self.owner.slots is not None else self.owner.visible
        self.keys = self.owner.storage((self.number, "keys"), key_states, written)
        self.values = self.owner.storage((self.number, "values"), value_states, written)
        self.is_initialized = True

    def grow(self) -> None:
        """Have the owner's capacity, which is larger by now."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self.owner.storage((self.number, name), old, old.shape[2])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def have(self, rows: int, like: "RowLayer") -> None:
        """Have the owner's capacity and so many rows, one more than before at most; `like`: what storage looks like, if there is none yet."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
            self.keys, self.values = (its.new_zeros(rows, *its.shape[1:]) for its in (like.keys, like.values))
        if self.keys.shape[2] < self.owner.capacity:
            self.grow()
        if len(self.keys) < rows:
            self.keys, self.values = (torch.cat([its, torch.zeros_like(its[:1])]) for its in (self.keys, self.values))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, heads, Q, d) at the planned slots; return everything up to the furthest row's end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner, visible = self.owner, self.owner.visible
        if self.keys.shape[2] < owner.capacity:
            self.grow()
        if owner.slots is None or owner.rows is None:  # all rows write at the same place
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


class RowCache(Cache):
    """One `RowLayer` for each layer of a model, and the plan of the coming forward."""

    def __init__(self, layers: int, limit: int):
        """`limit`: no row will ever be longer than this many tokens."""
        self.limit, self.capacity = limit, 0
        self.start = self.visible = 0
        self.rows: torch.Tensor | None = None  # (B, 1), where `slots` are not None
        self.slots: torch.Tensor | None = None  # (B, Q), or None when all rows start at `start`
        super().__init__(layers=[RowLayer(self, number) for number in range(layers)])

    def plan(self, starts: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
        """Say where the next forward of `width` tokens writes; returns the `position_ids`, (1 or B, width) int64."""
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

    def row(self, b: int) -> "RowCache":
        """Row b alone on the same storage: what is written there is written here. Neither may grow afterwards."""
        own = RowCache(len(self.layers), self.capacity)
        own.capacity = self.capacity
        for mine, layer in zip(own.layers, self.layers, strict=True):
            mine.keys, mine.values = layer.keys[b : b + 1], layer.values[b : b + 1]
            mine.dtype, mine.device, mine.is_initialized = layer.dtype, layer.device, True
        return own

    def first(self, tokens: int) -> "RowCache":
        """A copy of so many tokens of each row, with no room for more."""
        out = RowCache(len(self.layers), self.limit)
        out.capacity = tokens
        for mine, layer in zip(out.layers, self.layers, strict=True):
            if layer.is_initialized:
                mine.keys, mine.values = layer.keys[:, :, :tokens].clone(), layer.values[:, :, :tokens].clone()
                mine.dtype, mine.device, mine.is_initialized = layer.dtype, layer.device, True
        return out

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    def take(self, b: int, other: "RowCache", tokens: int, rows: int) -> None:
        """Row b, the last of `rows` or one of them, has the first tokens of the only row of `other`, as many as `tokens`. They are copied."""
        # No more than the text can come to: what was read beside others may have room for theirs.
        room = max(tokens, min(other.capacity, other.limit + SPARE))
        self.limit, self.capacity = max(self.limit, other.limit), max(self.capacity, room)
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if theirs.is_initialized or mine.is_initialized:
                mine.have(rows, theirs if theirs.is_initialized else mine)
        self.copy(b, other, 0, tokens)

    def copy(self, b: int, other: "RowCache", a: int, tokens: int) -> None:
        """Row b's first tokens are those of row a in `other`, as many as `tokens`."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if theirs.is_initialized:
                mine.keys[b, :, :tokens] = theirs.keys[a, :, :tokens]
                mine.values[b, :, :tokens] = theirs.values[a, :, :tokens]


def visibility(positions: torch.Tensor, visible: int, window: int | None, chunk: int | None) -> torch.Tensor:
    """Which of the `visible` slots each query may see, (1 or B, 1, Q, visible) bool, from `position_ids` (1 or B, Q)."""
    slots = torch.arange(visible, device=positions.device)
    query = positions[:, None, :, None]
    seen = slots <= query
    if window is not None:
        seen = seen & (query - slots < window)
    if chunk is not None:
        seen = seen & (query // chunk == slots // chunk)
    return seen
