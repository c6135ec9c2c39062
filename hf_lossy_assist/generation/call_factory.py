"""Makes a call of each prompt of `generate_many`, which this package decodes with others: by Transformers' `generate`, or like an earlier one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..batch.logits_processing import Processing
from ..batch.processor_kinds import PREFIX_FREE
from ..batch.randomness import Randomness
from ..batch.rows import Rows
from ..drafters.model import AssistantRun
from ..engine.call import Call
from ..engine.joining import cached_models
from ..models.introspection import device_of
from ..models.probe import refuse_length
from ..models.row_model import RowModel, joins
from ..models.texts import continuation
from ..policy.policy import LossyPolicy
from ..stats.clock import Clock
from ..validation import shown
from .input_checks import refuse_prompt
from .runner import Runner
from .speculative import speculative_generate


PER_PROMPT = "stopping_criteria", "logits_processor"
OVERRIDES = {"seed", "max_new_tokens", *PER_PROMPT[:1]}  # settings of one text that another one can do without
MOST_TEMPLATES = 64  # longest lengths that calls were prepared for
SAME_FOR_ALL = (EosTokenCriteria, StopStringCriteria)  # they keep nothing, and do not know how long a prompt is


class PreparingRunner(Runner):
    """Prepares a call; `generate` returns it."""

    shares = False  # rows of other calls take places in its caches

    def finish(
        self,
        call: Call,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> Any:
        return call


class CallFactory:
    """Prepares calls of one row with the same models, policy and settings."""

    def __init__(
        self,
        target: PreTrainedModel,
        policy: LossyPolicy,
        tokenizer: PreTrainedTokenizerBase,
        seed: int | None,
        settings: dict[str, Any],
    ):
        """Arguments as of `generate_many`."""
        self.target, self.policy, self.tokenizer, self.settings = target, policy, tokenizer, settings
        self.seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        self.holders: dict[int, object] = {}  # what holds state of prompts' processors that has to be copied
        self.templates: dict[int | None, CallTemplate | None] = {}  # by the most new tokens of a text

    @property
    def runs_callers_code(self) -> bool:
        """Tell whether processors or criteria are made for each prompt, of some of which there may be none."""
        return any(self.settings.get(name) is not None for name in PER_PROMPT)

    def make(self, index: int, ids: list[int], overrides: dict[str, Any]) -> Call:
        """Return a call that has not read its prompt yet. `overrides`: settings of this text alone; `seed` is one."""
        prompt = torch.tensor([ids], device=device_of(self.target))
        settings = self.settings | overrides
        source = [settings.pop("seed")] if "seed" in settings else [self.seed, index]
        seed = int(np.random.SeedSequence(source).generate_state(1, np.uint64)[0])
        made = {name: settings.get(name) for name in PER_PROMPT}
        made = {name: value(ids) for name, value in made.items() if callable(value) and not isinstance(value, list)}
        settings |= made
        generator, criteria = torch.Generator().manual_seed(seed >> 1), made.get("stopping_criteria") or []
        most = settings.get("max_new_tokens")
        listed = overrides.get("stopping_criteria") is not None and "stopping_criteria" not in made
        if type(most) is not int or not overrides.keys() <= OVERRIDES or "logits_processor" in made or listed:
            most = None  # calls are prepared for each prompt
        template = self.templates.get(most)
        if template is not None and may_be_added(criteria):
            refuse_prompt(self.target, prompt)
            refuse_length(self.target, len(ids) + template.new_tokens)
            return template(prompt, criteria, generator)
        call: Call = speculative_generate(
            self.target,
            self.policy,
            runner_type=PreparingRunner,
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generator=[generator],
            tokenizer=self.tokenizer,
            **settings,
        )
        call.processing.beside_others("logits_processor" in made, self.holders)
        if most is not None and most not in self.templates:
            if len(self.templates) >= MOST_TEMPLATES:
                self.templates.clear()
            self.templates[most] = CallTemplate.of(call, criteria, self.settings.get("stopping_criteria"), most)
        return call

    def ids(self, index: int, prompt: object) -> list[int]:
        """Return the token ids of a prompt. Raises: `ValueError` or `TypeError`, one line, for what is none."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompts: a text needs tokenizer=…, or pass lists of token ids")
            if not (ids := self.tokenizer(prompt)["input_ids"]):
                raise ValueError(f"prompts: the text {shown(prompt)}, number {index}, has no tokens: leave it out")
            prompt = ids
        elif isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or not prompt or not all(type(value) is int for value in prompt):
            raise TypeError(f"prompts: expected a text or a list of token ids, got {shown(prompt)} as number {index}")
        return list(prompt)

    def text(self, prompt: list[int], ids: list[int]) -> str | None:
        """Return the text that `ids` add behind `prompt`; None where there is no tokenizer."""
        return None if self.tokenizer is None else continuation(self.tokenizer, prompt, ids)


