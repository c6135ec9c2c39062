"""Keep the hidden states of some layers from each forward of a model."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from typing_extensions import Self

from .introspection import base_of, blocks_of, device_of
from .patching import unpacked


NORMED = -1  # in place of a layer number: the states after the final norm, which the output head reads


class HiddenStateHook:
    """Keep the hidden states of some layers inside `with hook:`, concatenated: (B, Q, layers · H) of the latest
    forward.

    Only forwards of the thread that entered the context count, so concurrent calls on one model do not mix.

    Args:
        model: a Transformers model, or a draft network with `state_blocks` and `get_decoder`.
        layers: numbered as in Transformers' `hidden_states`: n is the output of block n and the input of block n + 1;
            or `NORMED`.

    Raises: `ValueError`, one line, for layers that the model does not have.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[int]):
        base = base_of(model)
        blocks = state_blocks(base)
        self.layers = tuple(layers)
        self._places: dict[int, tuple[torch.nn.Module, bool]] = {}  # the module, and whether its input is kept
        for layer in layers:
            if layer == NORMED:
                self._places[layer] = base.get_decoder(), False
                continue
            if blocks is None:
                raise ValueError(f"{type(base).__name__}: its blocks were not found, so their states cannot be read")
            if not 0 <= layer <= len(blocks):
                raise ValueError(f"layer {layer} is asked for, and {type(base).__name__} has {len(blocks)} blocks")
            before = layer < len(blocks)
            self._places[layer] = blocks[layer if before else -1], before
        self._states: dict[int, torch.Tensor] = {}
        self.listening = True  # False: while another user of the model runs a forward
        self._thread: int | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        for layer, (module, before) in self._places.items():
            if before:
                hook = partial(self._keep_input, layer)
                self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(partial(self._keep_output, layer)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()  # the states stay: a prompt may be read in a separate context

    @property
    def value(self) -> torch.Tensor | None:
        """The states of the latest forward; None: none has run inside `with hook:` since `take_states`."""
        if not self._states:
            return None
        if len(self.layers) == 1:
            return self._states[self.layers[0]]
        return torch.cat([self._states[layer] for layer in self.layers], dim=-1)

    def take_states(self) -> torch.Tensor | None:
        """Return `value` and release it."""
        value = self.value
        self._states.clear()
        return value

    @torch.no_grad()
    def read(self, model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        """Return the states (T, layers · H) at each token of a text `ids` (T,), from one forward of `model`, which has
        the hooked layers."""
        with self:
            base_of(model)(input_ids=ids[None].to(device_of(model)), use_cache=False)
            states = self.take_states()
        assert states is not None, "the model has just run"
        return states[0]

    def _keep_input(
        self, layer: int, module: torch.nn.Module, args: Sequence[torch.Tensor], kwargs: dict[str, torch.Tensor]
    ) -> None:
        self._keep(layer, args[0] if args else kwargs["hidden_states"])

    def _keep_output(self, layer: int, module: torch.nn.Module, args: object, output: Any) -> None:
        if not isinstance(output, torch.Tensor):
            output = output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]
        self._keep(layer, output)

    def _keep(self, layer: int, states: torch.Tensor) -> None:
        if threading.get_ident() == self._thread and self.listening:
            self._states[layer] = unpacked(states)


def state_blocks(base: PreTrainedModel) -> torch.nn.ModuleList | None:
    """Return the blocks whose states can be kept; None if they are not found."""
    blocks: torch.nn.ModuleList | None = getattr(base, "state_blocks", None)
    return blocks_of(base) if blocks is None else blocks
