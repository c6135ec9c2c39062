"""Each prompt of `generate_many` as a call of its own, which Transformers' `generate` prepares and this package decodes with others."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..engine.call import Call
from ..models.introspection import device_of
from ..models.probe import refuse_length
from ..models.texts import continuation
from ..policy.policy import LossyPolicy
from ..validation import shown
from .again import Again, may_be_added
from .input_checks import refuse_prompt
from .runner import Runner
from .speculative import speculative_generate


PER_PROMPT = "stopping_criteria", "logits_processor"
OVERRIDES = {"seed", "max_new_tokens", *PER_PROMPT[:1]}  # settings of one text that another one can do without
MOST_TEMPLATES = 64  # longest lengths that calls were prepared for


class Preparing(Runner):
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


class Guests:
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
        self.holders: dict[int, Any] = {}  # what holds state of prompts' processors that has to be copied
        self.again: dict[int | None, Again | None] = {}  # by the most new tokens of a text

    @property
    def runs_callers_code(self) -> bool:
        """Whether processors or criteria are made for each prompt, of some of which there may be none."""
        return any(self.settings.get(name) is not None for name in PER_PROMPT)

    def call(self, index: int, ids: list[int], overrides: dict[str, Any]) -> Call:
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
        again = self.again.get(most)
        if again is not None and may_be_added(criteria):
            refuse_prompt(self.target, prompt)
            refuse_length(self.target, len(ids) + again.new_tokens)
            return again(prompt, criteria, generator)
        call: Call = speculative_generate(
            self.target,
            self.policy,
            runner_type=Preparing,
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            generator=[generator],
            tokenizer=self.tokenizer,
            **settings,
        )
        call.processing.beside_others("logits_processor" in made, self.holders)
        if most is not None and most not in self.again:
            if len(self.again) >= MOST_TEMPLATES:
                self.again.clear()
            self.again[most] = Again.of(call, criteria, self.settings.get("stopping_criteria"), most)
        return call

    def ids(self, index: int, prompt: object) -> list[int]:
        """Token ids of a prompt. Raises: `ValueError` or `TypeError`, one line, for what is none."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("prompts: a text needs tokenizer=…, or pass lists of token ids")
            prompt = self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequence) or not prompt or not all(type(value) is int for value in prompt):
            raise TypeError(f"prompts: expected a text or a list of token ids, got {shown(prompt)} as number {index}")
        return list(prompt)

    def text(self, prompt: list[int], ids: list[int]) -> str | None:
        """Return the text that `ids` add behind `prompt`; None where there is no tokenizer."""
        return None if self.tokenizer is None else continuation(self.tokenizer, prompt, ids)
