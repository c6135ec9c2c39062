"""Prepare texts for continuous batching: Transformers' `generate` once for all, then the per-prompt parts."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StopStringCriteria,
)

from ..batch.callers_code import Owners, for_any_row, is_callers_criterion, serves_any_prompt
from ..batch.criteria import RowEnds, SharedCriterion
from ..batch.logits_processing import Processing
from ..batch.randomness import TextGenerators
from ..batch.suffix_memory import SuffixMemory
from ..engine.call import Call, RowLogprobs, RowParts, with_places
from ..models.cached_model import NotJoined
from ..models.introspection import base_of, device_of
from ..models.prefix_cache import PrefixCache, Segment
from ..policy.policy import LossyPolicy
from ..tasks.prompts import read_limits
from ..text.detokenizer import continuation
from ..validation import one_line, shown
from .arguments import refuse_prompt
from .draft_settings import choose_memories, read_hints
from .prefill import tensors_escape
from .runner import Runner
from .speculative import speculative_generate, stop_at


TEXT_SETTINGS = "seed", "logprobs", "memories", "tenant", "shared"  # that `generate` does not have
MAKERS = "stopping_criteria", "logits_processor"  # may be given as functions of a prompt's token ids


class PreparingRunner(Runner):
    """A runner that prepares a call without decoding; `generate` returns the call."""

    shares = False  # its rows move to another call's caches

    def finish(self, call: Call, model: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig) -> Call:
        return call


@dataclass
class TextRequest:
    """A text to generate."""

    index: int  # of the prompt
    prompt: list[int]  # token ids
    settings: dict[str, Any]  # of this text alone
    template: "Template"  # the prepared call for texts like it
    row: RowParts | None = None  # its row; None: the text is decoded alone
    began: float = 0.0  # start of decoding, `time.perf_counter`
    room: int | None = None  # new tokens for which the target has positions; None: no limit

    @property
    def longest(self) -> int:
        """The maximum length of prompt and text in tokens."""
        return len(self.prompt) if self.row is None else self.row.ends.max_length


@dataclass(eq=False)
class Template:
    """A call that `generate` prepared for the first prompt, reduced to what other prompts need.

    Args:
        call: without rows; its `processing` serves all prompts if `serves_all`.
        criteria: the call's, without the caller's.
        escapes: result of `tensors_escape`.
        serves_all: no processor reads the prompt.
        why_alone: why such texts cannot be batched; None: they can.
    """

    call: Call
    criteria: Sequence[Any]
    escapes: bool
    serves_all: bool
    why_alone: str | None = None

    def criteria_for(self, max_length: int, callers: Sequence[Any], stops: StopStringCriteria | None) -> list[Any]:
        """Return `generate`'s criteria for a text of `max_length` tokens; `stops` replaces the template's.

        `callers`: the caller's for this text, which replace those of the same types.
        """
        defaults: list[Any] = []
        for criterion in self.criteria:
            if type(criterion) is MaxLengthCriteria:
                criterion = MaxLengthCriteria(max_length)
            elif type(criterion) is MaxTimeCriteria:
                criterion = MaxTimeCriteria(criterion.max_time)
            if type(criterion) is not StopStringCriteria or stops is None:
                defaults.append(criterion)
        defaults += [] if stops is None else [stops]
        replaced = set(map(type, callers))
        return [*(criterion for criterion in defaults if type(criterion) not in replaced), *callers]


@dataclass
class PromptBlock:
    """Prompts prefilled together in a call; `requests`: those that have not joined the batch, by its row."""

    call: Call
    requests: dict[int, TextRequest]
    root: Segment | None  # where their prefixes are cached; None: they are not
    read: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens that its caches have room for."""
        return len(self.call.rows.lengths) * max(self.call.rows.lengths)

    def take(self, prefixes: PrefixCache) -> None:
        """Copy the cached beginnings of the prompts."""
        if self.root is not None:
            for row, request in self.requests.items():
                prefixes.give(self.root, self.call.models, row, request.prompt)

    def keep(self, prefixes: PrefixCache, room: float) -> None:
        """Cache the prompts, see `PrefixCache.keep`."""
        if self.root is not None:
            for row, request in self.requests.items():
                prefixes.keep(self.root, self.call.models, row, request.prompt, room)


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
        self.owners = Owners()
        self.pool: SuffixMemory | None = None  # finished texts, searched where that cannot change a text
        self.encodes = bool(base_of(target).config.is_encoder_decoder)
        self.generators = TextGenerators(seed)
        configs = settings.get("generation_config"), target.generation_config
        limits = [settings.get("max_new_tokens"), *(getattr(config, "max_new_tokens", None) for config in configs)]
        self.new_tokens = next((limit for limit in limits if limit is not None), None)  # default for prompts
        self.template: Template | None = None
        self._stops: dict[tuple[str, ...], StopStringCriteria] = {}

    @property
    def runs_callers_code(self) -> bool:
        """Whether the caller passed processors or criteria, or functions that make them."""
        return any(self.settings.get(name) is not None for name in MAKERS)

    def request(self, index: int, prompt: object, **settings: Any) -> TextRequest:
        """Return the request of a prompt (text, token ids, or a mapping with limits); `settings`: of this text.

        Raises: `ValueError` or `TypeError`, one line, for an invalid prompt, and errors of `generate`.
        """
        if isinstance(prompt, Mapping):
            name = f"prompts: number {index}"
            settings = read_limits(name, prompt, ["prompt", "logits_processor", "hints"]) | settings
            hints = read_hints(f"{name}: hints", prompt.get("hints"), self.tokenizer, self.target)
            settings["memories"] = () if hints is None else (hints,)
            if (passed := prompt.get("logits_processor")) is not None:
                settings["logits_processor"] = passed if _makes(passed) else lambda _: passed
            if "prompt" not in prompt:
                raise ValueError(f'{name}: the key "prompt" is missing: a text or a list of token ids')
            prompt = prompt["prompt"]
        return self.prepare(index, self.ids(index, prompt), settings)

    def prepare(self, index: int, ids: list[int], settings: dict[str, Any]) -> TextRequest:
        """Return a new request for a prompt's token ids, never reused: the caller's processors may have state."""
        now, callers = time.time(), self._callers(index, ids, settings)
        template = self.template = self.template or self._make_template(ids, settings)
        request = TextRequest(index, ids, settings, template)
        new_tokens = settings.get("max_new_tokens", self.new_tokens)
        if (size := template.call.positions.target) is not None:  # an encoder-decoder's text starts without the prompt
            request.room = size + 1 - (1 if self.encodes else len(ids))
        if template.why_alone is None:
            other = callers["logits_processor"] or settings.get("min_new_tokens") is not None
            request.row = (
                self._parts(request, callers["stopping_criteria"], new_tokens)
                if template.serves_all and new_tokens is not None and not other
                else self._parts_alone(request, callers)
            )
            for clock in request.row.ends.clocks:
                if clock.initial_timestamp >= now:  # it was made for this text, and starts when decoding does
                    clock.initial_timestamp = math.inf
        return request

    def call_alone(self, request: TextRequest) -> Call:
        """Return a call for the request's text alone, as prepared by `generate`, before prefill."""
        callers = self._callers(request.index, request.prompt, request.settings)
        call = self._generate_one(request, callers, self._generator(request))
        call.name_row = lambda _: f"prompt {request.index}"
        if request.room is not None:
            call.rows.cut(min(call.rows.width + max(request.room, 1), call.rows.max_length))
        call.rows.memories[0] = self._memories(request, call)
        if (logprobs := _logprobs(request)) is not None:
            call.logprobs[0] = logprobs
        return call

    def _memories(self, request: TextRequest, call: Call) -> Sequence[SuffixMemory]:
        """Return the texts from which a text may be drafted."""
        return choose_memories(request.index, call, [*self.memories, *request.settings.get("memories", ())], self.pool)

    def _callers(self, index: int, ids: list[int], settings: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the caller's processors and criteria for prompt `index`: the call's, then the prompt's, as one list
        for `generate`.

        `shared`: the ids of those that may serve other prompts, too.
        """
        out: dict[str, list[Any]] = {"shared": []} | {name: [] for name in MAKERS}
        for name in MAKERS:
            for passed in (self.settings.get(name), settings.get(name)):
                if passed is None:
                    continue
                is_maker = _makes(passed)
                for item in passed(ids) if is_maker else passed:
                    shared = not (is_maker and self.owners.is_made_for(item, index))
                    out["shared"] += [id(item)] if shared else []
                    if shared and name == "stopping_criteria" and callable(item) and is_callers_criterion(item):
                        item = SharedCriterion(item)
                    out[name].append(item)
        return out

    def _generate(self, ids: list[int], settings: dict[str, Any], generator: torch.Generator) -> Call:
        prompt = torch.tensor([ids], device=device_of(self.target))
        out: Call = speculative_generate(
            self.target,
            self.policy,
            PreparingRunner,
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generator=[generator],
            tokenizer=self.tokenizer,
            **{name: value for name, value in (self.settings | settings).items() if name not in TEXT_SETTINGS},
        )
        return out

    def _generate_one(self, request: TextRequest, callers: dict[str, list[Any]], generator: torch.Generator) -> Call:
        """Let `generate` prepare the call of a text with the caller's processors and criteria."""
        call = self._generate(request.prompt, request.settings | callers, generator)
        call.processing.serve_several(callers["shared"])
        return call

    def _make_template(self, ids: list[int], settings: dict[str, Any]) -> Template:
        """Let `generate` prepare a call for all prompts, without the caller's processors and criteria."""
        names = ["max_new_tokens"] if self.new_tokens is None else []
        taken = {name: settings[name] for name in names if name in settings}
        call = self._generate(ids, taken | dict.fromkeys(MAKERS), torch.Generator())
        processors, criteria = call.processing.processors, call.rows.criteria
        escapes, why_alone = tensors_escape(call, self.target), None
        try:
            call = with_places(call, 1, 1, call.clock, frozenset(call.rows.eos))
        except NotJoined as reason:
            why_alone = one_line(reason)
        call.processing = Processing([for_any_row(processor) for processor in processors], 1, call.sampling)
        return Template(call, criteria, escapes, all(map(serves_any_prompt, processors)), why_alone)

    def _parts(self, request: TextRequest, callers: Sequence[Any], new_tokens: int) -> RowParts:
        """Return the row of a text of up to `new_tokens` from the template. `callers`: the caller's criteria."""
        template, ids = request.template, request.prompt
        refuse_prompt(self.target, torch.tensor([ids]))
        criteria = template.criteria_for(len(ids) + new_tokens, callers, self._stop_strings(request))
        lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        longest = max(min(lengths, default=len(ids) + new_tokens), len(ids) + 1)
        return self._row(request, criteria, longest, template.call.processing)

    def _parts_alone(self, request: TextRequest, callers: dict[str, list[Any]]) -> RowParts:
        """Return the row of a text whose processors or length only Transformers can determine."""
        call = self._generate_one(request, callers, torch.Generator())
        return self._row(request, call.rows.criteria, call.rows.max_length, call.processing)

    def _row(self, request: TextRequest, criteria: Sequence[Any], longest: int, processing: Processing) -> RowParts:
        longest = min(longest, longest if request.room is None else len(request.prompt) + max(request.room, 1))
        ends = (criterion.eos_token_id.tolist() for criterion in criteria if type(criterion) is EosTokenCriteria)
        return RowParts(
            request.prompt,
            RowEnds.of(criteria, longest),
            frozenset().union(*ends),
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
        if (texts := request.settings.get("stop_strings")) is None:
            return None
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
                line = f"the tokenizer cannot read the text {shown(prompt)}, number {index}"
                raise ValueError(f"prompts: {line}: {one_line(error)}") from None
            if not ids:
                raise ValueError(f"prompts: the text {shown(prompt)}, number {index}, has no tokens: leave it out")
            prompt = ids
        elif isinstance(prompt, np.ndarray | torch.Tensor) and not getattr(prompt, "is_meta", False):
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


def _makes(value: object) -> bool:
    """Return whether processors or criteria are passed as a function; single ones and lists are callable, too."""
    return callable(value) and not isinstance(value, list | tuple | LogitsProcessor | StoppingCriteria)
