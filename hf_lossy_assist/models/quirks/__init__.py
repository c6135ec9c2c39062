"""Model quirks: what some model families compute from the length of a whole batch is computed for each row.

A quirk is a function of a model that yields a `Patch` for each Transformers function that it replaces. A new one takes three files: the quirk (in
this folder), its line in `QUIRKS`, and its test in `tests/models/test_quirks.py`.
"""

from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ..compat import CACHE, forward_of
from ..introspection import base_of, remember
from ..patching import Forward, Patch, running
from ..recurrent.recording import recorded_recurrences
from .attention import alibi_by_position, attention_temperature, grouped_queries_on_cpu


QUIRKS: list[Callable[[PreTrainedModel], Iterable[Patch]]] = [
    alibi_by_position,
    attention_temperature,
    grouped_queries_on_cpu,
    recorded_recurrences,
]


def patches_of(base: PreTrainedModel) -> list[Patch]:
    """Return the patches of a model's quirks, computed once for each model object."""
    return list(remember(base, "quirks", lambda: [patch for quirk in QUIRKS for patch in quirk(base)]))


def patched_forward(
    model: PreTrainedModel, run: Callable[..., ModelOutput] | None = None
) -> Callable[..., ModelOutput]:
    """Return a callable that takes `input_ids`, `position_ids`, a cache and row masks, whatever the quirks of `model`.

    `run`: an adapter that calls the model with other argument names.
    """
    base = base_of(model)
    call = forward_of(model, base) if run is None else run
    patches = patches_of(base)
    if not patches:
        return call

    def forward(**inputs: torch.Tensor) -> ModelOutput:
        with running(Forward(inputs[CACHE], inputs["position_ids"]), patches):
            return call(**inputs)

    return forward