class CallTemplate:
    """Makes calls of one row like one that Transformers has prepared."""

    def __init__(self, call: Call, criteria: StoppingCriteriaList, new_tokens: int):
        """`call`: the one to be like, of which nothing is kept that its prompt fills. `criteria`: of all texts. `new_tokens`: the most of each."""
        self.call, self.criteria, self.new_tokens = call, criteria, new_tokens
        self.call = self(call.rows.ids[:, :1], [], torch.Generator())

    @classmethod
    def of(cls, call: Call, made: Sequence[object], given: object, new_tokens: int) -> "CallTemplate | None":
        """Make one from a call that has read nothing yet; None where something in it goes by its prompt, or may do so for all that is known.

        `made`: the caller's criteria for this text alone; `given`: those for all texts, or what makes them. `new_tokens`: the most that were
        asked for.
        """
        rows, shared = (
            call.rows,
            [criterion for criterion in call.rows.criteria if not any(criterion is each for each in made)],
        )
        lengths = [criterion for criterion in shared if type(criterion) is MaxLengthCriteria]
        knows_no_prompt = (
            not call.compiled
            and call.drafter.is_plain_model
            and all(map(joins, cached_models(call)))
            and all(type(criterion) in (*SAME_FOR_ALL, MaxLengthCriteria) for criterion in shared)
            and not any(
                criterion is passed for criterion in lengths for passed in (given if isinstance(given, list) else ())
            )  # a total length
            and all(type(criterion) in PREFIX_FREE for criterion in call.processing.processors)
            and rows.token_types is None
            and not rows.has_holes
        )
        if not knows_no_prompt or not may_be_added(made):
            return None
        return cls(
            call,
            StoppingCriteriaList(criterion for criterion in shared if type(criterion) is not MaxLengthCriteria),
            new_tokens,
        )

    def __call__(self, prompt: torch.Tensor, made: Sequence[object], generator: torch.Generator) -> Call:
        """Return the call of a prompt, (1, n) int64 on the target's device. `made`: criteria of this text alone, such as `may_be_added` allows."""
        old = self.call
        assert isinstance(old.target, RowModel) and isinstance(old.drafter, AssistantRun)
        criteria = StoppingCriteriaList([*self.criteria, *made])
        rows = Rows(prompt, [0], criteria, prompt.shape[1] + self.new_tokens)
        processing, stop, clock = (
            Processing(old.processing.processors, 1),
            old.stop.settings.start(1),
            Clock(prompt.device),
        )
        if old.stop_context is not None:
            stop.pair(*old.stop_context)
        return replace(
            old,
            rows=rows,
            target=old.target.anew(rows.max_length),
            drafter=old.drafter.anew(rows.max_length, stop, processing, clock),
            companion=None if old.companion is None else old.companion.anew(rows.max_length),
            stop=stop,
            rule=old.policy.rule.start(rows.token_ids()),
            processing=processing,
            randomness=Randomness([generator]),
            clock=clock,
        )


def may_be_added(made: Sequence[object]) -> bool:
    """Return whether these criteria can stand beside those of all texts: one of a class that Transformers puts there itself would take its place."""
    return all(type(criterion) is MaxLengthCriteria or not isinstance(criterion, SAME_FOR_ALL) for criterion in made)
