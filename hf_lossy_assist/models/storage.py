"""Storage of keys and values that outlives a call: CUDA graphs read and write at the addresses that they were recorded with.

A model keeps what its calls give back, and lends it to the next one of the same shape; nothing is lent to two calls at once.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch


# Of the bytes of a model's weights, what it may keep besides them, and what any model may: graphs whose storage is larger than that,
# long texts in large batches, are not recorded, and cost what their launches cost.
SHARE, LEAST = 0.25, 1 << 28


class Shape(NamedTuple):
    """What a call needs alike to be lent storage of another one."""

    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    inference: bool  # made in inference mode, where alone it may be written to
    stream: int  # of the device: work of the call before may still be under way on it


@dataclass(eq=False)
class Shelf:
    """Keys and values of one shape: (rows, heads, capacity, d) of each layer."""

    shape: Shape
    tensors: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Pool:
    """What a model keeps while no call has it, the least recently used first."""

    def __init__(self, weights: int):
        """`weights`: bytes of the model's own."""
        self.limit, self.free, self._lock = max(LEAST, int(SHARE * weights)), list[Shelf](), Lock()

    def take(self, shape: Shape) -> Shelf:
        """A shelf of this shape that nobody else has, a new one if need be."""
        with self._lock:
            found = next((shelf for shelf in self.free if shelf.shape == shape), None)
            if found is None:
                return Shelf(shape)
            self.free.remove(found)
            return found

    def put(self, shelves: list[Shelf]) -> None:
        """Keep these, and drop what has not been used for longest where all of it is too much."""
        with self._lock:
            self.free += shelves
            while sum(shelf.bytes for shelf in self.free) > self.limit:
                del self.free[0]


_pools: WeakKeyDictionary[Any, Pool] = WeakKeyDictionary()


def pool_of(model: Any) -> Pool:
    """A model's pool, which goes with it."""
    if model not in _pools:
        _pools[model] = Pool(sum(p.nbytes for p in model.parameters()))
    return _pools[model]


class Loan:
    """What one call has of a model's pool, until it gives it back."""

    def __init__(self, model: Any, layers: int):
        self._pool, self._layers, self._shelves = pool_of(model), layers, dict[Shape, Shelf]()

    def take(self, place: tuple[int, str], like: torch.Tensor, capacity: int) -> torch.Tensor | None:
        """Zeros (B, heads, capacity, d) for rows such as `like`'s (B, heads, any, d), at the same address in each call that asks for as much.

        `place`: the layer's number, and "keys" or "values". None where all layers' would be more than the pool keeps.
        """
        size = (*like.shape[:2], capacity, like.shape[3])
        if 2 * self._layers * size[0] * size[1] * size[2] * size[3] * like.element_size() > self._pool.limit:
            return None
        stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
        shape = Shape(size[0], capacity, like.dtype, like.device, torch.is_inference_mode_enabled(), stream)
        shelf = self._shelves.get(shape) or self._shelves.setdefault(shape, self._pool.take(shape))
        kept = shelf.tensors.get(place)
        if kept is not None and kept.shape == size:
            return kept.zero_()  # whatever was there: a hidden slot has weight 0, but 0 · NaN would still be NaN
        made = shelf.tensors[place] = like.new_zeros(size)
        # Unguarded: at another address a graph is recorded again, and not compiled again.
        torch._dynamo.mark_static_address(made, guard=False)
        return made

    def give_back(self) -> None:
        """Let later calls have it; the caller's own views of it must not be used any more."""
        shelves, self._shelves = list(self._shelves.values()), {}
        self._pool.put(shelves)
