"""Standing policies, for calls in code that users cannot change, such as pipelines and trainers.

Settings of a call take precedence. An unsupported call runs Transformers' `generate` with one warning, or raises an error.
"""

import re
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from .generation.arguments import Settings
from .generation.draft_settings import DRAFT_SETTINGS, FROM_STATES, WITHOUT_MODEL
from .generation.runner import Runner
from .models.compiled.compilation import COMPILE_SETTINGS
from .models.distributed import is_sharded, is_spread
from .models.introspection import base_of
from .policy.parse import as_policy
from .policy.policy import LossyPolicy
from .stats.speculation import SpeculationStats
from .validation import nearest, shown


REPORTS = 100  # maximum stored for a model; older ones are dropped
DRAFTERS = ("assistant_model", "drafter", *WITHOUT_MODEL, *FROM_STATES)  # each selects a drafter
PARTS = ("head", "profile", "companion")  # arguments of `as_policy`
RUNNER = (*DRAFT_SETTINGS, *COMPILE_SETTINGS)  # settings of a `Runner`
TAKEN = (*DRAFTERS[1:], "tokenizer", "assistant_tokenizer", *PARTS, *RUNNER)
STACKLEVEL = 4  # warnings point to the caller of `generate`

_reports: WeakKeyDictionary[PreTrainedModel, deque[SpeculationStats]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Standing:
    """The arguments of `enable` for later calls.

    Args:
        arguments: of `generate`, for calls that do not set them.
        strict: raise an error for unsupported calls.
        warned: reasons already warned about, without their numbers.
    """

    policy: LossyPolicy | None  # None: none stands
    arguments: Mapping[str, object]
    strict: bool = False
    warned: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls, target: PreTrainedModel, assistant: Any, policy: object, strict: bool, settings: Mapping[str, Any]
    ) -> "Standing":
        """Validate the arguments as far as possible before a call. Raises: `TypeError` or `ValueError`, one line."""
        for name in settings.keys() - set(TAKEN):
            known = (*DRAFTERS, *TAKEN, "lossy_policy", "strict")
            raise TypeError(f"a standing policy: {nearest('setting', name, known)}")
        base = base_of(target)
        if not isinstance(base, GenerationMixin):
            raise TypeError(f"a standing policy: expected a Transformers model with generate(), got {shown(target)}")
        parts = {name: settings[name] for name in PARTS if name in settings}
        if policy is None and assistant is None and not settings:
            return cls(None, {}, strict)
        found = as_policy("strict" if policy is None or policy is ... else policy, **parts)
        arguments = {name: value for name, value in settings.items() if name not in PARTS and value is not None}
        arguments |= {} if assistant is None else {"assistant_model": assistant}
        runner = Runner(
            found,
            assistant,
            drafter=settings.get("drafter"),
            tokenizer=settings.get("tokenizer"),
            assistant_tokenizer=settings.get("assistant_tokenizer"),
        )
        config = base.generation_config
        runner.validate(base, Settings(arguments, config, config))
        return cls(found, arguments, strict)

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, by name, completed with the standing ones."""
        config = given.get("generation_config")
        drafts = any(given.get(name) or getattr(config, name, None) for name in DRAFTERS)
        of_draft = (*DRAFTERS, "assistant_tokenizer") if drafts else ()
        left = {name for name in self.arguments if given.get(name) is None} - set(of_draft)
        return {**given, **{name: self.arguments[name] for name in left}}

    def yields_to(self, target: PreTrainedModel) -> bool:
        """Return whether Transformers' `generate` may take over: not if other processes wait for this one's forwards."""
        return not (self.strict or is_spread(target) or is_sharded(target))

    def warn(self, reason: str) -> None:
        """Warn, once for each reason, that Transformers' `generate` produced a text."""
        if (key := re.sub(r"\d+", "0", reason)) not in self.warned:
            self.warned.add(key)
            line = f"Transformers' own generate wrote this text, without the standing policy {self.policy}, and will write others like it: {reason}"
            warnings.warn(line, UserWarning, stacklevel=STACKLEVEL)


class PromptSeen(BaseStreamer):
    """A streamer that has received the prompt already."""

    def __init__(self, streamer: BaseStreamer):
        self.streamer, self.waits = streamer, True

    def put(self, value: torch.Tensor) -> None:
        if not self.waits:
            self.streamer.put(value)
        self.waits = False

    def end(self) -> None:
        self.streamer.end()


def store_report(model: PreTrainedModel, calls: list[SpeculationStats]) -> None:
    """Store the report of a call of `generate`, in which Whisper decodes several times."""
    if calls:
        _reports.setdefault(model, deque(maxlen=REPORTS)).append(
            SpeculationStats.merge(calls) if len(calls) > 1 else calls[0]
        )


def forget_reports(model: PreTrainedModel) -> None:
    """Delete the reports of a Transformers model."""
    if isinstance(model, PreTrainedModel):
        _reports.pop(model, None)


def reports(target: PreTrainedModel) -> list[SpeculationStats]:
    """Return the reports of this model's latest calls with a policy, in order: at most 100, including those of pipelines and trainers.

    For a PEFT model, the wrapped model's. `disable` deletes them. Raises: `TypeError` for an object that is no model.
    """
    base = base_of(target)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"reports(target): expected a Transformers model, got {type(target).__name__}")
    return list(_reports.get(base, ()))
