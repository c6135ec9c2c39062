"""One layer's keys and values in a `RowCache`, whose plan says where each row's are."""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


Rows = torch.Tensor | slice
# What a `RowCache` asks of each of its layers, of whatever kind.
ROW_METHODS = ("copy_from", "resize", "copy_row", "export_to", "adopt")


class RowLayer(CacheLayerMixin):
    """One layer's storage, (B, heads, capacity, d). Written where `RowCache.plan` said."""

    is_sliding = False  # sliding layers keep the same storage; only their mask differs

    def __init__(self, owner: Any, number: int):
        """Take `number`: which layer of the model it is."""
        super().__init__()
        self.owner, self.number = owner, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        written = 0 if self.owner.slots is not None else self.owner.visible
        self.hold(
            self.owner.storage((self.number, "keys"), key_states, written),
            self.owner.storage((self.number, "values"), value_states, written),
        )

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def grow(self) -> None:
        """Have the owner's capacity, which is larger by now."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = self.owner.storage((self.number, name), old, old.shape[2])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def resize(self, rows: int, like: "RowLayer") -> None:
        """Have the owner's capacity and so many rows, one more than before at most; `like`: what storage looks like, if there is none yet."""
        if not self.is_initialized and not like.is_initialized:
            return
        if not self.is_initialized:
            self.hold(*(states.new_zeros(rows, *states.shape[1:]) for states in (like.keys, like.values)))
        if self.keys.shape[2] < self.owner.capacity:
            self.grow()
        if len(self.keys) < rows:
            self.hold(*(torch.cat([states, torch.zeros_like(states[:1])]) for states in (self.keys, self.values)))

    def copy_from(self, other: "RowLayer", rows: Rows, tokens: int | None = None) -> None:
        """Hold what these rows of `other` hold: a copy of their first `tokens`, or all; those of a slice are on the same storage then."""
        if other.is_initialized:
            found = (states[rows] for states in (other.keys, other.values))
            self.hold(*(states if tokens is None else states[:, :, :tokens].clone() for states in found))

    def copy_row(self, b: int, a: int, tokens: int, other: "RowLayer") -> None:
        """Let row b's first tokens be those of row a in `other`."""
        if other.is_initialized:
            self.keys[b, :, :tokens] = other.keys[a, :, :tokens]
            self.values[b, :, :tokens] = other.values[a, :, :tokens]

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Put the only row's first tokens into a cache of Transformers', as `RowModel.export` says."""
        if not self.is_initialized:  # a layer that attends to a picture alone, of a text
            return
        states = [held[:, :, :length].clone() for held in (self.keys, self.values)]
        if seen is not None:
            places = torch.nn.functional.pad(seen.to(self.keys.device), (0, length - int(seen.sum())), value=True)
            spread = [held.new_zeros(*held.shape[:2], len(places), held.shape[3]) for held in states]
            for new, old in zip(spread, states, strict=True):
                new[:, :, places] = old
            states = spread
        out.update(*states, self.number)

    def adopt(self, layer: Any, columns: torch.Tensor) -> None:
        """Copy a layer of Transformers', of whose places row b's tokens are at `columns[b]`, (B, n) int64, what is hidden after them."""
        if layer.keys is not None and layer.keys.numel():
            # A sliding window has forgotten the first places, which nobody sees any more.
            forgotten = self.owner.adopted - layer.keys.shape[2]
            spread = [torch.nn.functional.pad(held, (0, 0, forgotten, 0)) for held in (layer.keys, layer.values)]
            places = columns.to(layer.keys.device)[:, None, :, None]
            self.update(*(held.gather(2, places.expand(-1, held.shape[1], -1, held.shape[3])) for held in spread))

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
