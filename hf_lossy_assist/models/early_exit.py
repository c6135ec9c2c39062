"""Self-speculation: the target's own first layers as its draft."""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from ..validation import check_int
from .inspect import base_of, blocks_of
from .trials import why_not_rows


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of `model`'s first `layers` blocks, with its embeddings, last norm and output head; no weight is copied.

    Elhoushi et al., "LayerSkip" (huggingface.co/papers/2404.16710): a target trained to exit early drafts for itself, and with more
    of its layers it can be its own companion. Any other target's early layers guess badly; measure before you rely on it.

    Raises: `ValueError`, one line, for a model whose blocks are not found and for a number of layers that it does not have.
    """
    base = base_of(model)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"early_exit: expected a loaded Transformers model, got {type(model).__name__}")
    blocks = None if why_not_rows(base) is not None else blocks_of(base)
    if blocks is None:
        raise ValueError(
            f"early_exit: {type(base).__name__} is no decoder that runs in batches with one list of blocks"
        )
    check_int("early_exit.layers", layers, 1)
    if layers >= len(blocks):
        raise ValueError(f"early_exit.layers: expected fewer than the {len(blocks)} blocks of the model, got {layers}")
    config = copy.deepcopy(base.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    config.name_or_path = f"{base.config.name_or_path}[:{layers}]"
    with torch.device("meta"):  # its own weights are never made
        own: Any = type(base)(config)
    inner = base.get_decoder()
    for name, part in inner.named_children():
        own.get_decoder()._modules[name] = torch.nn.ModuleList(blocks[:layers]) if part is blocks else part
    for name, part in base.named_children():
        if part is not inner:
            own._modules[name] = part
    own.generation_config = copy.deepcopy(base.generation_config)
    return own.eval()
