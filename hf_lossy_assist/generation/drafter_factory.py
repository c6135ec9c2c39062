"""Starts the drafter of one call: the caller's, the draft model on a cache, or a draft model with another tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..batch.token_types import shared_types
from ..drafters.base import DraftContext, DrafterRun
from ..drafters.model import AssistantRun
from ..drafters.retokenized import RetokenizingRun
from ..models.cached_model import CachedModel
from ..models.compiled.compilation import Compilation
from ..models.early_exit import ExitModel, leaves_early
from ..models.introspection import base_of
from ..models.probe import why_not_prefixes, why_not_rows
from ..models.row_model import RowModel
from ..stops.composite_stops import WrappingStop
from ..validation import shown
from .draft_settings import DraftInputs
from .encoder_inputs import attends_to_encoder, encode_for_draft, make_encoder_decoder
from .model_factory import add_cache, make_cropping_model, make_row_model
from .multimodal_inputs import takes_multimodal


@dataclass(frozen=True)
class PreparedInputs:
    """The inputs that `generate` prepared for the target, and a draft may need."""

    context: DraftContext
    config: GenerationConfig
    inputs_tensor: torch.Tensor | None
    model_kwargs: Mapping[str, Any]
    compilation: Compilation | None = None
    # The target, if a draft of its first blocks may draft on its cache.
    shared: CachedModel | None = None


def start_drafter(draft: DraftInputs, prepared: PreparedInputs) -> DrafterRun:
    """Return the drafter of one call. Raises `ValueError`, one line, for what cannot draft for this batch or with this stop."""
    context = prepared.context
    if draft.assistant is not None and not draft.other_tokenizer:
        context = replace(context, assistant_run=lambda: _start_assistant(draft.assistant, prepared))
    _check_stop(draft, context)
    if draft.drafter is not None:
        run = draft.drafter.start(context)
        if not isinstance(run, DrafterRun):
            raise TypeError(f"{type(draft.drafter).__name__}.start: expected a DrafterRun, got {shown(run)}")
        return run
    if context.assistant_run is not None:
        return context.assistant_run()
    reason = why_not_prefixes(draft.assistant)  # in the draft's ids, a text may change after its beginning
    if reason is not None:
        raise ValueError(
            f"{type(base_of(draft.assistant)).__name__} cannot draft with another tokenizer ({reason}): pass a draft model with the target's "
            "tokenizer"
        )
    return RetokenizingRun(draft.assistant, draft.tokenizer, draft.assistant_tokenizer, context)


def _check_stop(draft: DraftInputs, context: DraftContext) -> None:
    """Refuse a stop that reads what a draft model computes if there is none with the target's tokenizer."""
    asks = draft.drafter is not None and draft.drafter.asks_stop
    if not context.stop.settings.adaptive or context.assistant_run is not None or asks:
        return
    stop = context.stop.settings
    while isinstance(stop, WrappingStop):  # which reads what the stop inside it reads
        stop = stop.stop
    if draft.drafter is None:
        raise ValueError(
            f"{type(stop).__name__} needs a draft model with the target's tokenizer: use a constant draft length here"
        )
    raise ValueError(
        f"{type(stop).__name__} reads what a draft model computes, and {type(draft.drafter).__name__} has none: use a stop that plans ahead, "
        "such as Constant(8)"
    )


def _start_assistant(assistant: PreTrainedModel, prepared: PreparedInputs) -> DrafterRun:
    """Start the draft model on a cache of rows where it can be, else on Transformers' own."""
    context, shared = prepared.context, prepared.shared
    target, rows = context.target, context.rows
    way_out = "choose another assistant_model"
    draft: CachedModel
    if attends_to_encoder(assistant) and base_of(target).config.is_encoder_decoder:
        inputs = encode_for_draft(assistant, rows, prepared.inputs_tensor, prepared.model_kwargs)
        inputs = add_cache(assistant, rows, inputs, prepared.config)
        draft = make_encoder_decoder(assistant, rows, inputs, vocabulary=context.vocabulary, way_out=way_out)
        return AssistantRun(draft, context, assistant)
    reason = None if rows.multimodal is not None and takes_multimodal(assistant) else why_not_rows(assistant)
    if reason is not None:
        inputs = add_cache(assistant, rows, {}, prepared.config)
        inputs["token_type_ids"] = shared_types(assistant, target, rows.token_types)
        draft = make_cropping_model(assistant, rows, inputs, reason, way_out, is_draft=True)
    elif type(shared) is RowModel and shared.rope is None and leaves_early(assistant, target):
        draft = ExitModel(assistant, shared, context.vocabulary)
    else:
        draft = make_row_model(assistant, target, rows, context.vocabulary, prepared.compilation)
    return AssistantRun(draft, context, assistant)
