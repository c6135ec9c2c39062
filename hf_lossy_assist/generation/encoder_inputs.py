"""Encoder-decoder models in a call: on row caches if possible, else on Transformers' caches, one prompt at a time."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MoEModelOutput

from ..batch.rows import Rows
from ..models.compat import CACHE
from ..models.encoder_decoder import (
    ENCODED,
    INPUTS,
    map_tensors,
    reads_encoder,
    why_not_encoded_rows,
)
from ..models.introspection import base_of, device_of, learned_positions
from ..models.quirks.cache_positions import PositionSources
from .input_checks import mask_name
from .prompt_layout import find_ids


# Other inputs of the decoder from `generate` that a row cache replaces or does not need.
TAKEN = (CACHE, "decoder_attention_mask", "use_cache", "logits_to_keep", "cache_position")


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Return whether the model is an encoder-decoder, or a decoder that attends to another model's encoder."""
    return bool(base_of(model).config.is_encoder_decoder) or reads_encoder(model)


def why_not_in_rows(
    model: PreTrainedModel, rows: Rows, model_kwargs: Mapping[str, object], inputs: dict[str, object], is_draft: bool
) -> str | None:
    """Return why an encoder-decoder of a call cannot use a row cache; None if it can. `inputs`: the given ones of `INPUTS`."""
    for name, value in model_kwargs.items():
        if name not in (*INPUTS, *TAKEN) and isinstance(value, torch.Tensor):
            return f"it was given {name}"
    reason = why_not_encoded_rows(model, inputs)
    # A draft with wrong positions only proposes worse; its proposals are verified.
    if reason is not None or is_draft:
        return reason
    if any(rows.pads) and not _ignores_hidden(model, rows.has_holes):
        return f"its positions count the tokens that {mask_name(model)} hides"
    padding = base_of(model).config.pad_token_id
    if rows.width > 1 and PositionSources.of(model).reads_tokens and padding is not None:
        if bool((rows.ids[:, : rows.width] == padding).any()):
            return "its positions pass over padding in a prompt"
    return None


def _ignores_hidden(model: PreTrainedModel, holes: bool) -> bool:
    """Return whether masked tokens do not affect positions: these follow the mask or, without `holes`, are relative only."""
    base, sources = base_of(model), PositionSources.of(model)
    if not holes and not sources.tables and learned_positions(base) is None:
        return True
    ids, mask = torch.tensor([[0, 0, 0]]), torch.tensor([[0, 1, 1]])
    made = base.prepare_inputs_for_generation(ids, decoder_attention_mask=mask, is_first_iteration=True)
    places = made.get("decoder_position_ids")
    return places is not None and places[0, 1:].tolist() == [0, 1]


def encode_for_draft(
    assistant: PreTrainedModel,
    target: PreTrainedModel,
    rows: Rows,
    inputs_tensor: torch.Tensor | None,
    model_kwargs: Mapping[str, Any],
) -> dict[str, object]:
    """Return the encoder states for a draft's decoder, for each row: from its encoder, or from the target's if it has no other.

    The target's are also used if the draft's encoder cannot read the input: embeddings without token, or `encoder_outputs` alone.
    Raises: `ValueError`, one line, if neither is available.
    """
    base, device, mask = base_of(assistant), device_of(assistant), model_kwargs.get("attention_mask")
    encoder, unread, out = None, False, {} if mask is None else {"attention_mask": mask.to(device)}
    if not reads_encoder(assistant):
        assert inputs_tensor is not None, "generate gives it to every callable that names it"
        encoder = base.get_encoder()
        if base.main_input_name == "input_ids" and inputs_tensor.is_floating_point():
            inputs_tensor = find_ids(target, inputs_tensor)
        # `generate` passes negative ids if there is no input.
        unread = not inputs_tensor.is_floating_point() and bool((inputs_tensor < 0).any())
    if inputs_tensor is None or unread or encoder in (None, base_of(target).get_encoder()):
        states = model_kwargs[ENCODED][0]
        width, known = states.shape[-1], base.config.get_text_config(decoder=True).hidden_size
        if width != known:
            raise ValueError(
                f"the assistant {type(base).__name__} attends to {known} numbers a place, and the target's encoder gives {width}: choose an "
                f"assistant that was made for this encoder{', or pass input_ids=… beside what it gave' if unread else ''}"
            )
        kind = (
            MoEModelOutput if getattr(base.config, "num_experts", 0) else BaseModelOutput
        )  # decoders read its fields
        encoded = kind(last_hidden_state=states.to(device=device, dtype=base.dtype))
        return (out if base.config.is_encoder_decoder else {}) | {ENCODED: encoded}
    inputs = {base.main_input_name: inputs_tensor.to(device)}
    # Rows per input (`num_return_sequences`); the mask is already expanded.
    copies = len(rows.row_id_list) // len(inputs_tensor)
    if out and "attention_mask" in inspect.signature(encoder.forward).parameters:
        inputs["attention_mask"] = out["attention_mask"][::copies]
    encoded = encoder(**inputs, return_dict=True)
    if copies > 1:
        encoded = map_tensors(encoded, lambda tensor: tensor.repeat_interleave(copies, dim=0))
    return out | {ENCODED: encoded}
