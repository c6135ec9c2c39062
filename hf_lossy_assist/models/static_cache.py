"""Storage of a fixed capacity for a `StaticRowModel`: blocks of texts of many lengths have one shape."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .row_cache import RowCache
from .storage import Loan


LEAST = 256  # slots of the smallest storage


class StaticRowCache(RowCache):
    """A `RowCache` whose capacity is a power of two: blocks of texts of many lengths have one shape."""

    loan: Loan | None = None  # of storage that outlives the call, where graphs rely on its addresses

    def storage(self, place: tuple[int, str], like: torch.Tensor, written: int) -> torch.Tensor:
        kept = None if self.loan is None else self.loan.take(place, like, self.capacity)
        return super().storage(place, like, written) if kept is None else kept

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        for layer in self.layers if self.loan is not None else ():
            if layer.is_initialized:
                layer.keys, layer.values = (
                    self.storage((layer.number, name), states, 0).copy_(states)
                    for name, states in (("keys", layer.keys), ("values", layer.values))
                )

    def capacity_for(self, visible: int) -> int:
        return max(LEAST, 1 << (visible - 1).bit_length())

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` of each row, whatever `capacity` is now."""
        if tokens > self.capacity:
            self.capacity = self.capacity_for(tokens)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow()

    def sizes_up_to(self, tokens: int) -> list[int]:
        """The capacities that texts of `tokens` tokens, and shorter ones, come to."""
        sizes = [self.capacity_for(1)]
        while sizes[-1] < tokens:
            sizes.append(self.capacity_for(sizes[-1] + 1))
        return sizes

    @contextmanager
    def other(self, capacity: int) -> Iterator[None]:
        """Empty storage of another size for a while; then it is as it was."""
        before, kept = self.capacity, [(layer.keys, layer.values) for layer in self.layers]
        contents = [(keys.clone(), values.clone()) for keys, values in kept]  # what is lent may be the same once more
        self.capacity = capacity
        for layer in self.layers:
            layer.keys = self.storage((layer.number, "keys"), layer.keys, 0)
            layer.values = self.storage((layer.number, "values"), layer.values, 0)
        try:
            yield
        finally:
            self.capacity = before
            for layer, own, held in zip(self.layers, kept, contents, strict=True):
                layer.keys, layer.values = (x.copy_(content) for x, content in zip(own, held, strict=True))

    def allocate(self, likes: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, tokens: int) -> None:
        """Have the storage at once. `likes`: of each layer, keys and values of any one row and slot, (1, heads, 1, d)."""
        self.capacity = self.capacity_for(tokens)
        for layer, (keys, values) in zip(self.layers, likes, strict=True):
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            layer.keys, layer.values = (
                self.storage((layer.number, name), x.expand(rows, -1, -1, -1), 0)
                for name, x in (("keys", keys), ("values", values))
            )
