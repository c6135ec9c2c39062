"""One layer's keys and values in a `RowCache`, whose plan says where each row's are."""

from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """One layer's storage, (B, heads, capacity, d). Written where `RowCache.plan` said."""

    is_sliding = False  # sliding layers keep the same storage; only their mask differs

    def __init__(self, owner: Any, number: int):
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
        if not self.is_initialized and not like.is_initialized:
            return
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = like.dtype, like.device, True
            self.keys, self.values = (its.new_zeros(rows, *its.shape[1:]) for its in (like.keys, like.values))
        if self.keys.shape[2] < self.owner.capacity:
            self.grow()
        if len(self.keys) < rows:
            self.keys, self.values = (torch.cat([its, torch.zeros_like(its[:1])]) for its in (self.keys, self.values))

    def be_row(self, b: int, other: "RowLayer") -> None:
        """Hold what row b of `other` holds, on the same storage."""
        self.keys, self.values = other.keys[b : b + 1], other.values[b : b + 1]
        self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

    def be_first(self, tokens: int, other: "RowLayer") -> None:
        """Hold a copy of so many tokens of each row of `other`."""
        if other.is_initialized:
            self.keys, self.values = other.keys[:, :, :tokens].clone(), other.values[:, :, :tokens].clone()
            self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def copy_row(self, b: int, a: int, tokens: int, other: "RowLayer") -> None:
        """Row b's first tokens are those of row a in `other`."""
        if other.is_initialized:
            self.keys[b, :, :tokens] = other.keys[a, :, :tokens]
            self.values[b, :, :tokens] = other.values[a, :, :tokens]

    def hand_out(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Put the only row's first tokens into a cache of Transformers' own, as `RowModel.as_dynamic_cache` says."""
        if not self.is_initialized:  # a layer that attends to a picture alone, of a text
            return
        kept = [states[:, :, :length] for states in (self.keys, self.values)]
        if seen is None:
            out.update(*(states.clone() for states in kept), self.number)
            return
        places = torch.nn.functional.pad(seen.to(kept[0].device), (0, length - int(seen.sum())), value=True)
        spread = [states.new_zeros(*states.shape[:2], len(places), states.shape[3]) for states in kept]
        for new, old in zip(spread, kept, strict=True):
            new[:, :, places] = old
        out.update(*spread, self.number)

    def adopt(self, layer: Any, columns: torch.Tensor) -> None:
        """Copy a layer of Transformers' own, of whose places row b's tokens are at `columns[b]`, (B, n) int64, what is hidden behind them."""
        if layer.keys is not None and layer.keys.numel():
            # A sliding window has forgotten the first places, which nobody sees any more.
            forgotten = self.owner.adopted - layer.keys.shape[2]
            spread = [torch.nn.functional.pad(its, (0, 0, forgotten, 0)) for its in (layer.keys, layer.values)]
            places = columns.to(layer.keys.device)[:, None, :, None]
            self.update(*(its.gather(2, places.expand(-1, its.shape[1], -1, its.shape[3])) for its in spread))

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
