"""Specification of the hidden state that a trained head reads, and its capture by a hook. Training and decoding share this code."""

from dataclasses import dataclass

import torch

from ..models.hidden_state_hook import NORMED, HiddenStateHook, state_blocks
from ..models.introspection import base_of
from ..validation import nearest
from .files import check_types


MODELS = ("draft", "target", "both", "companion")
POSITIONS = ("predicting", "token")


@dataclass(frozen=True)
class FeatureSpec:
    """Specifies a hidden state, (…, H), by model, position and layer.

    Args:
        model: "draft", "target", "both" (the draft's features, then the target's) or "companion". For a drafter on the target's states
            (EAGLE, DFlash) "draft" is its network.
        position: "predicting" is the position whose logits the judged token is drawn from (known before the token is);
            "token" is the judged token's position (known one forward later).
        layer: -1 for the last block, or 1 … number of blocks; numbered as in Transformers' `hidden_states`.
        norm: after the model's final norm (last block only), which is the input of the output head.
    """

    model: str = "draft"
    position: str = "predicting"
    layer: int = -1
    norm: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        for name, value, choices in (("model", self.model, MODELS), ("position", self.position, POSITIONS)):
            if value not in choices:
                raise ValueError(nearest(f"FeatureSpec.{name}", value, choices))
        if self.layer != -1 and self.norm:
            raise ValueError(
                f"FeatureSpec: layer {self.layer} has no final norm: pass norm=False, or layer=-1 for the last"
            )

    def reads(self, model: str) -> bool:
        """Return whether the features of "draft" or of "target" are read."""
        return self.model in (model, "both")

    def __str__(self) -> str:
        norm = "after the final norm" if self.norm else "before any norm"
        layer = "last layer" if self.layer == -1 else f"layer {self.layer}"
        at = "at the position that predicts the token" if self.position == "predicting" else "at the token itself"
        of = "states of the draft and the target" if self.model == "both" else f"state of the {self.model}"
        return f"hidden {of}, {layer}, {norm}, {at}"


class FeatureTap(HiddenStateHook):
    """Keeps the hidden state specified by `spec` from every forward of `model` inside `with tap:`; costs one forward hook.

    `value` (B, Q, H) belongs to the latest forward, position by position, in the model's dtype.
    """

    def __init__(self, model: torch.nn.Module, spec: FeatureSpec):
        self.spec = spec
        layer = spec.layer
        if spec.norm:
            layer = NORMED
        elif layer == -1:
            layer = len(state_blocks(base_of(model)) or ())
        super().__init__(model, [layer])

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.take_states()

    @property
    def latest(self) -> torch.Tensor:
        """Return `value` after a forward. Raises: `RuntimeError` if none has run inside `with tap:`."""
        if (value := self.value) is None:
            raise RuntimeError("FeatureTap: no forward has run inside `with tap:`")
        return value

    def at(self, columns: torch.Tensor | int) -> torch.Tensor:
        """Return the latest forward's features at column `columns`, or at `columns[b]` of row b: (B, H)."""
        states = self.latest
        if isinstance(columns, int):
            return states[:, columns]
        return states[torch.arange(states.shape[0], device=states.device), columns.to(states.device)]
