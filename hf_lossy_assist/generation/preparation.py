"""Prepare texts for continuous batching: Transformers' `generate` once for all, then the per-prompt parts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
)

from ..batch.criteria import CriteriaOfTexts, RowEnds
from ..batch.logits_processing import Processing
from ..batch.logprobs import RowLogprobs
from ..batch.processor_kinds import begun
from ..batch.randomness import TextGenerators
from ..batch.row_processing import OF_PROMPT, for_prompt, is_made_anew, merged
from ..batch.suffix_memory import SuffixMemory
from ..engine.call import Call
from ..engine.insertion import RowParts, with_places
from ..models.cached_model import NotJoined
from ..models.introspection import base_of, device_of
from ..models.texts import continuation
from ..policy.policy import LossyPolicy
from ..tasks.prompts import read_limits
from ..validation import one_line, shown
from .arguments import check_functions
from .draft_settings import choose_memories, read_hints
from .input_checks import refuse_prompt
from .prefill import tensors_escape
from .runner import Runner
from .speculative import speculative_generate, stop_at


OF_TEXT = "seed", "logprobs", "memories", "tenant"  # settings of a text that `generate` does not have
MAKERS = "stopping_criteria", "logits_processor"  # may be given as functions of a prompt's token ids


class PreparingRunner(Runner):
    """A runner that prepares a call without decoding; `generate` returns the call and the prepared config."""

    shares = False  # its rows move to another call's caches

    def finish(
        self, call: Call, model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig
    ) -> tuple[Call, GenerationConfig]:
        return call, config


@dataclass
class TextRequest:
    """A text to generate."""

    index: int  # of the prompt
    prompt: list[int]  # token ids
    settings: dict[str, Any]  # of this text alone
    template: "Template"  # the prepared call for texts like it
    parts: RowParts | None = None  # its row; None: the text is decoded alone
    began: float = 0.0  # start of decoding, `time.perf_counter`
    room: int | None = None  # new tokens for which the target has positions; None: no limit

    @property
    def longest(self) -> int:
        """The maximum length of prompt and text in tokens."""
        return len(self.prompt) if self.parts is None else self.parts.ends.max_length


@dataclass(eq=False)
class Template:
    """A call that `generate` prepared for the first prompt, reduced to what other prompts need."""

    call: Call  # without rows
    config: GenerationConfig  # prepared by `generate`
    width: int  # length of the first prompt
    processors: Sequence[Any]  # the call's
    criteria: Sequence[Any]  # the call's
    escapes: bool  # result of `tensors_escape`
    why_alone: str | None = None  # why such texts cannot be batched; None: they can

    def __post_init__(self) -> None:
        self.serves_all = self.why_alone is None and all(map(is_made_anew, self.processors))
        self.each = any(type(each).__name__ in OF_PROMPT for each in self.processors)
        shared = LogitsProcessorList(self.processors_for(torch.ones(1, 1), 0))
        self.call.processing = self.processing = Processing(shared, 1, self.call.sampling)

    def processors_for(self, prompt: torch.Tensor, max_length: int) -> list[Any]:
        """Return the processors that `generate` would make for a prompt (1, n)."""
        more, counts_new = prompt.shape[1] - self.width, self.config.min_new_tokens is not None
        return [for_prompt(each, prompt, more, max_length, counts_new) for each in self.processors]

    def criteria_for(self, max_length: int, stops: StopStringCriteria | None) -> list[Any]:
        """Return the criteria that `generate` would make for a text of `max_length` tokens; `stops` replaces the template's."""
        out = [] if stops is None else [stops]
        for each in self.criteria:
            if type(each) is MaxLengthCriteria:
                out.append(MaxLengthCriteria(max_length))
            elif type(each) is MaxTimeCriteria:
                out.append(MaxTimeCriteria(each.max_time))
            elif stops is None or type(each) is not StopStringCriteria:
                out.append(each)
        return out


