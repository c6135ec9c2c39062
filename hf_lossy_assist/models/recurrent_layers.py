"""Layers of a `RowCache` with more than keys and values: recurrent states and convolution windows, which cannot be
overwritten; index keys.

A forward replaces them and records their previous values and its inputs. Where a row keeps only some of a block's
tokens, its window is cut from the inputs, and the recurrence alone is run again over those tokens (`recurrence.py`).
One-token forwards, as a draft model runs, leave a state after each, from which each row takes one.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .recurrence import ForwardStep, LayerSnapshot, RestorePoint, zeros_like
from .row_cache import LayerKind, RowCache, RowLayer, Rows


States = dict[int, torch.Tensor | None]  # by number within a layer


class RowStates(LinearAttentionCacheLayerMixin):
    """One layer's recurrent states, (B, …) each, and convolution windows, (B, channels, K)."""

    is_initialized = False  # it has no keys and values
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, int | None]
    device: torch.device
    dtype: torch.dtype

    def __init__(self, owner: RowCache, layer_idx: int, states: int = 1):
        """Take the layer's `layer_idx` in the model, and its number of `states`."""
        super().__init__(number_of_states=states)
        assert owner.log is not None, "a cache of layers with states has a log"
        self.log, self.number = owner.log, layer_idx
        self.record_past = True  # else a one-token convolution would overwrite the window itself
        self.snapshots: list[list[LayerSnapshot]] = []  # of each step, for each state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: a forward's results define the shapes."""

    def open(self, points: Sequence[RestorePoint] | None, step: ForwardStep) -> None:
        """Begin a forward at the states in `points`; None: at those after the last forward."""
        self._restore(points)
        states = range(self.number_of_states)
        self.snapshots.append([LayerSnapshot(self.conv_states[i], self.recurrent_states[i]) for i in states])
        if step.width == 1:  # kernels for one token write in place
            for by_layer in (self.conv_states, self.recurrent_states):
                by_layer.update({i: None if state is None else state.clone() for i, state in by_layer.items()})

    def settle(self, points: Sequence[RestorePoint] | None) -> None:
        """Make a rollback final, and drop the recorded steps."""
        self._restore(points)
        self.snapshots = []

    def close(self) -> None:
        """Record the states after the last step, before another begins or rows are rolled back."""
        for i, last in enumerate(self.snapshots[-1] if self.snapshots else ()):
            last.window_after, last.state_after = self.conv_states[i], self.recurrent_states[i]

    def _restore(self, points: Sequence[RestorePoint] | None) -> None:
        for i in range(self.number_of_states):
            if points is not None and self.has_previous_state[i]:
                windows, states = zip(*(self._at(point, i) for point in points), strict=True)
                self.conv_states[i], self.recurrent_states[i] = _merge(windows, points), _merge(states, points)

    def _at(self, point: RestorePoint, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if point.step is None:
            return zeros_like(self.conv_states[i]), zeros_like(self.recurrent_states[i])
        if point.step < 0:
            return self.conv_states[i], self.recurrent_states[i]
        return self.snapshots[point.step][i].at(point)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> torch.Tensor:
        """Take a block's convolution inputs (B, channels, Q); return them with the previous window in front."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before, step = self.conv_states[state_idx], self.log.steps[-1]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], size)
        inputs = torch.cat([before, conv_states], dim=-1)
        if step.records:
            self.snapshots[-1][state_idx].inputs = inputs
        self.conv_states[state_idx] = step.ends.window(inputs, size)
        self.has_previous_state[state_idx], self.conv_kernel_size[state_idx] = True, size
        self.device, self.dtype = inputs.device, inputs.dtype
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object
    ) -> torch.Tensor:
        """Store the state (B, …) after a block."""
        step, call = self.log.steps[-1], self.log.call
        if step.width > 1 and call is None and (step.records or not step.is_even):
            raise RuntimeError("its recurrence is in no function that is known, so it cannot be run again")
        self.snapshots[-1][state_idx].call, self.log.call = call, None
        self.recurrent_states[state_idx], self.has_previous_state[state_idx] = recurrent_states, True
        return recurrent_states

    def _pairs(self, other: "RowStates") -> list[tuple[States, int, torch.Tensor | None]]:
        """Return this layer's states with the number and state in `other`, for each kind and number."""
        kinds = (self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)
        return [(states, i, state) for states, source in kinds for i, state in source.items()]

    def copy_from(self, other: "RowStates", rows: Rows, tokens: int | None = None) -> None:
        """Take over the states of these rows of `other`. `tokens`: see `RowLayer.copy_from`;
        a state always covers all tokens."""
        for states, i, state in self._pairs(other):
            if state is not None:
                state = state[rows.to(state.device) if isinstance(rows, torch.Tensor) else rows]
            states[i] = state if tokens is None or state is None else state.clone()
        self.has_previous_state, self.conv_kernel_size = dict(other.has_previous_state), dict(other.conv_kernel_size)
        self.device, self.dtype = other.device, other.dtype

    def resize(self, rows: int, like: "RowStates") -> None:
        for states, i, state in self._pairs(like):
            old = states[i]
            if old is None and state is not None:
                states[i] = state.new_zeros(rows, *state.shape[1:])
            elif old is not None and len(old) < rows:
                states[i] = torch.cat([old, old.new_zeros(rows - len(old), *old.shape[1:])])
        for i, has_state in like.has_previous_state.items():
            self.has_previous_state[i] |= has_state

    def copy_rows(self, slots: torch.Tensor, rows: torch.Tensor, tokens: int, other: "RowStates") -> None:
        for states, i, state in self._pairs(other):
            old = states[i]
            if old is not None:
                states[i] = new = old.clone()  # the old tensor may be shared
                new[slots.to(new.device)] = 0 if state is None else state[rows.to(state.device)]

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        for states, i, state in self._pairs(self):
            if self.has_previous_state[i] and state is not None:
                update = out.update_conv_state if states is self.conv_states else out.update_recurrent_state
                update(state, self.number, i)

    def adopt(self, layer: CacheLayerMixin, columns: torch.Tensor) -> None:
        """Copy a layer of Transformers' cache; hidden tokens on the left of a row have not changed its states."""
        for i in range(self.number_of_states):
            if layer.has_previous_state[i]:
                self.has_previous_state[i], size = True, layer.conv_kernel_size[i]
                window, state = layer.conv_states[i], layer.recurrent_states[i]
                self.conv_states[i] = None if window is None else window[..., -size:].clone()
                self.recurrent_states[i] = None if state is None else state.clone()


def _merge(pieces: Sequence[torch.Tensor | None], points: Sequence[RestorePoint]) -> torch.Tensor | None:
    """Combine `pieces` (B, …) by taking each point's rows from its part."""
    first = pieces[0]
    if first is None or len(pieces) == 1:
        return first
    out = first.clone()
    for piece, point in zip(pieces[1:], points[1:], strict=True):
        assert piece is not None, "one layer's states are all there, or none"
        rows = point.rows.to(out.device)
        out[rows] = piece[rows]
    return out


class RowStatesAndKeys(RowLayer, RowStates):
    """A layer with both states and keys and values, such as Falcon-H1's."""

    def __init__(self, owner: RowCache, layer_idx: int, states: int = 1):
        RowLayer.__init__(self, owner, layer_idx)
        RowStates.__init__(self, owner, layer_idx, states)

    def copy_from(self, other: "RowStatesAndKeys", rows: Rows, tokens: int | None = None) -> None:
        RowLayer.copy_from(self, other, rows, tokens)
        RowStates.copy_from(self, other, rows, tokens)

    def resize(self, rows: int, like: "RowStatesAndKeys") -> None:
        RowLayer.resize(self, rows, like)
        RowStates.resize(self, rows, like)

    def copy_rows(self, slots: torch.Tensor, rows: torch.Tensor, tokens: int, other: "RowStatesAndKeys") -> None:
        RowLayer.copy_rows(self, slots, rows, tokens, other)
        RowStates.copy_rows(self, slots, rows, tokens, other)

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        RowLayer.export_to(self, out, length, seen)
        RowStates.export_to(self, out, length, seen)

    def adopt(self, layer: CacheLayerMixin, columns: torch.Tensor) -> None:
        RowLayer.adopt(self, layer, columns)
        RowStates.adopt(self, layer, columns)


class IndexedRowLayer(RowLayer):
    """A layer of sparse attention (DeepSeek V3.2), whose tokens attend to those with the best index keys: these are in
    a further layer, `IndexKeys`."""

    @property
    def index(self) -> RowLayer:
        layers = self.owner.layers
        return layers[self.number + len(layers) // 2]

    def update_indexer(self, keys: torch.Tensor) -> torch.Tensor:
        """Write a block's index keys, (B, Q, d); return those of all tokens, (B, visible, d)."""
        return self.index.update(keys[:, None], keys[:, None, :, :0])[0][:, 0]

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        super().export_to(out, length, seen)
        if self.index.is_initialized:
            out.update_indexer(self.index.states_of(length, seen)[0][:, 0], self.number)

    def adopt(self, layer: CacheLayerMixin, columns: torch.Tensor) -> None:
        super().adopt(layer, columns)
        if layer.indexer_keys is not None:
            index = columns.to(layer.indexer_keys.device)[..., None]
            self.update_indexer(layer.indexer_keys.gather(1, index.expand(-1, -1, layer.indexer_keys.shape[-1])))


class IndexKeys(RowLayer):
    """Index keys, as keys of one head beside empty values."""

    def export_to(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Do nothing: the layer itself exports them."""


# Absent in earlier releases.
Dummy: Any = getattr(cache_utils, "DummyLayer", object)
Indexed: Any = getattr(cache_utils, "DynamicIndexedLayer", object)


class NoStates(Dummy):
    """A layer without cache, such as an MLP."""

    def __init__(self, owner: RowCache, layer_idx: int):
        super().__init__()
        self.is_initialized = False

    def _do_nothing(self, *args: object) -> None:
        """Do nothing: there is nothing to copy."""

    copy_from = resize = copy_rows = export_to = adopt = _do_nothing


KINDS: dict[type, type] = {
    DynamicLayer: RowLayer,
    DynamicSlidingWindowLayer: RowLayer,
    Indexed: IndexedRowLayer,
    LinearAttentionLayer: RowStates,
    LinearAttentionAndFullAttentionLayer: RowStatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: RowStatesAndKeys,
    Dummy: NoStates,
}


def layers_of(config: PreTrainedConfig) -> list[LayerKind] | None:
    """Return constructors of a `RowCache`'s layers for a model with this config, or None if a kind is unknown."""
    layers = DynamicCache(config=config).layers
    if not all(type(layer) in KINDS for layer in layers):
        return None
    kinds = [(KINDS[type(layer)], getattr(layer, "number_of_states", None)) for layer in layers]
    layer_kinds: list[LayerKind] = [kind if states is None else partial(kind, states=states) for kind, states in kinds]
    return layer_kinds + [IndexKeys] * len(layer_kinds) if IndexedRowLayer in layer_kinds else layer_kinds


def keep_states(layers: Sequence[LayerKind] | None) -> bool:
    """Return whether any of these layers keeps more than keys and values."""
    return any(isinstance(kind, partial) for kind in layers or ())
