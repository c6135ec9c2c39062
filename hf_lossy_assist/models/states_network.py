"""What draft networks on a target's hidden states share."""

from typing import Any

import torch


class StatesNetwork(torch.nn.Module):
    """The base of EAGLE's and DFlash's networks. `embed_tokens` and `lm_head` may be the target's: None, and not among its own weights."""

    config: Any
    d2t: torch.Tensor  # (draft_vocab_size,) int64: draft id i is target id i + d2t[i]
    norm: torch.nn.Module | None  # before the head; None: the head reads what the last layer gives
    layers: torch.nn.ModuleList

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in; of its norms, for linear layers may be int8."""
        return self.a_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.a_norm.weight.device

    @property
    def a_norm(self) -> Any:
        """One of its norms."""
        return self.norm

    def state_module(self, layer: int, norm: bool) -> torch.nn.Module:
        """The module whose output is the hidden state of layer `layer`, or, `norm`, what the head reads; numbers as of `FeatureSpec.layer`.

        Raises: `ValueError`, one line, for a layer that it does not have.
        """
        if layer > len(self.layers):
            raise ValueError(f"layer {layer} is asked for, and this drafter has {len(self.layers)}")
        if norm and self.norm is not None:
            return self.norm
        return self.layers[-1 if layer == -1 else layer - 1]

    @property
    def kept(self) -> torch.Tensor:
        """The target's id of each token that its own head can propose, (draft_vocab_size,) int64."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t
