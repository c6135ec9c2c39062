"""Processors and criteria: which are known functions, and a look for state in a caller's that serves several texts.

One text's are called as `generate` calls them, so they may keep anything. One object for several texts must keep
nothing.
"""

import copy
import functools
import inspect
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import (
    AsyncTextIteratorStreamer,
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
    TextIteratorStreamer,
    TextStreamer,
)
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

from ..text.structured import StructuredOutput


CONTAINERS = dict, list, tuple, set, frozenset, deque
MOST_ENTRIES = 4096  # of an array or container that is compared by value; a larger one by its identity and length
VALUES = bool, int, float, complex, str, bytes, np.generic, torch.dtype, torch.device, type(None)
STATELESS = PreTrainedModel, PreTrainedTokenizerBase, ModuleType, type
NUMBERS: dict[type, Callable[[Any], object]] = {  # sources of random numbers, and their states
    torch.Generator: lambda x: x.get_state().tolist(),
    random.Random: lambda x: x.getstate(),
    np.random.Generator: lambda x: x.bit_generator.state,
}
# Transformers' criteria and streamers; not subclasses, which may be the caller's.
CRITERIA = EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria
STREAMERS = TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer
GRAMMAR_LIBRARIES = {"xgrammar", "outlines", "outlines_core", "llguidance", "lmformatenforcer", "transformers_cfg"}


def is_callers_criterion(criterion: object) -> bool:
    """Return whether a criterion may do anything, unlike Transformers' and those with `judges_rows_alone`."""
    return type(criterion) not in CRITERIA and not getattr(criterion, "judges_rows_alone", False)


def is_callers_streamer(streamer: object) -> bool:
    """Return whether a streamer may store what it gets, unlike Transformers' and those with `keeps_no_tensors`."""
    return type(streamer) not in STREAMERS and not getattr(streamer, "keeps_no_tensors", False)


class Owners:
    """The prompts for which the caller's function made objects, while these exist."""

    def __init__(self) -> None:
        self._indices: dict[int, tuple[weakref.ref[object], int]] = {}  # by id

    def is_made_for(self, callback: object, index: int) -> bool:
        """Return whether the function returned `callback` for no other prompt than `index`."""
        holder = getattr(callback, "__self__", callback)
        key = id(holder)
        try:
            entry = weakref.ref(holder, lambda _: self._indices.pop(key, None)), index
        except TypeError:  # it may be one object for all prompts, which nobody can follow
            return False
        return self._indices.setdefault(key, entry)[1] == index


@contextmanager
def refuse_state(
    argument: str, callback: object, more: str, serves_several: bool = True, draws: bool = False
) -> Iterator[None]:
    """Refuse a call of `callback` inside the context that changes what it holds, if it serves several texts.

    `argument`: the name of the setting. `more`: the way out. `draws`: refuse draws of torch's global random numbers,
    too.
    """

    def look() -> tuple[list[object], bytes]:
        contents = _contents(callback, {}) if serves_several else []
        return contents, torch.get_rng_state().numpy().tobytes() if draws else b""

    def refusal(what: str) -> ValueError:
        return ValueError(f"{argument}: {name_of(callback)} {what}, and one object serves several texts: {more}")

    before, drawn = look()
    try:
        yield
    except Exception as error:
        if look()[0] != before:
            raise refusal(f"raised {error!r}") from error
        raise
    after, drawn_after = look()
    if after != before:
        raise refusal("remembers something from token to token")
    if drawn_after != drawn:
        raise ValueError(
            f"{argument}: {name_of(callback)} draws Torch's random numbers, for several texts in another order than "
            "`generate`: give it a torch.Generator, or pass prompts one by one"
        )


def _contents(x: object, seen: dict[int, object]) -> list[object]:
    """List what `x` holds, so that two lists are equal if nobody changed it: values, small arrays, containers,
    attributes, closures, and values of globals that its functions name. Other objects count by identity, an iterator as
    changed. `seen`: by id, kept alive.
    """
    if isinstance(x, VALUES):
        return [x if x == x else "nan"]
    if id(x) in seen or isinstance(x, STATELESS):
        return [id(x)]
    seen[id(x)] = x
    state = next((read(x) for kind, read in NUMBERS.items() if isinstance(x, kind)), None)
    if state is not None:
        return [repr(state)]
    if isinstance(x, torch.Tensor):
        if x.numel() > MOST_ENTRIES or x.layout != torch.strided:
            return [id(x), None if x.is_inference() else x._version]
        return [x.shape, x.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()]
    if isinstance(x, np.ndarray) and not x.dtype.hasobject:
        return [x.shape, x.tobytes()] if x.size <= MOST_ENTRIES else [id(x)]
    if hasattr(type(x), "__next__"):
        return [object()]
    if isinstance(x, CONTAINERS) and len(x) > MOST_ENTRIES:
        return [id(x), len(x)]
    return [id(x), *(entry for member in _parts(x) for entry in _contents(member, seen))]


