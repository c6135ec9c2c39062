"""Layers of a `RowCache` that keep what cannot be overwritten: the state of a recurrence and the window of a convolution.

A forward replaces them, and keeps what it began with and its inputs. Where a row keeps only some of a block's tokens, its window is cut
out of the inputs, and its state comes from the recurrence alone, run again over those tokens (`recurrence.py`). Forwards of one token,
a draft model's, leave a state behind each, of which each row takes its own.


Which layer of a `RowCache` stands for which of Transformers' own."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import Cache, DynamicCache, cache_utils
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..introspection import base_of
from ..row_layer import RowLayer
from .recording import Kept, joined, zeros_like
from .steps import Source, Step


class RowStates(LinearAttentionCacheLayerMixin):
    """One layer's states, (B, …) each, and its convolutions' windows, (B, channels, K)."""

    is_initialized = False  # it has no keys and values
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, Any]
    device: Any
    dtype: Any

    def __init__(self, owner: Any, number: int, states: int = 1):
        """`number`: which layer of the model it is; `states`: how many it keeps."""
        super().__init__(number_of_states=states)
        self.owner, self.number = owner, number
        self.record_past = True  # else a convolution of one token would write its window itself
        self.kept: list[list[Kept]] = []  # of each step, of each state

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: what a forward leaves has its shape."""

    def open(self, found: Sequence[Source] | None, step: Step) -> None:
        """A forward is about to run behind what `found` says, None being what the last one left."""
        self._go_to(found)
        self.kept.append([Kept(self.conv_states[i], self.recurrent_states[i]) for i in range(self.number_of_states)])
        if step.width == 1:  # kernels for one token write in place
            for states in (self.conv_states, self.recurrent_states):
                for i, its in states.items():
                    states[i] = None if its is None else its.clone()

    def settle(self, found: Sequence[Source] | None) -> None:
        """Forget what the steps kept."""
        self._go_to(found)
        self.kept = []

    def close(self) -> None:
        """Keep what the last step left: another begins, or rows are rolled back."""
        for i, last in enumerate(self.kept[-1] if self.kept else ()):
            last.window_behind, last.state_behind = self.conv_states[i], self.recurrent_states[i]

    def _go_to(self, found: Sequence[Source] | None) -> None:
        for i in range(self.number_of_states):
            if found is not None and self.has_previous_state[i]:
                parts = [self._at(source, i) for source in found]
                self.conv_states[i], self.recurrent_states[i] = (
                    joined([part[k] for part in parts], found) for k in (0, 1)
                )

    def _at(self, source: Source, i: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if source.step is None:
            return zeros_like(self.conv_states[i]), zeros_like(self.recurrent_states[i])
        if source.step < 0:
            return self.conv_states[i], self.recurrent_states[i]
        return self.kept[source.step][i].at(source)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Take a block's inputs (B, channels, Q) of a convolution; returns them with the window before them."""
        size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        before, step = self.conv_states[state_idx], self.owner.history.steps[-1]
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:2], size)
        inputs = torch.cat([before, conv_states], dim=-1)
        if step.keeps:
            self.kept[-1][state_idx].inputs = inputs
        self.conv_states[state_idx] = step.ends.window(inputs, size)
        self.has_previous_state[state_idx], self.conv_kernel_size[state_idx] = True, size
        self.device, self.dtype = inputs.device, inputs.dtype
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Take the state (B, …) behind a block."""
        history = self.owner.history
        step, call = history.steps[-1], history.call
        if step.width > 1 and call is None and (step.keeps or not step.is_even):
            raise RuntimeError("its recurrence is in no function that is known, so it cannot be run again")
        self.kept[-1][state_idx].call, history.call = call, None
        self.recurrent_states[state_idx], self.has_previous_state[state_idx] = recurrent_states, True
        return recurrent_states

    def be_row(self, b: int, other: "RowStates") -> None:
        """Hold what row b of `other` holds. What is fed to either from now on is not in the other."""
        self._be(other, lambda its: its[b : b + 1])

    def be_first(self, tokens: int, other: "RowStates") -> None:
        """Hold what `other` holds of all its tokens."""
        self._be(other, torch.clone)

    def _be(self, other: "RowStates", change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for mine, theirs in self._pairs(other):
            mine.update({i: None if its is None else change(its) for i, its in theirs.items()})
        self.has_previous_state, self.conv_kernel_size = dict(other.has_previous_state), dict(other.conv_kernel_size)
        self.device, self.dtype = other.device, other.dtype

    def _pairs(self, other: "RowStates") -> list[tuple[dict[int, Any], dict[int, Any]]]:
        return [(self.conv_states, other.conv_states), (self.recurrent_states, other.recurrent_states)]

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only, in this order."""
        self._be(self, lambda its: its[rows.to(its.device)])

    def have(self, rows: int, like: "RowStates") -> None:
        """Have so many rows, one more than before at most; `like`: what states look like, if there are none yet."""
        for mine, theirs in self._pairs(like):
            for i, its in theirs.items():
                if mine[i] is None and its is not None:
                    mine[i] = its.new_zeros(rows, *its.shape[1:])
                elif mine[i] is not None and len(mine[i]) < rows:
                    mine[i] = torch.cat([mine[i], torch.zeros_like(mine[i][:1])])
        for i, known in like.has_previous_state.items():
            self.has_previous_state[i] |= known

    def copy_row(self, b: int, a: int, tokens: int, other: "RowStates") -> None:
        """Row b holds what row a of `other` holds."""
        for mine, theirs in self._pairs(other):
            for i, its in theirs.items():
                if mine[i] is not None:
                    mine[i] = mine[i].clone()  # others may look at it
                    mine[i][b] = 0 if its is None else its[a]

    def hand_out(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        """Put the only row's states into a cache of Transformers' own."""
        for i in range(self.number_of_states):
            if self.has_previous_state[i] and self.conv_states[i] is not None:
                out.update_conv_state(self.conv_states[i], self.number, i)
            if self.has_previous_state[i] and self.recurrent_states[i] is not None:
                out.update_recurrent_state(self.recurrent_states[i], self.number, i)

    def adopt(self, layer: Any, columns: torch.Tensor) -> None:
        """Copy a layer of Transformers' own, where hidden tokens on the left of a row have changed no state."""
        for i in range(self.number_of_states):
            if layer.has_previous_state[i]:
                self.has_previous_state[i], size = True, layer.conv_kernel_size[i]
                window, state = layer.conv_states[i], layer.recurrent_states[i]
                self.conv_states[i] = None if window is None else window[..., -size:].clone()
                self.recurrent_states[i] = None if state is None else state.clone()


class RowStatesAndKeys(RowLayer, RowStates):
    """A layer with states and keys and values, such as Falcon-H1's."""

    def __init__(self, owner: Any, number: int, states: int = 1):
        RowLayer.__init__(self, owner, number)
        RowStates.__init__(self, owner, number, states)

    def be_row(self, b: int, other: Any) -> None:
        for kind in PARTS:
            kind.be_row(self, b, other)

    def be_first(self, tokens: int, other: Any) -> None:
        for kind in PARTS:
            kind.be_first(self, tokens, other)

    def select(self, rows: torch.Tensor) -> None:
        for kind in PARTS:
            kind.select(self, rows)

    def have(self, rows: int, like: Any) -> None:
        for kind in PARTS:
            kind.have(self, rows, like)

    def copy_row(self, b: int, a: int, tokens: int, other: Any) -> None:
        for kind in PARTS:
            kind.copy_row(self, b, a, tokens, other)

    def hand_out(self, out: Cache, length: int, seen: torch.Tensor | None) -> None:
        for kind in PARTS:
            kind.hand_out(self, out, length, seen)

    def adopt(self, layer: Any, columns: torch.Tensor) -> None:
        for kind in PARTS:
            kind.adopt(self, layer, columns)


PARTS: tuple[Any, ...] = (RowLayer, RowStates)


Dummy: Any = getattr(cache_utils, "DummyLayer", object)  # earlier releases have none


class NoStates(Dummy):
    """A layer that keeps nothing, such as an MLP's."""

    def __init__(self, owner: Any, number: int):
        super().__init__()
        self.is_initialized = False

    def be_row(self, b: int, other: Any) -> None: ...
    def be_first(self, tokens: int, other: Any) -> None: ...
    def select(self, rows: torch.Tensor) -> None: ...
    def have(self, rows: int, like: Any) -> None: ...
    def copy_row(self, b: int, a: int, tokens: int, other: Any) -> None: ...
    def hand_out(self, out: Cache, length: int, seen: torch.Tensor | None) -> None: ...
    def adopt(self, layer: Any, columns: torch.Tensor) -> None: ...


KINDS: dict[type, type] = {
    DynamicLayer: RowLayer,
    DynamicSlidingWindowLayer: RowLayer,
    LinearAttentionLayer: RowStates,
    LinearAttentionAndFullAttentionLayer: RowStatesAndKeys,
    LinearAttentionAndSlidingWindowAttentionLayer: RowStatesAndKeys,
    Dummy: NoStates,
}


def layers_of(config: Any) -> list[Callable[[Any, int], Any]] | None:
    """What makes each layer of a `RowCache` for a model of this config, or None where one is of no kind that is known."""
    layers = DynamicCache(config=config).layers
    if not all(type(layer) in KINDS for layer in layers):
        return None
    return [
        partial(KINDS[type(its)], states=its.number_of_states)
        if isinstance(its, LinearAttentionCacheLayerMixin)
        else KINDS[type(its)]
        for its in layers
    ]


def why_not_adopted(model: Any, cache: Any, rows: int) -> str | None:
    """Why a cache of Transformers' own, of `rows` texts, is not copied into a `RowCache` to be gone on with, or None if it is.

    That of one text of keys and values is gone on with where it is, and grows for the caller.
    """
    own = getattr(cache, "layers", [])
    layers = DynamicCache(config=base_of(model).config.get_text_config(decoder=True)).layers
    if keeps_states(model):
        same = [type(its) for its in own] == [type(its) for its in layers]
        return None if same else "its layers are of other kinds than the target's"
    if rows == 1:
        return "it is one text's"
    if not own or cache.get_seq_length() == 0:
        return "it is empty, and would be filled for one row alone"
    kinds = {type(its).__name__ for its in own if type(its) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    if kinds or len(own) != len(layers) or layers_of(base_of(model).config.get_text_config(decoder=True)) is None:
        return f"it is a {type(cache).__name__} of {', '.join(sorted(kinds)) or 'other layers than the target has'}"
    if getattr(cache, "offloading", False):
        return "it is offloaded"
    return None


def keeps_states(model: Any) -> bool:
    """Whether a model's layers keep more than keys and values, all in kinds that are known."""
    layers = layers_of(base_of(model).config.get_text_config(decoder=True))
    return layers is not None and keep_states(layers)


def keep_states(layers: Sequence[Any]) -> bool:
    """Whether any of these keeps more than keys and values."""
    return any(isinstance(kind, partial) for kind in layers)
