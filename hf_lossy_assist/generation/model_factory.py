"""Put the models of a call on row caches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..batch.rows import Rows
from ..drafters.base import DraftContext, DrafterRun
from ..drafters.model import AssistantRun
from ..drafters.parallel import start_parallel
from ..drafters.retokenized import Retokenizer, RetokenizingRun
from ..models.cached_model import CachedModel, NotInRows
from ..models.compiled.compilation import Compilation
from ..models.compiled.static_model import StaticRowModel
from ..models.distributed import LockstepGroup, RankGroup
from ..models.early_exit import ExitModel
from ..models.encoder_decoder import (
    INPUTS,
    CrossAttentionRowModel,
    attends_to_encoder,
    encode_for_draft,
    ignores_hidden,
    why_not_encoded_rows,
    why_not_in_rows,
)
from ..models.facts import CACHE, facts_of
from ..models.introspection import base_of, is_tested, leaves_early
from ..models.multimodal import EMBEDDINGS, MultimodalRowModel, is_multimodal
from ..models.probe import keeps_states_alone, why_not_prefixes, why_not_rows
from ..models.recurrent_layers import Indexed, layers_of
from ..models.row_model import RowModel
from ..validation import shown
from .arguments import find_non_text, mask_name, refuse_extra_inputs, refuse_positions
from .draft_settings import DraftInputs, refuse_stop
from .prompt_layout import HOLES, TYPES, find_ids, prompt_for, resume_from_cache, takes_multimodal


def make_row_model(
    model: PreTrainedModel,
    target: PreTrainedModel,
    rows: Rows,
    vocabulary: int | None = None,
    compilation: Compilation | None = None,
    ranks: RankGroup | None = None,
) -> RowModel:
    """Put `model` on a row cache, with the same non-text inputs as the target for a draft or companion of its kind.

    `compilation`: how to compile its blocks, if possible. `ranks`: the ranks that share it.
    """
    prompt = prompt_for(model, target, rows)
    if prompt is not None and ranks is not None:
        _refuse_ranks("takes token ids alone")
    size = len(rows.row_id_list), rows.max_length, vocabulary
    if prompt is not None:
        return within_rope(MultimodalRowModel(prompt, model, *size), rows)
    if ranks is not None:
        out = ranks.row_model(model, *size)
    elif compilation is not None:
        out = StaticRowModel(model, *size, compilation=compilation)
    else:
        out = RowModel(model, *size)
    return within_rope(out, rows)


def _refuse_ranks(why: str) -> NoReturn:
    raise ValueError(f"a target that is spread over ranks {why}: load the model whole")


def within_rope(model: RowModel, rows: Rows) -> RowModel:
    """Keep all positions, those of padding too, within the length up to which the model's RoPE does not change."""
    limit = None if model.facts.rope is None else model.facts.rope.limit(1 + min(rows.cached_lengths()))
    model.last = model.last if limit is None else min(model.last, limit - 1)
    return model


def why_no_rows(model: PreTrainedModel, assistant: PreTrainedModel | None) -> NotInRows | None:
    """Return the error of a call whose models cannot be decoded in rows, if it is known before."""
    encodes = base_of(model).config.is_encoder_decoder
    for candidate in (model, assistant):
        if candidate is None or takes_multimodal(candidate):
            continue
        reason = why_not_encoded_rows(candidate, None) if encodes else why_not_rows(candidate)
        if reason is not None:
            return NotInRows(candidate, reason)
    return None


def make_encoder_decoder(
    model: PreTrainedModel, rows: Rows, model_kwargs: Mapping[str, object], vocabulary: int | None = None
) -> RowModel:
    """Put the decoder of an encoder-decoder on a row cache.

    `model_kwargs`: prepared by `generate`, including the encoder's output. `vocabulary`: the target's, for a draft.
    """
    inputs = {name: model_kwargs[name] for name in INPUTS if model_kwargs.get(name) is not None}
    reason = why_not_in_rows(model, model_kwargs, inputs)
    # A draft with wrong positions only proposes worse; its proposals are verified.
    if reason is None and vocabulary is None and any(rows.pads) and not ignores_hidden(model, rows.has_holes):
        reason = f"its positions count the tokens that {mask_name(model)} hides"
    if reason is not None:
        raise NotInRows(model, reason)
    return CrossAttentionRowModel(model, len(rows.row_id_list), rows.max_length, vocabulary, inputs=inputs)


# -- the target -------------------------------------------------------------------------------------------------------


