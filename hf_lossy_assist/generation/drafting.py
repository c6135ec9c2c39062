"""What a call drafts with: its drafter, its assistant, or one of Transformers' candidate generators."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from ..batch.positions import keep_within
from ..batch.processor_kinds import only_functions
from ..batch.token_types import shared_types
from ..drafters.base import DraftContext, Drafter, DrafterRun
from ..drafters.model import AssistantRun, head_taps
from ..drafters.retokenized import RetokenizingRun
from ..drafters.suffix import LONGEST_MATCH, SuffixDrafter
from ..drafters.transformers_drafters import TransformersRun
from ..models.cached_model import CachedModel
from ..models.compat import CACHE
from ..models.compilation import Compilation
from ..models.early_exit import ExitModel, early_exit, leaves_early
from ..models.introspection import base_of, learned_positions
from ..models.multimodal import is_multimodal
from ..models.probe import why_not_prefixes, why_not_rows
from ..models.recurrent.layers import keeps_states
from ..models.row_model import RowModel
from ..models.stock_exit import early_twin
from ..stops.composite_stops import WrappingStop
from ..validation import check_int, shown
from .encoded import attends_to_encoder, encoded_model, encoder_inputs
from .inputs import assistant_inputs, cropping, rowwise
from .sight import TYPES, beside_text, reads_at_once


# The settings with which Transformers drafts without a draft model.
CANDIDATES = ("prompt_lookup_num_tokens", "assistant_early_exit")
# What Transformers makes a candidate generator's own.
NOT_FOR_DRAFTS = (CACHE, "position_ids", "attention_mask")


@dataclass(frozen=True)
class DraftWith:
    """What the caller passed to draft with."""

    assistant: Any  # the draft model, or None
    drafter: Drafter | None
    lookup: int | None  # `prompt_lookup_num_tokens`
    exit: int | None  # `assistant_early_exit`
    other_tokenizer: bool
    tokenizer: Any = None
    assistant_tokenizer: Any = None

    @property
    def candidates(self) -> list[str]:
        """The settings given that have Transformers draft without a draft model."""
        return [name for name, value in zip(CANDIDATES, (self.lookup, self.exit), strict=True) if value is not None]


@dataclass(frozen=True)
class Prepared:
    """What `generate` prepared for the target, and a draft may need."""

    context: DraftContext
    config: GenerationConfig
    inputs_tensor: torch.Tensor | None
    model_kwargs: Mapping[str, Any]
    compilation: Compilation | None = None
    cached: CachedModel | None = None  # the target, where a draft of its own first blocks may draft on its cache


def start_drafter(given: DraftWith, made: Prepared) -> DrafterRun:
    """The drafter of one call.

    Raises: `ValueError`, one line, for what cannot draft for this batch or with this stop.
    """
    context = made.context
    if given.assistant is not None and not given.other_tokenizer:
        context = replace(context, assistant_run=lambda: _assistant_run(given.assistant, made))
    _refuse_stop(given, context)
    if given.drafter is not None:
        run = given.drafter.start(context)
        if not isinstance(run, DrafterRun):
            raise TypeError(f"{type(given.drafter).__name__}.start: expected a DrafterRun, got {shown(run)}")
        return run
    if context.assistant_run is not None:
        return context.assistant_run()
    rows = len(context.rows.index)
    if rows > 1 and given.lookup is not None:  # Transformers' own drafts for one row
        return _lookup(given.lookup, made.config.max_matching_ngram_size).start(context)
    if rows > 1 and given.exit is not None:  # the same blocks on the target's own cache, which has all rows
        return _assistant_run(early_exit(base_of(context.target), given.exit), made)
    if rows > 1:
        return _translated_run(given, context)
    its = given.assistant if given.assistant is not None else context.target if given.exit is not None else None
    if its is not None and keeps_states(its):  # Transformers would crop its cache, which forgets no state
        raise ValueError(
            f"{type(base_of(its)).__name__} keeps a recurrent state, and Transformers' own drafting (early exit, another tokenizer) cannot "
            "roll it back: pass a draft model with the target's tokenizer"
        )
    return _candidate_run(given, made)


def _lookup(tokens: int, longest_match: int | None) -> SuffixDrafter:
    """Prompt lookup for a batch; with the caller's size of an n-gram, as Transformers has it: any match drafts all the tokens."""
    if longest_match is None:
        return SuffixDrafter(max_draft=tokens)
    check_int("max_matching_ngram_size (of several rows)", longest_match, 1, LONGEST_MATCH)
    return SuffixDrafter(1, longest_match, float(tokens), tokens)


