"""Which logits processors look at the scores alone, which read the text, and which remember something between calls."""

import copy
from collections.abc import Iterable
from types import FunctionType
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList
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

from .structured import StructuredOutput


# These look at the scores alone, so one call does for all rows and positions. No subclass: it may read the text.
WARPERS = (  # which leave a token
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    MinPLogitsWarper,
    TypicalLogitsWarper,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
)
PREFIX_FREE = (*WARPERS, SuppressTokensLogitsProcessor)
# Transformers' own that are functions of the text and the scores, by name, as not every release has all of them. Their code was read: what
# they change of themselves (a table made at the first call, a generator seeded at each) changes no answer.
FUNCTIONS = {kind.__name__ for kind in PREFIX_FREE} | set(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor EncoderRepetitionPenaltyLogitsProcessor "
    "TopHLogitsWarper NoRepeatNGramLogitsProcessor EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor "
    "NoBadWordsLogitsProcessor ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor "
    "ExponentialDecayLengthPenalty LogitNormalization SuppressTokensAtBeginLogitsProcessor WhisperTimeStampLogitsProcessor "
    "ClassifierFreeGuidanceLogitsProcessor AlternatingCodebooksLogitsProcessor BarkEosPrioritizerLogitsProcessor "
    "WatermarkLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor DiaEOSChannelFilterLogitsProcessor".split()
)
# Transformers' own that remember something, or run a function of the caller's: followed as a caller's are.
STATEFUL = set(
    "PrefixConstrainedLogitsProcessor WhisperNoSpeechDetection UnbatchedClassifierFreeGuidanceLogitsProcessor "
    "SynthIDTextWatermarkLogitsProcessor DiaEOSDelayPatternLogitsProcessor".split()
)
PACKAGE = __name__.partition(".")[0]
WAY_OUT = "make it a function of input_ids and scores, or leave lossy_policy out"
GRAMMAR_LIBRARIES = {"xgrammar", "outlines", "outlines_core", "llguidance", "lmformatenforcer", "transformers_cfg"}


def from_transformers(callback: object) -> bool:
    """Return whether an object is of a class of Transformers' own, not of a subclass or the caller's."""
    return type(callback).__module__.startswith("transformers.")


def is_function(processor: object) -> bool:
    """Return whether a processor is known to be a function of the text and the scores: not the caller's, and nothing of a later release."""
    kind = type(processor)
    if kind is StructuredOutput:
        return True
    return kind.__name__ in FUNCTIONS and getattr(logits_process, kind.__name__, None) is kind


def for_row(processor: Any, row: int, batch: int) -> Any:
    """Make a processor that `keeps_rows` one for row `row` of `batch` alone."""
    if type(processor) is StructuredOutput:
        return processor.of_rows([row], batch)
    out, kind = copy.copy(processor), type(processor)
    if kind is PrefixConstrainedLogitsProcessor:
        # `_num_beams`: of `num_return_sequences`, as Transformers counts.
        allowed, prompt = out._prefix_allowed_tokens_fn, row // out._num_beams
        out._prefix_allowed_tokens_fn, out._num_beams = (lambda _, ids: allowed(prompt, ids)), 1
    elif kind is RepetitionPenaltyLogitsProcessor:
        out.prompt_ignore_length = out.prompt_ignore_length[row : row + 1]
    elif kind is EncoderRepetitionPenaltyLogitsProcessor:
        prompt = row * out.encoder_input_ids.shape[0] // batch  # one for all `num_return_sequences` of it
        out.encoder_input_ids = out.encoder_input_ids[prompt : prompt + 1]
    else:
        prompt = row * out.batch_size // batch
        out.batch_size, out.generated_ngrams = 1, out.generated_ngrams[prompt : prompt + 1]
    return out


def begun(processors: Iterable[Any], length: int) -> LogitsProcessorList:
    """Return `processors` for a call whose prompts have `length` tokens: those of a grammar know where it begins, and of xgrammar's they are made."""
    return LogitsProcessorList(_begun(each, length) for each in processors)


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


def only_functions(processors: Iterable[LogitsProcessor]) -> LogitsProcessorList:
    """Return those of `processors` that are known functions of the text and the scores."""
    return LogitsProcessorList([p for p in processors if is_function(p)])


def keeps_rows(processor: Any) -> bool:
    """Return whether a processor of Transformers' keeps something for each row of a batch."""
    if type(processor) is RepetitionPenaltyLogitsProcessor:
        return isinstance(processor.prompt_ignore_length, torch.Tensor)
    per_row = (
        StructuredOutput,
        PrefixConstrainedLogitsProcessor,
        EncoderRepetitionPenaltyLogitsProcessor,
        EncoderNoRepeatNGramLogitsProcessor,
    )
    return type(processor) in per_row


def way_out(processors: Iterable[object], other: str = WAY_OUT) -> str:
    """Return what an error line advises about processors: what takes the place of a grammar library's, else `other`."""
    of_grammar = any(type(each).__module__.partition(".")[0] in GRAMMAR_LIBRARIES for each in processors)
    return "use hla.structured(grammar or schema, tokenizer) in place of it" if of_grammar else other


def names(processors: Iterable[object]) -> str:
    """Name processors for an error line."""
    return " or ".join(dict.fromkeys(_name(processor) for processor in processors))


def _name(processor: object) -> str:
    if type(processor) is PrefixConstrainedLogitsProcessor:
        return "prefix_allowed_tokens_fn"
    return processor.__name__ if isinstance(processor, FunctionType) else type(processor).__name__
