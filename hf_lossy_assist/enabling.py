"""`model.generate(..., lossy_policy=…)`: opt-in for one model object; nothing is patched at import.

`enable(model)` sets a `generate` on the instance. Without a policy in the call or a standing one, it only calls
Transformers' `generate`. A policy in a generation config, which may come from a model's files, never takes effect.
"""

import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin, PreTrainedModel

from .drafters.base import Drafter
from .generation.arguments import Settings
from .generation.draft_settings import DRAFT_SETTINGS, MODEL_FREE_DRAFTS, STATE_DRAFTS
from .generation.model_checks import warn_of_policy_in_config
from .generation.runner import Runner
from .generation.speculative import name_arguments, speculative_generate
from .models.cached_model import NotInRows
from .models.compiled.compilation import COMPILE_SETTINGS
from .models.distributed import is_sharded, is_spread
from .models.introspection import base_of
from .policy.parse import as_policy
from .policy.policy import LossyPolicy
from .stats.speculation import SpeculationStats
from .transformers_loop.assist import PromptSeen, assist
from .transformers_loop.attach import LOOPS, find_loop
from .validation import check_flag, nearest, one_line


REPORTS = 100  # maximum stored for a model; older ones are dropped
DRAFTERS = ("assistant_model", "drafter", *MODEL_FREE_DRAFTS, *STATE_DRAFTS)  # each selects a drafter
PARTS = ("head", "profile", "companion")  # arguments of `as_policy`
RUNNER = (*DRAFT_SETTINGS, *COMPILE_SETTINGS)  # settings of a `Runner`
TAKEN = (*DRAFTERS[1:], "tokenizer", "assistant_tokenizer", *PARTS, *RUNNER)
OURS = ("drafter", "generator", "hints")  # arguments of `generate` that Transformers does not have
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
            allowed = (*DRAFTERS, *TAKEN, "lossy_policy", "strict")
            raise TypeError(f"a standing policy: {nearest('setting', name, allowed)}")
        base = _generating(target)
        extras = {name: settings[name] for name in PARTS if name in settings}
        if policy is None and assistant is None and not settings:
            return cls(None, {}, strict)
        checked = as_policy("strict" if policy is None or policy is ... else policy, **extras)
        arguments = {name: value for name, value in settings.items() if name not in PARTS and value is not None}
        arguments |= {} if assistant is None else {"assistant_model": assistant}
        names = "drafter", "tokenizer", "assistant_tokenizer"
        chosen: dict[str, Any] = {name: settings.get(name) for name in names}
        runner = Runner(checked, assistant, **chosen)
        config = base.generation_config
        runner.validate(base, Settings(arguments, config, config))
        return cls(checked, arguments, strict)

    def fill(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call, by name, completed with the standing ones."""
        config = arguments.get("generation_config")
        drafts = any(arguments.get(name) or getattr(config, name, None) for name in DRAFTERS)
        replaced = (*DRAFTERS, "assistant_tokenizer") if drafts else ()
        names = [name for name in self.arguments if arguments.get(name) is None and name not in replaced]
        return {**arguments, **{name: self.arguments[name] for name in names}}

    def yields_to(self, target: PreTrainedModel) -> bool:
        """Return whether Transformers' `generate` may take over: not while other processes wait for forwards."""
        return not (self.strict or is_spread(target) or is_sharded(target))

    def warn(self, reason: str) -> None:
        """Warn, once for each reason, that Transformers' `generate` produced a text."""
        if (key := re.sub(r"\d+", "0", reason)) not in self.warned:
            self.warned.add(key)
            line = f"Transformers' own generate wrote this text, without the policy {self.policy}, and will write"
            warnings.warn(f"{line} others like it: {reason}", UserWarning, stacklevel=STACKLEVEL)


def store_report(model: PreTrainedModel, calls: list[SpeculationStats]) -> None:
    """Store the report of a call of `generate`, in which Whisper decodes several times."""
    if calls:
        _reports.setdefault(model, deque(maxlen=REPORTS)).append(
            SpeculationStats.merge(calls) if len(calls) > 1 else calls[0]
        )


def reports(target: PreTrainedModel) -> list[SpeculationStats]:
    """Return the reports of this model's latest 100 calls with a policy, pipelines' and trainers' too, in order.

    For a PEFT model, the wrapped model's. `disable` deletes them. Raises: `TypeError` for an object that is no model.
    """
    base = base_of(target)
    if not isinstance(base, PreTrainedModel):
        raise TypeError(f"reports(target): expected a Transformers model, got {type(target).__name__}")
    return list(_reports.get(base, ()))


NAME = "generate"


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafter | None = None,
    lossy_policy: object = ...,
    strict: bool = False,
    **settings: object,
) -> PreTrainedModel:
    """Enable `lossy_policy=` in this model object's `generate`; returns the model. Enabling twice has no effect.

    A draft or policy passed here is a standing one: later calls that name none speculate with it, including those of
    pipelines and trainers. A lossy policy warns once. A draft or policy in the call, and `custom_generate=`, take
    precedence.

    For a PEFT model, the wrapped Transformers model is enabled. Deep copies and pickles of an enabled model are
    enabled, without the standing policy.

    Args:
        assistant_model: the draft model or drafter.
        lossy_policy: as in `generate`; None: no policy stands any longer. Default, and None beside a draft: "strict".
        strict: raise an error for unsupported calls; False: run Transformers' `generate`, and warn once.
        settings: `drafter`, `tokenizer`, `assistant_tokenizer`, `head`, `profile`, `companion`, draft and compile ones.

    Raises: `TypeError` or `ValueError`, one line, for incompatible models and policies.
    """
    check_flag("strict", strict)
    if assistant_model is not None or lossy_policy is not ... or settings:
        return _enable(model, Standing.of(model, assistant_model, lossy_policy, strict, settings))
    if strict:
        raise ValueError("strict=True is for a standing policy: pass assistant_model=… or lossy_policy=… beside it")
    return _enable(model, None)