def _parts(x: Any) -> list[object]:
    """List the objects in `x`."""
    out: list[object] = []
    if isinstance(x, dict):
        out += [*x, *x.values()]
    elif isinstance(x, CONTAINERS):
        out += x
    elif isinstance(x, FunctionType):
        cells = inspect.getclosurevars(x)
        out += cells.nonlocals.values()
        out += [value for value in cells.globals.values() if isinstance(value, (*VALUES, *CONTAINERS))]
    elif isinstance(x, MethodType | functools.partial):
        out += [getattr(x, name, None) for name in ("__self__", "func", "args", "keywords")]
    if hasattr(x, "__dict__"):
        kinds = FunctionType, *VALUES, *CONTAINERS
        of_class = {n: y for n, y in vars(type(x)).items() if n == "__call__" or not n.startswith("__")}
        out += [vars(x), *(y for y in of_class.values() if isinstance(y, kinds))]
    return out + [getattr(x, name, None) for kind in type(x).__mro__ for name in vars(kind).get("__slots__", ())]


def way_out(processor: object, other: str) -> str:
    """Return the advice for an error about `processor`: the replacement for a grammar library's, else `other`."""
    of_grammar = type(processor).__module__.partition(".")[0] in GRAMMAR_LIBRARIES
    return "use hla.structured(grammar or schema, tokenizer) in place of it" if of_grammar else other


def name_of(callback: object) -> str:
    """Name the caller's object in an error message."""
    if type(callback) is PrefixConstrainedLogitsProcessor:
        return "prefix_allowed_tokens_fn"
    return callback.__name__ if isinstance(callback, FunctionType) else type(callback).__name__


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
# Transformers' functions of text and scores, by name, since not every release has all of them. Checked by reading their
# code: what they change of themselves (a table made at the first call, a generator seeded at each) does not affect
# results.
FUNCTIONS = {kind.__name__ for kind in PREFIX_FREE} | set(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor RepetitionPenaltyLogitsProcessor "
    "EncoderRepetitionPenaltyLogitsProcessor TopHLogitsWarper NoRepeatNGramLogitsProcessor "
    "EncoderNoRepeatNGramLogitsProcessor SequenceBiasLogitsProcessor NoBadWordsLogitsProcessor "
    "ForcedBOSTokenLogitsProcessor ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor "
    "ExponentialDecayLengthPenalty LogitNormalization SuppressTokensAtBeginLogitsProcessor "
    "WhisperTimeStampLogitsProcessor ClassifierFreeGuidanceLogitsProcessor AlternatingCodebooksLogitsProcessor "
    "BarkEosPrioritizerLogitsProcessor WatermarkLogitsProcessor DiaClassifierFreeGuidanceLogitsProcessor "
    "DiaEOSChannelFilterLogitsProcessor".split()
)
# Those that read the prompt, or count from its end: each prompt has another.
PROMPT_PROCESSORS = set(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor ExponentialDecayLengthPenalty SuppressTokensAtBeginLogitsProcessor "
    "EncoderRepetitionPenaltyLogitsProcessor EncoderNoRepeatNGramLogitsProcessor "
    "WhisperTimeStampLogitsProcessor".split()
)


def is_function(processor: object) -> bool:
    """Return whether a processor is a known function of text and scores, neither the caller's nor new in a later
    release."""
    kind = type(processor)
    if kind is StructuredOutput:
        return True
    return kind.__name__ in FUNCTIONS and getattr(logits_process, kind.__name__, None) is kind


def for_row(processor: Any, row: int, batch: int) -> Any:
    """Return a copy of a processor for which `keeps_rows` holds, but no `StructuredOutput`, for one row of `batch`."""
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
    """Return `processors` for prompts of `length` tokens: grammar processors get their begin; xgrammar's unused ones
    are replaced.

    Raises: `ValueError`, one line, for a grammar of another tokenizer than the target's.
    """
    check_grammars(processors := list(processors), target, tokenizer)
    return LogitsProcessorList(_begun(processor, length) for processor in processors)


def check_grammars(
    processors: Iterable[Any], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Refuse grammars of another tokenizer than the target's, the call's `tokenizer` if it has one.
    See `StructuredOutput.check`."""
    for processor in processors:
        if isinstance(processor, StructuredOutput):
            processor.check(target, tokenizer)


def skip_padding(processors: Iterable[Any], before: torch.Tensor, after: torch.Tensor) -> list[Any]:
    """Return `processors`, made for prompts with the mask `before` (B, width), for the same prompts in the columns of
    the mask `after`.

    Transformers' repetition penalty passes over the padding on the left.
    """
    starts, wanted = (mask.ne(0).long().argmax(dim=1) for mask in (before, after))
    out = []
    for processor in processors:
        skipped: Any = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(skipped, torch.Tensor):
            is_default = torch.equal(skipped.to(starts.device), starts)
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, wanted) if is_default else processor
        out.append(processor)
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
        and type(processor).__name__ not in PROMPT_PROCESSORS
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