def make_target(
    model: PreTrainedModel,
    rows: Rows,
    model_kwargs: dict[str, Any],
    compilation: Compilation | None,
    cache_name: str | None,
    ranks: RankGroup | None = None,
) -> RowModel:
    """Put the target on a row cache.

    Args:
        cache_name: the argument by which the caller passed a filled cache, or None.
        ranks: the ranks that share the target.
    """
    base = base_of(model)
    if ranks is not None and compilation is not None:
        _refuse_ranks("cannot be compiled here")
    if isinstance(ranks, LockstepGroup) and not is_tested(base):
        _refuse_ranks(f"is not tried, and {type(base).__name__} would have to be")
    cache, name = model_kwargs.get(CACHE), cache_name or CACHE
    # `generate` marks caches that it was given.
    passed = cache is not None and (cache_name is not None or getattr(cache, "_is_user_defined", False))
    if passed and ranks is not None:
        _refuse_ranks(f"goes on from no passed cache, got {name}")
    adopted = passed and adopts(model, cache, rows, name)
    if base.config.is_encoder_decoder and ranks is None:
        return make_encoder_decoder(model, rows, model_kwargs)
    if adopted:
        model_kwargs.pop(EMBEDDINGS, None)
        if is_multimodal(model) and find_non_text(model_kwargs, *TYPES):
            raise ValueError(f"{name} goes on with text alone, and images or sounds were passed: leave {name} out")
        rows.multimodal = None  # the cache contains it
    reason = why_not_rows(model)
    if reason is not None and rows.multimodal is None:
        raise NotInRows(model, reason)
    target = _make_on_rows(model, rows, model_kwargs, None if adopted else compilation, ranks, adopted)
    if rows.has_holes and (rows.max_length > target.facts.reach or target.facts.position_argument is None):
        raise NotInRows(model, f"{HOLES} that its windows, chunks, states or position biases count")
    if adopted:
        target.adopt(cache, rows.mask)
    target.passed = cache if passed else None
    return target


def _make_on_rows(
    model: PreTrainedModel,
    rows: Rows,
    model_kwargs: dict[str, Any],
    compilation: Compilation | None,
    ranks: RankGroup | None,
    adopted: bool,
) -> RowModel:
    """Put the target on a row cache. Raises: `ValueError`, one line, for unsupported inputs."""
    mask, positions = model_kwargs.get(mask_name(model)), model_kwargs.get("position_ids")
    if rows.multimodal is None:
        refuse_extra_inputs(model_kwargs, *(TYPES if is_multimodal(model) else ()))  # a processor's types for text
    if adopted and ranks is None and is_multimodal(model):
        return resume_from_cache(model, rows, mask, positions)
    if rows.multimodal is None:
        refuse_positions(rows.ids[:, : rows.width], mask, positions)
    target = make_row_model(model, model, rows, compilation=compilation, ranks=ranks)
    if ranks is not None and target.facts.keeps_states:
        _refuse_ranks(f"cannot keep a recurrent state, and {type(base_of(model)).__name__} does")
    if ranks is not None and target.reads_whole:
        _refuse_ranks("cannot have RoPE that changes with the length of the text")
    return target


# -- the draft --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PreparedInputs:
    """Inputs that `generate` prepared for the target, and that a draft may need."""

    context: DraftContext
    inputs_tensor: torch.Tensor | None
    model_kwargs: Mapping[str, object]
    compilation: Compilation | None = None
    # The target, if a draft made of its first blocks may use its cache.
    shared: CachedModel | None = None


def start_drafter(draft: DraftInputs, prepared: PreparedInputs) -> DrafterRun:
    """Return the drafter of one call. Raises: `ValueError`, one line, for a drafter that does not support this batch or
    stop."""
    context = prepared.context
    if draft.assistant is not None and not draft.other_tokenizer:
        context = replace(context, assistant_run=lambda: _start_assistant(draft, prepared))
    refuse_stop(draft, context)
    if draft.drafter is not None:
        run = draft.drafter.start(context)
        if not isinstance(run, DrafterRun):
            raise TypeError(f"{type(draft.drafter).__name__}.start: expected a DrafterRun, got {shown(run)}")
        return run
    if context.assistant_run is not None:
        return context.assistant_run()
    reason = why_not_prefixes(draft.assistant)  # retokenization may change the beginning of a text
    if reason is not None:
        name, way_out = type(base_of(draft.assistant)).__name__, "pass a draft model with the target's tokenizer"
        raise ValueError(f"{name} cannot draft with another tokenizer ({reason}): {way_out}")
    words = Retokenizer(draft.tokenizer, draft.assistant_tokenizer)
    return RetokenizingRun(draft.assistant, words, context)