class Preparation:
    """A factory of requests for prompts with the same models, policy and settings."""

    def __init__(
        self,
        target: PreTrainedModel,
        policy: LossyPolicy,
        tokenizer: PreTrainedTokenizerBase | None,
        seed: int | None,
        settings: dict[str, Any],
    ):
        """Arguments as in `generate_many`."""
        self.target, self.policy, self.tokenizer = target, policy, tokenizer
        hints = read_hints("hints", settings.get("hints"), tokenizer, target)
        self.settings, self.memories = settings | {"hints": hints}, () if hints is None else (hints,)  # of all texts
        self.criteria = CriteriaOfTexts()
        if isinstance(criteria := settings.get("stopping_criteria"), list | tuple):
            self.settings["stopping_criteria"] = self.criteria.shared(criteria)
        self.pool: SuffixMemory | None = None  # finished texts, searched where that cannot change a text
        self.encodes = bool(base_of(target).config.is_encoder_decoder)
        self.generators = TextGenerators(seed)
        configs = settings.get("generation_config"), target.generation_config
        found = [settings.get("max_new_tokens"), *(getattr(config, "max_new_tokens", None) for config in configs)]
        self.new_tokens = next((number for number in found if number is not None), None)  # default for prompts
        self.holders: dict[int, object] = {}  # objects with uncopied state of prompts' processors
        self.templates: dict[int | None, Template] = {}  # by `min_new_tokens` of a prompt
        self._stops: dict[tuple[str, ...], StopStringCriteria] = {}

    @property
    def runs_callers_code(self) -> bool:
        """Whether the caller passed processors or criteria, or functions that make them, even if some prompts get none."""
        return any(self.settings.get(name) is not None for name in MAKERS)

    def request(self, index: int, prompt: object, **settings: Any) -> TextRequest:
        """Return the request of a prompt: a text, token ids, or a mapping with one of them and limits. `settings`: of this text alone.

        Raises: `ValueError` or `TypeError`, one line, for an invalid prompt, and errors of `generate`.
        """
        if isinstance(prompt, Mapping):
            name = f"prompts: number {index}"
            settings = read_limits(name, prompt, ["prompt", "logits_processor", "hints"]) | settings
            hints = read_hints(f"{name}: hints", prompt.get("hints"), self.tokenizer, self.target)
            settings["memories"] = () if hints is None else (hints,)
            if (given := prompt.get("logits_processor")) is not None:
                settings["logits_processor"] = given if _makes(given) else lambda _: given
            if "prompt" not in prompt:
                raise ValueError(f'{name}: the key "prompt" is missing: a text or a list of token ids')
            prompt = prompt["prompt"]
        return self.prepare(index, self.ids(index, prompt), settings)

    def prepare(self, index: int, ids: list[int], settings: dict[str, Any]) -> TextRequest:
        """Return a new request for a prompt's token ids. Never reused, since processors that the caller makes for a prompt may have state."""
        now, callers = time.time(), self._callers(index, ids, settings)
        key = settings.get("min_new_tokens")
        if key not in self.templates:
            taken = ["min_new_tokens", *(["max_new_tokens"] if self.new_tokens is None else [])]
            self.templates[key] = self._make_template(
                ids, {name: settings[name] for name in taken if name in settings}
            )
        template = self.templates[key]
        request = TextRequest(index, ids, settings, template)
        new_tokens = settings.get("max_new_tokens", self.new_tokens)
        if (size := template.call.positions.target) is not None:  # an encoder-decoder's text starts without the prompt
            request.room = size + 1 - (1 if self.encodes else len(ids))
        if template.why_alone is None:
            request.parts = (
                self._parts(request, callers, new_tokens)
                if template.serves_all and new_tokens is not None
                else self._parts_alone(request, callers)
            )
            for clock in request.parts.ends.clocks:
                if clock.initial_timestamp >= now:  # it was made for this text, and starts when decoding does
                    clock.initial_timestamp = math.inf
        return request

    def call_alone(self, request: TextRequest) -> Call:
        """Return a call for the request's text alone, as prepared by `generate`, before prefill."""
        callers = self._callers(request.index, request.prompt, request.settings)
        call = self._generate(request.prompt, request.settings | callers, self._generator(request))[0]
        call.name_row = lambda _: f"prompt {request.index}"
        if request.room is not None:
            call.rows.cut(min(call.rows.width + max(request.room, 1), call.rows.max_length))
        call.rows.memories[0] = self._memories(request, call)
        if (logprobs := _logprobs(request)) is not None:
            call.logprobs[0] = logprobs
        return call

    def _memories(self, request: TextRequest, call: Call) -> Sequence[SuffixMemory]:
        """Return the texts from which a text may be drafted."""
        given = *self.memories, *request.settings.get("memories", ())
        return choose_memories(request.index, call, given, self.pool)

    def _callers(self, index: int, ids: list[int], settings: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the caller's processors and criteria for prompt `index`: the call's, then the prompt's, as one list for `generate`."""
        out: dict[str, list[Any]] = {name: [] for name in MAKERS}
        for name in MAKERS:
            for functions in (self.settings.get(name), settings.get(name)):
                if functions is not None:
                    functions = functions(ids) if _makes(functions) else functions
                    check_functions(name, functions)
                    out[name] += functions
        out["stopping_criteria"] = self.criteria.made(out["stopping_criteria"], index)
        return out

    def _generate(
        self, ids: list[int], settings: dict[str, Any], generator: torch.Generator
    ) -> tuple[Call, GenerationConfig]:
        prompt = torch.tensor([ids], device=device_of(self.target))
        out: tuple[Call, GenerationConfig] = speculative_generate(
            self.target,
            self.policy,
            PreparingRunner,
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generator=[generator],
            tokenizer=self.tokenizer,
            **{name: value for name, value in (self.settings | settings).items() if name not in OF_TEXT},
        )
        return out

    def _make_template(self, ids: list[int], settings: dict[str, Any]) -> Template:
        """Let `generate` prepare a call for all prompts, without the caller's processors and criteria."""
        call, config = self._generate(ids, settings | dict.fromkeys(MAKERS), torch.Generator())
        processors, criteria, escapes = (
            call.processing.processors,
            call.rows.criteria,
            tensors_escape(call, self.target),
        )
        why_alone = None
        try:  # all templates share one call except for its processors, so that its hooks serve all texts
            first = next((each.call for each in self.templates.values() if each.why_alone is None), call)
            first = replace(first, processing=call.processing)
            call = with_places(first, 1, 1, call.clock, frozenset(call.rows.eos))
        except NotJoined as reason:
            why_alone = one_line(reason)
        return Template(call, config, len(ids), processors, criteria, escapes, why_alone)

    def _parts(self, request: TextRequest, callers: dict[str, list[Any]], new_tokens: int) -> RowParts:
        """Return the row of a text with up to `new_tokens` new tokens, from the template. `callers`: as in `_callers`."""
        template, ids = request.template, request.prompt
        prompt = torch.tensor([ids])
        refuse_prompt(self.target, prompt)
        processing = template.processing
        if template.each or callers["logits_processor"]:
            device = device_of(self.target)
            defaults = template.processors_for(prompt.to(device), len(ids) + new_tokens)
            given = begun(callers["logits_processor"], len(ids), self.target, self.tokenizer)
            both = LogitsProcessorList(merged(defaults, given))
            processing = Processing(both, 1, template.call.sampling)
            processing.beside_others(self._makes_processors(request), self.holders)
        defaults = template.criteria_for(len(ids) + new_tokens, self._stop_strings(request))
        criteria = merged(defaults, callers["stopping_criteria"])
        lengths = [each.max_length for each in criteria if type(each) is MaxLengthCriteria]
        longest = max(min(lengths, default=len(ids) + new_tokens), len(ids) + 1)
        return self._row(request, criteria, longest, processing)

    def _parts_alone(self, request: TextRequest, callers: dict[str, list[Any]]) -> RowParts:
        """Return the row of a text whose processors or length only Transformers can determine."""
        call, _ = self._generate(request.prompt, request.settings | callers, torch.Generator())
        call.processing.beside_others(self._makes_processors(request), self.holders)
        return self._row(request, call.rows.criteria, call.rows.max_length, call.processing)

    def _makes_processors(self, request: TextRequest) -> bool:
        return any(_makes(source.get("logits_processor")) for source in (self.settings, request.settings))

    def _row(self, request: TextRequest, criteria: Sequence[Any], longest: int, processing: Processing) -> RowParts:
        longest = min(longest, longest if request.room is None else len(request.prompt) + max(request.room, 1))
        ends = [each.eos_token_id.tolist() for each in criteria if type(each) is EosTokenCriteria]
        return RowParts(
            request.prompt,
            RowEnds.of(criteria, longest),
            frozenset(token for tokens in ends for token in tokens),
            processing,
            self._generator(request),
            _logprobs(request),
            self._memories(request, request.template.call),
        )

    def _generator(self, request: TextRequest) -> torch.Generator:
        call = request.template.call
        draws = call.sampling or call.rule.rule.needs_coins
        return self.generators.make(request.index, request.settings.get("seed"), draws)

    def _stop_strings(self, request: TextRequest) -> StopStringCriteria | None:
        texts = request.settings.get("stop_strings")
        if texts is None:
            return None
        if self.tokenizer is None:
            raise ValueError(
                f"prompts: number {request.index}: stop_strings needs the tokenizer to find them: pass tokenizer=…"
            )
        key = tuple(texts)
        if key not in self._stops:
            self._stops[key] = stop_at(list(key), self.tokenizer)
        return self._stops[key]

    def ids(self, index: int, prompt: object) -> list[int]:
        """Return the token ids of a prompt. Raises: `ValueError` or `TypeError`, one line, for an invalid prompt."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompts: a text needs tokenizer=…, or pass lists of token ids")
            try:
                ids = self.tokenizer(prompt)["input_ids"]
            except (TypeError, ValueError) as error:  # a lone surrogate
                raise ValueError(
                    f"prompts: the tokenizer cannot read the text {shown(prompt)}, number {index}: {one_line(error)}"
                ) from None
            if not ids:
                raise ValueError(f"prompts: the text {shown(prompt)}, number {index}, has no tokens: leave it out")
            prompt = ids
        elif isinstance(prompt, np.ndarray) or (isinstance(prompt, torch.Tensor) and not prompt.is_meta):
            prompt = prompt.tolist()
        numbers = list(prompt) if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray) else []
        numbers = [int(value) if isinstance(value, np.integer) else value for value in numbers]
        if not numbers or not all(type(value) is int and value.bit_length() < 64 for value in numbers):
            raise TypeError(f"prompts: expected a text or a list of token ids, got {shown(prompt)} as number {index}")
        return numbers

    def text(self, prompt: list[int], ids: list[int]) -> str | None:
        """Return the text that `ids` add to `prompt`, or an encoder-decoder's text; None without a tokenizer."""
        return None if self.tokenizer is None else continuation(self.tokenizer, [] if self.encodes else prompt, ids)


def _logprobs(request: TextRequest) -> RowLogprobs | None:
    """Return a record for the log-probabilities of a text's tokens, if requested."""
    wanted = request.settings.get("logprobs")
    return None if wanted is None else RowLogprobs(wanted)


def _makes(given: object) -> bool:
    """Return whether processors or criteria are given as a function; single ones and Transformers' lists are callable, too."""
    return callable(given) and not isinstance(given, list | tuple | LogitsProcessor | StoppingCriteria)
