"""The draft settings of a call: which model or drafter drafts, and when a draft ends."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..artifacts.conditions import read_sampling
from ..artifacts.head import Head
from ..artifacts.sv_profile import Profile
from ..batch.suffix_memory import Hints, SuffixMemory
from ..drafters.auto import AutoDrafter
from ..drafters.base import DraftContext, Drafter
from ..drafters.composite import CompositeDrafter
from ..drafters.mtp import MTPDrafter
from ..drafters.suffix import LONGEST_MATCH, SuffixDrafter, SuffixRun
from ..engine.call import Call
from ..models.distributed import refuse_spread
from ..models.early_exit import early_exit
from ..models.introspection import base_of, vocabulary_of
from ..policy.policy import LossyPolicy
from ..stops import DraftStop
from ..stops.confidence import Confidence
from ..stops.constant import Constant, Heuristic
from ..stops.fallback import Fallback
from ..validation import LONGEST_DRAFT, check_int, check_number, is_int, shown
from .arguments import Settings


# Read from the call, then from the policy, then from the draft's generation config; never written.
DRAFT_SETTINGS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
# Transformers' settings for drafting without a draft model, and the n-gram length of the first.
MODEL_FREE_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit")
LONGEST_NGRAM = "max_matching_ngram_size"
# Transformers' settings for drafting from the target's hidden states, if this release has them.
STATE_DRAFTS = tuple(name for name in ("use_mtp", "speculation_type") if hasattr(GenerationConfig(), name))


@dataclass(frozen=True)
class DraftInputs:
    """The drafter of a call, which may use the assistant; the assistant alone if `drafter` is None."""

    assistant: PreTrainedModel
    drafter: Drafter | None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    other_tokenizer: bool = False


@dataclass(frozen=True)
class PromptLookup(SuffixDrafter):
    """The drafter of `prompt_lookup_num_tokens`: any match of up to `max_matching_ngram_size` tokens drafts that
    many."""


def choose_draft(
    target: PreTrainedModel, assistant: PreTrainedModel | None, drafter: Drafter | None, settings: Settings
) -> tuple[PreTrainedModel | None, Drafter | None]:
    """Return the assistant and the drafter of a call; `assistant`, `drafter`: as passed by the caller.

    The settings of the model's config are used only if the call does not say how to draft.

    Raises: `ValueError` or `TypeError`, one line, for two ways to draft and for values out of range.
    """
    kind = settings.resolve("speculation_type")
    if kind is not None and (drafter is None or assistant is not None):
        way_out = "leave lossy_policy out, or load the drafter's files with hf_lossy_assist.load_drafter"
        raise ValueError(f"speculation_type={shown(kind)} drafts in Transformers' own loop: {way_out}")
    sources = (*MODEL_FREE_DRAFTS, "use_mtp")
    drafts = [("assistant_model", assistant)] if drafter is None else [("drafter", drafter)]
    ways = [*((name, settings.resolve(name)) for name in sources), *drafts]
    ways = [(name, value) for name, value in ways if value is not None and value is not False]
    if not ways:
        ways = [(name, settings[name]) for name in sources if settings[name]]
    names = [name for name, _ in ways]
    if len(ways) > 1:
        raise ValueError(f"{names[0]} and {names[1]} are two ways to draft: pass one of them")
    match ways:
        case [("prompt_lookup_num_tokens", most)]:
            check_int("prompt_lookup_num_tokens", most, 1, LONGEST_DRAFT)
            longest = 2 if settings[LONGEST_NGRAM] is None else settings[LONGEST_NGRAM]
            check_int(LONGEST_NGRAM, longest, 1)
            return None, PromptLookup(1, min(longest, LONGEST_MATCH), float(most), most)
        case [("assistant_early_exit", layers)]:
            refuse_spread("early exit's target", target)
            return early_exit(target, layers), None
        case [("use_mtp", _)]:
            return None, MTPDrafter()
    return assistant, drafter


def read_hints(
    name: str, value: object, tokenizer: PreTrainedTokenizerBase | None, target: PreTrainedModel
) -> Hints | None:
    """Return documents that will be copied: a text, token ids of `target`, or a list of these; None: there are no
    tokens.

    Raises: `TypeError` or `ValueError`, one line that begins with `name`.
    """
    if value is None or isinstance(value, Hints):
        return value
    several = isinstance(value, list | tuple) and not all(map(is_int, value))
    documents, size = list[list[int]](), vocabulary_of(base_of(target))
    for hint in value if several and isinstance(value, list | tuple) else [value]:
        if isinstance(hint, str):
            if tokenizer is None:
                raise ValueError(f"{name}: a text needs tokenizer=…, or pass lists of token ids")
            hint = tokenizer(hint, add_special_tokens=False)["input_ids"]
        elif isinstance(hint, torch.Tensor | np.ndarray):
            hint = hint.tolist()
        if not isinstance(hint, list | tuple) or not all(map(is_int, hint)):
            raise TypeError(f"{name}: expected a text, the token ids of one, or a list of these, got {shown(hint)}")
        document = list(map(int, hint))
        if min(document, default=0) < 0:
            raise ValueError(f"{name}: {shown(min(document))} is no token id: leave out what pads or masks a document")
        if max(document, default=0) >= size:
            wrong = shown(max(document))
            raise ValueError(f"{name}: expected token ids below {size}, the target's, got {wrong}: use its tokenizer")
        documents.append(document)
    return Hints(documents) if any(documents) else None


def with_search(drafter: Drafter | None, assistant: PreTrainedModel | None) -> Drafter:
    """Return a drafter that also searches texts, for hints.
    Raises: `ValueError`, one line, for a composite of others."""
    if drafter is None:
        return SuffixDrafter() if assistant is None else CompositeDrafter()
    if not isinstance(drafter, CompositeDrafter | AutoDrafter):
        return drafter if isinstance(drafter, SuffixDrafter) else CompositeDrafter(then=drafter)
    if not isinstance(drafter.first, SuffixDrafter):
        name = type(drafter.first).__name__
        raise ValueError(f"hints: {name} searches no documents: use SuffixDrafter() in its place")
    return drafter


def choose_memories(
    row_id: int, call: Call, passed: Sequence[SuffixMemory], pool: SuffixMemory | None
) -> Sequence[SuffixMemory]:
    """Return the texts that a drafter searches for prompt `row_id`: those `passed`, and `pool` where it cannot change a
    text.

    Raises: `ValueError`, one line, for given ones and a drafter that searches no texts.
    """
    searcher = getattr(call.drafter, "first", call.drafter)
    if isinstance(searcher, SuffixRun):
        pooled = call.policy.lossless and not call.sampling and searcher.settings.memory is None
        return [*passed, *([pool] if pooled and pool is not None else [])]
    if passed:
        way_out = 'pass drafter="suffix", "composite" or "auto"'
        raise ValueError(f"prompts: number {row_id}: hints are for a drafter that searches texts: {way_out}")
    return ()


def refuse_stop(draft: DraftInputs, context: DraftContext) -> None:
    """Raise `ValueError` for a stop that reads a draft model's output if there is no draft model with the target's
    tokenizer."""
    asks = draft.drafter is not None and draft.drafter.main.asks_stop
    if not context.stop.settings.adaptive or context.assistant_run is not None or asks:
        return
    stop = context.stop.settings
    while isinstance(stop, Fallback):  # reads what the wrapped stop reads
        stop = stop.stop
    if draft.drafter is None:
        name = type(stop).__name__
        raise ValueError(f"{name} needs a draft model with the target's tokenizer: use a constant draft length")
    name, drafter = type(stop).__name__, type(draft.drafter).__name__
    way_out = "use a stop that plans ahead, such as Constant(8)"
    raise ValueError(f"{name} reads what a draft model computes, and {drafter} has none: {way_out}")


def choose_stop(policy: LossyPolicy, draft: DraftInputs, settings: Settings) -> DraftStop:
    """Return the draft stop of a call, in order of precedence: its settings, the policy's stop, the draft's generation
    config.

    Raises: `ValueError` or `TypeError`, one line, for a setting out of range, or in conflict with the policy's stop.
    """
    draft_config = None
    if policy.stop is None and draft.assistant is not None:
        draft_config = base_of(draft.assistant).generation_config
    gamma, schedule, threshold = (settings.resolve(name, draft_config) for name in DRAFT_SETTINGS)
    source = {
        name: name if settings.resolve(name) is not None else f"{name} in the draft's generation config"
        for name in DRAFT_SETTINGS
    }
    if gamma is not None:
        check_int(source["num_assistant_tokens"], gamma, 1, LONGEST_DRAFT)
    if policy.stop is not None:
        for name, value in zip(DRAFT_SETTINGS[1:], (schedule, threshold), strict=True):
            if value is not None:
                raise ValueError(f"{name} is itself a draft stop, and the policy has one ({policy}): pass one of them")
        return policy.stop if gamma is None else policy.stop.with_longest(gamma)
    if threshold:
        check_number(source["assistant_confidence_threshold"], threshold, 0.0, 1.0)
        return Confidence(threshold, gamma or Confidence.max_draft)
    if schedule in ("heuristic", "heuristic_transient"):
        return Heuristic(gamma or Heuristic.initial, max(gamma or 0, Heuristic.max_draft))
    if schedule not in (None, "constant"):
        name = source["num_assistant_tokens_schedule"]
        raise ValueError(f'{name}: expected "constant" or "heuristic", got {shown(schedule)}')
    lookup = draft.drafter.max_draft if isinstance(draft.drafter, PromptLookup) else None
    return Constant(gamma or lookup or Constant.gamma)


def make_cost_key(policy: LossyPolicy, drafter: Drafter | None, config: GenerationConfig, *where: object) -> Hashable:
    """Return a key for calls with similar costs and acceptance, given models and stop.

    Sampling settings are rounded to one decimal place: texts at temperatures 0.7 and 0.72 are similar.

    Args:
        drafter: None for a plain draft model.
        config: the call's `GenerationConfig`.
        where: device, dtype and the like.
    """
    decoding = tuple((name, round(value, 1)) for name, value in read_sampling(config).items())
    keys = tuple(_settings_key(component) for component in (policy.rule, policy.filter, drafter))
    return keys, decoding, tuple(map(str, where))


def _settings_key(value: object) -> Hashable:
    """Return a key without references: heads and profiles by source, other objects by id."""
    if isinstance(value, Head | Profile):
        return value.source or id(value)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if field.init]
        return type(value).__qualname__, *(_settings_key(getattr(value, name)) for name in names)
    if isinstance(value, list | tuple):
        return tuple(map(_settings_key, value))
    if isinstance(value, Mapping):
        return tuple((str(name), _settings_key(entry)) for name, entry in value.items())
    return value if isinstance(value, int | float | str | type(None)) else (type(value).__qualname__, id(value))