def _enable(model: PreTrainedModel, standing: Standing | None) -> PreTrainedModel:
    """Enable a model and set its standing policy; None keeps the current one."""
    base = _generating(model)
    if not is_enabled(model):
        setattr(base, NAME, Generate(base))
    if standing is not None:
        vars(base)[NAME].standing = standing
    return model


def _generating(model: PreTrainedModel) -> PreTrainedModel:
    if isinstance(base := base_of(model), GenerationMixin):
        return base
    raise TypeError(f"enable(model): expected a Transformers model with generate(), got {type(model).__name__}")


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; returns the model. No effect on a model that is not enabled."""
    base = base_of(model)
    if is_enabled(model):
        _remove(base)
    if isinstance(base, PreTrainedModel):
        _reports.pop(base, None)
    return model


def _remove(base: PreTrainedModel) -> None:
    replaced = vars(base).pop(NAME).replaced
    if replaced is not None:
        setattr(base, NAME, replaced)


def using(
    target: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafter | None = None,
    lossy_policy: object = ...,
    strict: bool = False,
    **settings: object,
) -> AbstractContextManager[PreTrainedModel]:
    """Return a context in which `target` has a standing policy; the previous one and `reports` remain.

    The policy is the model's, in all threads: contexts of several threads on one model must not overlap.

    Arguments and errors as in `enable`.
    """
    check_flag("strict", strict)
    return _using(target, Standing.of(target, assistant_model, lossy_policy, strict, settings))


@contextmanager
def _using(target: PreTrainedModel, standing: Standing) -> Iterator[PreTrainedModel]:
    base, enabled = base_of(target), is_enabled(target)
    before = vars(base)[NAME].standing if enabled else None
    _enable(target, standing)
    try:
        yield target
    finally:
        if enabled:
            _enable(target, None)  # it may have been disabled inside
            vars(base)[NAME].standing = before
        elif is_enabled(target):
            _remove(base)


def is_enabled(model: PreTrainedModel) -> bool:
    """Return whether the model is enabled."""
    return isinstance(getattr(base_of(model), "__dict__", {}).get(NAME), Generate)


class Generate:
    """One model object's `generate` with `lossy_policy=`; copies and pickles of the model have one each."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.replaced = vars(model).get(NAME)  # a custom_generate repository may have set one
        self.standing: Standing | None = None

    @property
    def __wrapped__(self) -> Callable[..., object]:  # signature and documentation of the class's method
        return getattr(type(self.model), NAME).__get__(self.model)

    def __getstate__(self) -> dict[str, object]:
        """Omit the standing policy from copies and pickles, which would copy its draft."""
        return vars(self) | {"standing": None}

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _generate(self, *args, **kwargs)