def _start_assistant(draft_inputs: DraftInputs, prepared: PreparedInputs) -> DrafterRun:
    """Start the draft model on a row cache."""
    assistant, context, shared = draft_inputs.assistant, prepared.context, prepared.shared
    target, rows, size = context.target, context.rows, context.vocabulary
    if base_of(target).config.is_encoder_decoder and attends_to_encoder(assistant):
        heard = prepared.inputs_tensor
        base = base_of(assistant)
        reads_text = base.config.is_encoder_decoder and base.main_input_name == "input_ids"
        if heard is not None and reads_text and heard.is_floating_point():
            heard = find_ids(target, heard)
        inputs = encode_for_draft(assistant, target, len(rows.row_id_list), heard, prepared.model_kwargs)
        return _run_on(make_encoder_decoder(assistant, rows, inputs, size), context, assistant)
    sees = rows.multimodal is not None and rows.multimodal.embeddings is None and takes_multimodal(assistant)
    reason = None if sees else why_not_rows(assistant)
    if reason is not None:
        raise NotInRows(assistant, reason)
    if type(shared) is RowModel and leaves_early(assistant, target):
        return _run_on(ExitModel(assistant, shared, size), context, assistant)
    return _run_on(make_row_model(assistant, target, rows, size, prepared.compilation), context, assistant)


def _run_on(cached: CachedModel, context: DraftContext, assistant: PreTrainedModel) -> DrafterRun:
    is_parallel = getattr(base_of(assistant).config, "pard_token", None) is not None
    return (start_parallel if is_parallel else AssistantRun)(cached, context, assistant)


# -- caches that the caller passes ------------------------------------------------------------------------------------


def adopts(model: PreTrainedModel, cache: Cache, rows: Rows, name: str) -> bool:
    """Return whether a round goes on from the contents of a passed cache: not if it is empty.

    `name`: the argument's name. Raises: `ValueError`, one line, for a cache that rows cannot take, of other rows, or of
    another model.
    """
    reason = _why_not_copied(model, cache)
    if reason is not None:
        raise ValueError(f"{name}: a {type(cache).__name__} cannot be copied into rows ({reason}): leave it out")
    base, tokens = base_of(model), int(cache.get_seq_length())
    count = {
        len(layer.keys) for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()
    }
    if count - {len(rows.row_id_list)}:
        raise ValueError(f"{name} holds {count.pop()} rows, input_ids has {len(rows.row_id_list)}: they must agree")
    for i, (layer, expected) in enumerate(zip(cache.layers, DynamicCache(config=base.config).layers, strict=False)):
        window, seen = getattr(layer, "sliding_window", None), getattr(expected, "sliding_window", None)
        if window is not None and window != seen:  # made from another model's config
            line = f"{name} keeps {window} tokens in layer {i}, the target {seen or 'all'}"
            raise ValueError(f"{line}: pass DynamicCache(config=model.config)")
    if tokens >= rows.width:
        raise ValueError(f"{name} holds {tokens} tokens, input_ids has {rows.width}: pass the whole text, old and new")
    first = 0 if rows.moved else tokens
    if tokens and rows.unknown is not None and bool(rows.unknown[:, first:].any()):
        raise ValueError(f"{name} holds {tokens} tokens, and later inputs_embeds are of no token: leave {name} out")
    return tokens > 0


def _why_not_copied(model: PreTrainedModel, cache: Cache) -> str | None:
    """Return why a Transformers cache cannot be copied into a `RowCache`; None if it can."""
    config = base_of(model).config.get_text_config(decoder=True)
    passed, layers = getattr(cache, "layers", None), DynamicCache(config=config).layers
    if base_of(model).config.is_encoder_decoder or passed is None:
        return "only a decoder's keys and values can"
    if keeps_states_alone(cache):
        return "it counts no tokens"
    if facts_of(model).keeps_states or any(type(layer) is Indexed for layer in layers):
        return None if list(map(type, passed)) == list(map(type, layers)) else "it has other layers than the target"
    if getattr(cache, "offloading", False):
        return "it is offloaded"
    kinds = {type(layer).__name__ for layer in passed if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)}
    other = len(passed) not in (0, len(layers)) or layers_of(config) is None
    return f"it has {', '.join(sorted(kinds)) or 'other layers than the target'}" if kinds or other else None
