"""Keys and values for a `StaticRowModel`, in storage of a fixed capacity; where CUDA graphs rely on its addresses, it outlives the call.

A model keeps what its calls give back, and lends it to the next one of the same shape; nothing is lent to two calls at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..row_cache import RowCache, RowLayer


LEAST_CAPACITY = 256  # slots of the smallest storage, without ROOM
ROOM = 64  # slots beyond a power of two: the last rounds of a text of 2^n tokens would need storage, and a graph, of twice the size
# Of the bytes of a model's weights, what it may keep besides them, and what any model may: graphs whose storage is larger than that,
# long texts in large batches, are not recorded, and cost what their launches cost.
SHARE, LEAST_BYTES = 0.25, 1 << 28

Place = tuple[int, str]  # the layer's number, and "keys" or "values"


class BufferShape(NamedTuple):
    """The facts in which two calls must be alike for one to be lent storage of the other."""

    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    inference: bool  # made in inference mode, where alone it may be written to
    stream: int  # of the device: work of the call before may still be under way on it


class BufferPool:
    """Buffers of a model that no call has, the least recently used first: (rows, heads, capacity, d) for each place."""

    def __init__(self, weights: int):
        """`weights`: bytes of the model's own."""
        self.limit, self._lock = max(LEAST_BYTES, int(SHARE * weights)), Lock()
        self.free: list[tuple[BufferShape, dict[Place, torch.Tensor]]] = []

    def take(self, shape: BufferShape) -> dict[Place, torch.Tensor]:
        """Return buffers of this shape that nobody else has, none if need be."""
        with self._lock:
            for number, (other, buffers) in enumerate(self.free):
                if other == shape:
                    del self.free[number]
                    return buffers
        return {}

    def put(self, leased: dict[BufferShape, dict[Place, torch.Tensor]]) -> None:
        """Keep these, and drop what has not been used for longest where all of it is too much."""
        with self._lock:
            self.free += leased.items()
            while self.bytes > self.limit:
                del self.free[0]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, buffers in self.free for tensor in buffers.values())


_pools: WeakKeyDictionary[torch.nn.Module, BufferPool] = WeakKeyDictionary()


def pool_of(model: torch.nn.Module) -> BufferPool:
    """Return a model's pool, which goes with it."""
    if model not in _pools:
        _pools[model] = BufferPool(sum(p.nbytes for p in model.parameters()))
    return _pools[model]


class BufferLease:
    """The buffers that one call has of a model's pool, until it gives them back."""

    def __init__(self, model: torch.nn.Module, layers: int):
        self._pool, self._layers = pool_of(model), layers
        self._leased: dict[BufferShape, dict[Place, torch.Tensor]] = {}

    def take(self, place: Place, like: torch.Tensor, capacity: int) -> torch.Tensor | None:
        """Return zeros (B, heads, capacity, d) for rows such as `like`'s (B, heads, any, d), at the same address in each call that asks for as much.

        None where all layers' would be more than the pool keeps.
        """
        size = (*like.shape[:2], capacity, like.shape[3])
        if 2 * self._layers * size[0] * size[1] * size[2] * size[3] * like.element_size() > self._pool.limit:
            return None
        stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
        shape = BufferShape(size[0], capacity, like.dtype, like.device, torch.is_inference_mode_enabled(), stream)
        if shape not in self._leased:
            self._leased[shape] = self._pool.take(shape)
        buffers = self._leased[shape]
        if place in buffers and buffers[place].shape == size:
            return buffers[place].zero_()  # a hidden slot has weight 0, but 0 · NaN would still be NaN
        made = buffers[place] = like.new_zeros(size)
        # Unguarded: at another address a graph is recorded again, and not compiled again.
        torch._dynamo.mark_static_address(made, guard=False)
        return made

    def give_back(self) -> None:
        """Let later calls have them; views of them must not be used any more."""
        leased, self._leased = self._leased, {}
        self._pool.put(leased)


class StaticRowCache(RowCache):
    """A `RowCache` whose capacity is a power of two and `ROOM` for a draft: blocks of texts of many lengths have one shape."""

    lease: BufferLease | None = None  # of storage that outlives the call, where graphs rely on its addresses

    def storage(self, place: Place, like: torch.Tensor, written: int) -> torch.Tensor:
        leased = None if self.lease is None else self.lease.take(place, like, self.capacity)
        return super().storage(place, like, written) if leased is None else leased

    def _replace(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give a layer new storage for rows such as those of its keys and values."""
        layer.keys = self.storage((layer.number, "keys"), keys, 0)
        layer.values = self.storage((layer.number, "values"), values, 0)

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        for layer in self.layers if self.lease is not None else ():
            if layer.is_initialized:
                keys, values = layer.keys, layer.values
                self._replace(layer, keys, values)
                layer.keys.copy_(keys)
                layer.values.copy_(values)

    def capacity_for(self, visible: int) -> int:
        return ROOM + max(LEAST_CAPACITY, 1 << max(visible - ROOM - 1, 0).bit_length())

    def reserve(self, tokens: int) -> None:
        """Have room for `tokens` of each row, whatever `capacity` is now."""
        if tokens > self.capacity:
            self.capacity = self.capacity_for(tokens)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow()

    def sizes_up_to(self, tokens: int) -> list[int]:
        """Return the capacities that texts of `tokens` tokens, and shorter ones, come to."""
        sizes = [self.capacity_for(1)]
        while sizes[-1] < tokens:
            sizes.append(self.capacity_for(sizes[-1] + 1))
        return sizes

    @contextmanager
    def other(self, capacity: int) -> Iterator[None]:
        """Have empty storage of another size within this context; then it is as it was."""
        before, storage = self.capacity, [(layer.keys, layer.values) for layer in self.layers]
        contents = [
            (keys.clone(), values.clone()) for keys, values in storage
        ]  # a lease may return the same once more
        self.capacity = capacity
        for layer in self.layers:
            self._replace(layer, layer.keys, layer.values)
        try:
            yield
        finally:
            self.capacity = before
            for layer, tensors, content in zip(self.layers, storage, contents, strict=True):
                layer.keys, layer.values = (x.copy_(y) for x, y in zip(tensors, content, strict=True))

    def allocate(self, likes: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, tokens: int) -> None:
        """Have the storage at once. `likes`: of each layer, keys and values of any one row and slot, (1, heads, 1, d)."""
        self.capacity = self.capacity_for(tokens)
        for layer, (keys, values) in zip(self.layers, likes, strict=True):
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            self._replace(layer, keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