def _refuse_stop(given: DraftWith, context: DraftContext) -> None:
    """Refuse a stop that reads what a draft model computes where there is none with the target's tokenizer."""
    asks = given.drafter is not None and given.drafter.asks_stop
    if not context.stop.settings.adaptive or context.assistant_run is not None or asks:
        return
    blamed = context.stop.settings
    while isinstance(blamed, WrappingStop):  # which reads what the stop inside it reads
        blamed = blamed.stop
    name = type(blamed).__name__
    if given.drafter is not None:
        raise ValueError(
            f"{name} reads what a draft model computes, and {type(given.drafter).__name__} has none: use a stop that plans ahead, "
            "such as Constant(8)"
        )
    other = "use a constant draft length here"
    if given.exit is not None:
        other = f"pass assistant_model=hf_lossy_assist.early_exit(model, {given.exit}) in place of assistant_early_exit={given.exit}"
    raise ValueError(f"{name} needs a draft model with the target's tokenizer: {other}")


def _assistant_run(assistant: Any, made: Prepared) -> DrafterRun:
    """The assistant on a cache of rows where it can be, else on Transformers' own."""
    context = made.context
    model, rows = context.target, context.rows
    way_out, shared = "choose another assistant_model", made.cached
    if attends_to_encoder(assistant) and base_of(model).config.is_encoder_decoder:
        given = encoder_inputs(assistant, rows, made.inputs_tensor, made.model_kwargs)
        inputs = assistant_inputs(assistant, rows, given, made.config)
        encoded = encoded_model(assistant, rows, inputs, vocabulary=context.vocabulary, way_out=way_out)
        return AssistantRun(encoded, context, **head_taps(assistant, context))
    reason = why_not_rows(assistant)
    if rows.sight is not None and reads_at_once(assistant):
        reason = None
    if reason is None and type(shared) is RowModel and shared.rope is None and leaves_early(assistant, model):
        draft: CachedModel = ExitModel(assistant, shared, context.vocabulary)
    elif reason is None:
        draft = rowwise(assistant, model, rows, context.vocabulary, made.compilation)
    else:
        inputs = assistant_inputs(assistant, rows, {}, made.config)
        inputs["token_type_ids"] = shared_types(assistant, model, rows.types)
        draft = cropping(assistant, rows, inputs, reason, way_out, guesses=True)
    return AssistantRun(draft, context, **head_taps(assistant, context))


def _translated_run(given: DraftWith, context: DraftContext) -> DrafterRun:
    """A draft with another tokenizer for several rows."""
    reason = why_not_prefixes(given.assistant)  # in its ids a text may change behind its beginning
    if reason is not None:
        rows, name = len(context.rows.index), type(base_of(given.assistant)).__name__
        raise ValueError(
            f"{name} cannot draft with another tokenizer for several rows ({reason}); this batch has {rows}: pass prompts one by one"
        )
    return RetokenizingRun(given.assistant, given.tokenizer, given.assistant_tokenizer, context)


def _candidate_run(given: DraftWith, made: Prepared) -> DrafterRun:
    """One of Transformers' candidate generators, for one row."""
    context, config = made.context, copy.copy(made.config)
    model, rows = context.target, context.rows
    config.max_length = rows.max_length
    config.prompt_lookup_num_tokens, config.assistant_early_exit = given.lookup, given.exit
    if given.assistant is not None:
        # With sampling, Transformers would prune the draft's own head for good and give its probabilities to the wrong tokens.
        # Drafted greedily, each token counts as certain (q = 1), and the output distribution is exact all the same.
        config.do_sample = False
    processors, not_for_drafts = context.processing.processors, set(NOT_FOR_DRAFTS)
    if is_multimodal(model):  # a draft with another tokenizer reads the text
        not_for_drafts |= {*TYPES, *beside_text(made.model_kwargs)}
    # Others would be asked in ids of another tokenizer, behind an end token, without padding, or out of order.
    processors = only_functions(processors)
    generator = (model if given.exit is None else early_twin(model))._get_candidate_generator(
        generation_config=config,
        input_ids=rows.texts()[0][None],
        inputs_tensor=made.inputs_tensor,
        assistant_model=given.assistant,
        logits_processor=processors,
        target_tokenizer=given.tokenizer,
        assistant_tokenizer=given.assistant_tokenizer,
        model_kwargs={name: value for name, value in made.model_kwargs.items() if name not in not_for_drafts},
    )
    if isinstance(generator, AssistedCandidateGenerator):
        generator.num_assistant_tokens = context.stop.settings.longest
        keep_within(generator, learned_positions(base_of(model if given.assistant is None else given.assistant)))
        for its in (generator.assistant_generation_config, generator.generation_config):
            its.assistant_confidence_threshold = 0.0  # on by default in Transformers, and it refits itself
            its.num_assistant_tokens_schedule = "constant"
    return TransformersRun(generator, context)