def _generate(
    method: Generate,
    /,
    *args: object,
    lossy_policy: object = ...,
    head: object = None,
    profile: object = None,
    companion: PreTrainedModel | str | None = None,
    **kwargs: Any,
) -> object:
    """Call Transformers' `generate`, or this package's loop if there is a policy: an argument, or standing.

    `lossy_policy`: None: no policy for this call, Transformers' `generate`. `head`, `profile`, `companion`: for a
    method that it names, as in `as_policy`.
    """
    model, standing = method.model, method.standing
    extras = dict(zip(PARTS, (head, profile, companion), strict=True))
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")
    in_loop = bool(LOOPS.get()) and find_loop(model) is not None and kwargs.get("assistant_model") is not None
    # A call for a draft from Transformers' assisted generation: no standing policy applies.
    drafts = getattr(config, "is_assistant", False)
    if lossy_policy is ... and not drafts:
        warn_of_policy_in_config(config, model.generation_config)
    if lossy_policy is None and in_loop:
        raise ValueError("lossy_policy=None: the open in_transformers_loop has a policy: call generate outside it")
    if drafts or in_loop or (standing is not None and standing.policy is None):
        standing = None
    call = method.replaced or method.__wrapped__
    chosen = [kwargs.get("custom_generate"), *extras.values()]
    unnamed = lossy_policy is ... and (standing is None or any(value is not None for value in chosen))
    if lossy_policy is None or unnamed:
        _refuse_without_policy(extras, kwargs.get("assistant_model"))
        return call(*args, **kwargs)
    named, runners, loose = name_arguments(type(model).generate, args, kwargs), list[Runner](), lossy_policy is ...
    plain = named

    def make_runner(*positional: Any, **settings: Any) -> Runner:
        runners.append(Runner(*positional, **settings))
        runners[0].yields = standing is not None and loose and standing.yields_to(model)
        return runners[0]

    try:
        policy = as_policy(standing.policy if standing and loose else lossy_policy, **extras)
        named = standing.fill(named) if standing else named
        try:
            out = speculative_generate(model, policy, make_runner, **named)
        except NotInRows as error:  # nothing is written yet
            out = assist(call, runners[0], model, named | _without_prompt(named, runners), error)
        store_report(model, runners[0].reports)
        return out
    except (TypeError, ValueError) as error:
        ours = any(kwargs.get(name) is not None for name in OURS) or any(runner.begun for runner in runners)
        ours |= isinstance(kwargs.get("assistant_model"), Drafter)
        if not (standing and loose and standing.yields_to(model)) or ours:
            raise
        reason = one_line(error, 300)
    if seen := _without_prompt(plain, runners):
        args, kwargs = (), plain | seen
    out = call(*args, **kwargs)
    standing.warn(reason)  # only now: an error that Transformers raises, too, is the caller's
    return out


def _without_prompt(named: Mapping[str, Any], runners: Sequence[Runner]) -> dict[str, object]:
    """Return the streamer of a call that begins again, if it has received the prompt already."""
    seen = named.get("streamer") is not None and any(runner.called for runner in runners)
    return {"streamer": PromptSeen(named["streamer"])} if seen else {}


def _refuse_without_policy(extras: Mapping[str, object], assistant: object) -> None:
    """Raise `ValueError` for arguments that only this package's loop reads, if there is no policy.
    Transformers refuses the others."""
    for name, value in extras.items():
        if value is not None:
            raise ValueError(f"{name}=… is for a method, and none is named: pass lossy_policy=… beside it")
    if isinstance(assistant, Drafter):
        way_out = 'pass lossy_policy="strict" or another beside it'
        raise ValueError(
            f"assistant_model=…: the drafter {type(assistant).__name__} drafts for a policy alone: {way_out}"
        )
