"""Classify logits processors: functions of the scores, functions of the text and the prompt, and all others."""

import copy
from collections.abc import Iterable
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    logits_process,
)

from ..grammar.structured import StructuredOutput


# Functions of the scores alone: one call serves all rows and positions. Not subclasses, which may read the text.
WARPERS = (  # never forbid every token
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
PREFIX_FREE = (*WARPERS, SuppressTokensLogitsProcessor)
# Transformers' functions of text and scores, by name, since not every release has all of them. Checked by reading their code: what
# they change of themselves (a table made at the first call, a generator seeded at each) does not affect results.
FUNCTIONS = {kind.__name__ for kind in PREFIX_FREE} | set(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor "
    "TopHLogitsWarper NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
    "NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor "
    "ExponentialDecayLengthPenalty LogitNormalization SuppressTokensAtBeginLogitsProcessor WhisperTimeStampLogitsProcessor "
    "ClassifierFreeGuidanceLogitsProcessor AlternatingCodebooksLogitsProcessor BarkEosPrioritizerLogitsProcessor "
    "WatermarkLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor DiaEOSChannelFilterLogitsProcessor".split()
)
# Those that read the prompt, or count from its end: each prompt has another.
OF_PROMPT = set(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor "
    "ExponentialDecayLengthPenalty SuppressTokensAtBeginLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor "
    "EncoderNoRepeatNGramLogitsProcessor WhisperTimeStampLogitsProcessor".split()
)


def is_function(processor: object) -> bool:
    """Return whether a processor is a known function of text and scores, neither the caller's nor new in a later release."""
    kind = type(processor)
    if kind is StructuredOutput:
        return True
    return kind.__name__ in FUNCTIONS and getattr(logits_process, kind.__name__, None) is kind


def for_row(processor: Any, row: int, batch: int) -> Any:
    """Return a copy of a processor for which `keeps_rows` holds, for row `row` of `batch` alone."""
    if type(processor) is StructuredOutput:
        return processor.of_rows([row], batch)
    out, kind = copy.copy(processor), type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        # Transformers counts `num_return_sequences` in `_num_beams`.
        allowed, prompt = out._prefix_allowed_tokens_fn, row // out._num_beams
        out._prefix_allowed_tokens_fn, out._num_beams = (lambda _, ids: allowed(prompt, ids)), 1
    elif kind is RepetitionPenaltyLogitsProcessor:
        out.prompt_ignore_length = out.prompt_ignore_length[row : row + 1]
    elif kind is EncoderRepetitionPenaltyLogitsProcessor:
        prompt = row * out.encoder_input_ids.shape[0] // batch  # shared by all its `num_return_sequences`
        out.encoder_input_ids = out.encoder_input_ids[prompt : prompt + 1]
    else:
        prompt = row * out.batch_size // batch
        out.batch_size, out.generated_ngrams = 1, out.generated_ngrams[prompt : prompt + 1]
    return out


def begun(
    processors: Iterable[Any], length: int, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LogitsProcessorList:
    """Return `processors` for prompts of `length` tokens: grammar processors get their begin; xgrammar's unused ones are replaced.

    Raises: `ValueError`, one line, for a grammar of another tokenizer than the target's.
    """
    check_grammars(processors := list(processors), target, tokenizer)
    return LogitsProcessorList(_begun(each, length) for each in processors)


def check_grammars(
    processors: Iterable[Any], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse grammars of another tokenizer than the target's, the call's `tokenizer` if it has one. See `StructuredOutput.check`."""
    for each in processors:
        if isinstance(each, StructuredOutput):
            each.check(target, tokenizer)


def skip_padding(processors: Iterable[Any], before: torch.Tensor, after: torch.Tensor) -> list[Any]:
    """Return `processors`, made for prompts with the mask `before` (B, width), for the same prompts in the columns of the mask `after`.

    Transformers' repetition penalty passes over the padding on the left.
    """
    found, wanted = (mask.ne(0).long().argmax(dim=1) for mask in (before, after))
    out = []
    for each in processors:
        skipped: Any = getattr(each, "prompt_ignore_length", None)
        if type(each) is RepetitionPenaltyLogitsProcessor and isinstance(skipped, torch.Tensor):
            is_default = torch.equal(skipped.to(found.device), found)
            each = RepetitionPenaltyLogitsProcessor(each.penalty, wanted) if is_default else each
        out.append(each)
    return out


def _begun(processor: Any, length: int) -> Any:
    kind = type(processor)
    if kind is StructuredOutput:
        return processor.at(length)
    name = f"{kind.__module__}.{kind.__name__}"
    if name == "xgrammar.contrib.hf.LogitsProcessor" and not processor.prefilled:
        return StructuredOutput(processor.compiled_grammars, length)
    if name == "outlines.backends.xgrammar.XGrammarLogitsProcessor" and processor.is_first_token:
        return StructuredOutput([processor.compiled_grammar], length)
    return processor


def serves_any_prompt(processor: Any) -> bool:
    """Return whether a processor that `generate` made for one prompt is what it would make for any other."""
    return (
        is_function(processor)
        and type(processor) is not StructuredOutput
        and type(processor).__name__ not in OF_PROMPT
    )


def for_any_row(processor: Any) -> Any:
    """Return a processor that serves any prompt for any number of rows without padding."""
    if type(processor) is RepetitionPenaltyLogitsProcessor and keeps_rows(processor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty)
    return processor


def keeps_rows(processor: Any) -> bool:
    """Return whether a Transformers processor holds data for each row of a batch."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return isinstance(processor.prompt_ignore_length, torch.Tensor)
    per_row = (
        StructuredOutput,
        PrefixConstrainedLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        EncoderNoRepeatNGramLogitsProcessor,
    )
    return type(processor) in per_row
