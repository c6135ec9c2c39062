"""Keys and values of a `StaticRowModel`, in storage of a fixed capacity that outlives the call where CUDA graphs rely
on its addresses.

A model keeps the storage that its calls return, and lends it to the next call with the same shape, never to two calls
at once.
"""

from collections.abc import Sequence
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..row_cache import RowCache, RowLayer


LEAST_CAPACITY = (
    256  # slots of the smallest storage; a little more than a power of two costs up to 8 % of a round (docs/log.md)
)
# Storage that a model may keep: this share of the bytes of its weights, or at least so many bytes. Graphs with more
# storage (long texts in large batches) are not recorded, so each kernel is launched separately.
SHARE, LEAST_BYTES = 0.25, 1 << 28

Place = tuple[int, str]  # the layer's number, and "keys" or "values"


class BufferShape(NamedTuple):
    """Properties that two calls must share to use the same storage."""

    rows: int
    capacity: int
    dtype: torch.dtype
    device: torch.device
    inference: bool  # created in inference mode, the only mode in which it may then be written
    stream: int  # CUDA stream: the previous call's work may still be running on it


class BufferPool:
    """Buffers of a model that no call is using, the least recently used first: (rows, heads, capacity, d) for each
    place."""

    def __init__(self, weights: int):
        """`weights`: bytes of the model's weights."""
        self.limit, self._lock = max(LEAST_BYTES, int(SHARE * weights)), Lock()
        self.free: list[tuple[BufferShape, dict[Place, torch.Tensor]]] = []

    def take(self, shape: BufferShape) -> dict[Place, torch.Tensor]:
        """Return free buffers of this shape, or an empty dict."""
        with self._lock:
            for index, (other, buffers) in enumerate(self.free):
                if other == shape:
                    del self.free[index]
                    return buffers
        return {}

    def put(self, leased: dict[BufferShape, dict[Place, torch.Tensor]]) -> None:
        """Return buffers to the pool, and drop the least recently used ones if it exceeds its limit."""
        with self._lock:
            self.free += leased.items()
            while self.bytes > self.limit:
                del self.free[0]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for _, buffers in self.free for tensor in buffers.values())


_pools: WeakKeyDictionary[torch.nn.Module, BufferPool] = WeakKeyDictionary()


def pool_of(model: torch.nn.Module) -> BufferPool:
    """Return a model's pool, which lives as long as the model."""
    if model not in _pools:
        _pools[model] = BufferPool(sum(p.nbytes for p in model.parameters()))
    return _pools[model]


class BufferLease:
    """Buffers that one call holds of a model's pool until it returns them."""

    def __init__(self, model: torch.nn.Module, layers: int):
        self._pool, self._layers = pool_of(model), layers
        self._leased: dict[BufferShape, dict[Place, torch.Tensor]] = {}

    def take(self, key: Place, like: torch.Tensor, capacity: int) -> torch.Tensor | None:
        """Return zeros (B, heads, capacity, d), B and heads as in `like` (B, heads, any, d), at the same address in
        each call that takes as much.

        Returns None if the buffers of all layers would exceed the pool's limit.
        """
        size = (*like.shape[:2], capacity, like.shape[3])
        if 2 * self._layers * size[0] * size[1] * size[2] * size[3] * like.element_size() > self._pool.limit:
            return None
        stream = torch.cuda.current_stream(like.device).cuda_stream if like.is_cuda else 0
        shape = BufferShape(size[0], capacity, like.dtype, like.device, torch.is_inference_mode_enabled(), stream)
        if shape not in self._leased:
            self._leased[shape] = self._pool.take(shape)
        buffers = self._leased[shape]
        if key in buffers and buffers[key].shape == size:
            return buffers[key].zero_()  # a hidden slot has weight 0, but 0 · NaN would still be NaN
        buffer = buffers[key] = like.new_zeros(size)
        # Without a guard: at another address a graph is recorded again, but not recompiled.
        torch._dynamo.mark_static_address(buffer, guard=False)
        return buffer

    def give_back(self) -> None:
        """Return the buffers to the pool; views of them must not be used any more."""
        leased, self._leased = self._leased, {}
        self._pool.put(leased)


_warm: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()  # by model: the capacity that `warmup` compiled


class StaticRowCache(RowCache):
    """A `RowCache` whose capacity is a power of two, and at least that of a `warmup`, so that blocks after texts of
    different lengths share one shape."""

    lease: BufferLease | None = None  # of storage that outlives the call, where graphs rely on its addresses
    model: torch.nn.Module  # whose it is

    def storage(self, key: Place, like: torch.Tensor, written: int) -> torch.Tensor:
        leased = None if self.lease is None else self.lease.take(key, like, self.capacity)
        return super().storage(key, like, written) if leased is None else leased

    def _replace(self, layer: RowLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Give a layer new storage for rows shaped like these keys and values."""
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
        return max(LEAST_CAPACITY, _warm.get(self.model, 0), 1 << (visible - 1).bit_length())

    def warm(self, tokens: int) -> None:
        """Reserve `tokens`, in later calls of the model too."""
        self.reserve(tokens)
        _warm[self.model] = max(self.capacity, _warm.get(self.model, 0))

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in each row."""
        if tokens > self.capacity:
            self.capacity = self.capacity_for(tokens)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.grow()

    def allocate(self, likes: Sequence[tuple[torch.Tensor, torch.Tensor]], rows: int, tokens: int) -> None:
        """Allocate the storage now. `likes`: keys and values of any one row and slot for each layer, (1, heads, 1,
        d)."""
        self.capacity = self.capacity_for(tokens)
        for layer, (keys, values) in zip(self.layers, likes, strict=True):
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            self._replace(layer, keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1))
