"""Hidden states of several layers, kept from each forward of a model."""

import threading
from collections.abc import Sequence
from typing import Any

import torch

from .introspection import base_of, blocks_of
from .packing import unpacked


NORMED = -1  # in place of a layer's number: the states that the model's head reads


class LayerStates:
    """Inside `with states:` the inputs of some of a model's blocks, side by side: (B, Q, layers · H) of the latest forward.

    Only forwards of the thread that entered count, as with `FeatureTap`.
    """

    def __init__(self, model: Any, layers: Sequence[int]):
        """`layers`: as Transformers numbers `hidden_states`: n is what block n gives, and block n + 1 reads; −1: what the model's head reads, which
        is normed. Raises: `ValueError` for others.
        """
        base = base_of(model)
        blocks = blocks_of(base)
        if blocks is None:
            raise ValueError(f"{type(base).__name__}: its blocks were not found, so their states cannot be read")
        for layer in layers:
            if not NORMED <= layer <= len(blocks):
                raise ValueError(f"layer {layer} is asked for, and {type(base).__name__} has {len(blocks)} blocks")
        self._blocks, self._layers, self._decoder = blocks, tuple(layers), base.get_decoder()
        self._parts: dict[int, torch.Tensor] = {}
        self.listening = True  # False: while somebody else's forward of the model runs
        self._thread: int | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> "LayerStates":
        self._thread = threading.get_ident()
        for layer in set(self._layers):
            if layer == NORMED:
                self._handles.append(self._decoder.register_forward_hook(self._normed))
            elif layer < len(self._blocks):
                hook: Any = self._before(layer)
                self._handles.append(self._blocks[layer].register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(self._blocks[-1].register_forward_hook(self._behind))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()  # what was kept stays: a prompt may be read in a context of its own

    @property
    def value(self) -> torch.Tensor | None:
        """Of the latest forward; None: none has run inside `with states:` since `take`."""
        if not self._parts:
            return None
        return torch.cat([self._parts[layer] for layer in self._layers], dim=-1)

    def take(self) -> torch.Tensor | None:
        """`value`, which is let go of."""
        value = self.value
        self._parts.clear()
        return value

    def _before(self, layer: int) -> Any:
        def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._keep(layer, args[0] if args else kwargs["hidden_states"])

        return keep

    def _normed(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._keep(NORMED, output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0])

    def _behind(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._keep(len(self._blocks), output if isinstance(output, torch.Tensor) else output[0])

    def _keep(self, layer: int, states: torch.Tensor) -> None:
        if threading.get_ident() == self._thread and self.listening:
            self._parts[layer] = unpacked(states)
