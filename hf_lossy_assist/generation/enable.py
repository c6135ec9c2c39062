"""`model.generate(..., lossy_policy=…)`: opt-in for one model object; nothing is patched at import.

`enable(model)` sets a `generate` on the instance. Without a policy in the call or a standing one, it only calls Transformers' `generate`.
A policy from a model's files never takes effect by itself (`find_policy`).
"""

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..batch.processor_states import NotFollowed
from ..drafters.base import Drafter
from ..models.cached_model import CacheMark
from ..models.compat import passed_as
from ..models.introspection import base_of
from ..policy.parse import as_policy
from ..validation import check_flag, one_line, shown
from .draft_settings import FROM_STATES, WITHOUT_MODEL
from .runner import Runner
from .speculative import name_arguments, speculative_generate
from .standing import PARTS, PromptSeen, Standing, find_loop, forget_reports, store_report


NAME = "lossy_policy"
READ = "_original_object_hash"  # attribute of configs read by `GenerationConfig.from_pretrained`, and of their copies
IN_FILES = (str, int, float, list, dict)  # types of entries in a generation_config.json, besides null

# Open contexts of `using`, which may end in any order and thread: whether the model was enabled before the first of them, with which standing
# policy and entry of its generation config, and the standing policies of all, in order.
_contexts: WeakKeyDictionary[PreTrainedModel, tuple[bool, Standing | None, object, list[Standing]]] = (
    WeakKeyDictionary()
)
_lock = threading.Lock()


def enable(
    model: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafter | None = None,
    lossy_policy: object = ...,
    strict: bool = False,
    **settings: object,
) -> PreTrainedModel:
    """Enable `lossy_policy=` in this model object's `generate`; returns the model. Enabling twice has no effect.

    A draft or policy passed here is a standing one: later calls that name none speculate with it, including those of pipelines and trainers.
    A lossy policy warns once. A draft or policy in the call, `custom_generate=` and a policy in a generation config take precedence.

    For a PEFT model, the wrapped Transformers model is enabled. Deep copies and pickles of an enabled model are enabled, without the standing
    policy. `save_pretrained` omits policies from generation_config.json.

    Args:
        assistant_model: the draft model or drafter.
        lossy_policy: as in `generate`; None: no policy stands any longer. Default, and None beside a draft: "strict".
        strict: raise an error for unsupported calls; False: run Transformers' `generate`, and warn once with the reason.
        settings: `drafter`, `tokenizer`, `assistant_tokenizer`, `head`, `profile`, `companion`, other draft settings, and compile settings.

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
    base = base_of(model)
    if not isinstance(base, GenerationMixin):
        raise TypeError(f"enable(model): expected a Transformers model with generate(), got {type(model).__name__}")
    if not is_enabled(model):
        for kind in (Generate, SavePretrained):
            setattr(base, kind.name, kind(base))
    if standing is not None:
        vars(base)[Generate.name].standing = standing
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; returns the model. No effect on a model that is not enabled.

    Also removes the entry `lossy_policy` of the generation config: Transformers accepts any argument of `generate` that has the name of an
    entry, and would ignore a policy silently.
    """
    if is_enabled(model):
        _remove(base_of(model))
    forget_reports(base_of(model))
    return model


def _remove(base: PreTrainedModel) -> None:
    for kind in (Generate, SavePretrained):
        replaced = vars(base).pop(kind.name).replaced
        if replaced is not None:
            setattr(base, kind.name, replaced)
    vars(base.generation_config).pop(NAME, None)


def using(
    target: PreTrainedModel,
    assistant_model: PreTrainedModel | Drafter | None = None,
    lossy_policy: object = ...,
    strict: bool = False,
    **settings: object,
) -> AbstractContextManager[PreTrainedModel]:
    """Return a context in which `target` has a standing policy; the previous one is restored at the end. `reports` remain available.

    Contexts may end in any order and thread; the latest open one has effect.

    Arguments and errors as in `enable`.
    """
    check_flag("strict", strict)
    return _using(target, Standing.of(target, assistant_model, lossy_policy, strict, settings))


@contextmanager
def _using(target: PreTrainedModel, standing: Standing) -> Iterator[PreTrainedModel]:
    base = base_of(target)
    with _lock:
        if base not in _contexts:
            before = vars(base)[Generate.name].standing if is_enabled(target) else None
            _contexts[base] = is_enabled(target), before, getattr(base.generation_config, NAME, None), []
        enabled, before, entry, opened = _contexts[base]
        opened.append(standing)
        _enable(target, standing)
    try:
        yield target
    finally:
        with _lock:
            opened[:] = [each for each in opened if each is not standing]
            if enabled or opened:
                _enable(target, None)  # it may have been disabled inside
                vars(base)[Generate.name].standing = opened[-1] if opened else before
            elif is_enabled(target):
                _remove(base)
                if entry is not None:
                    setattr(base.generation_config, NAME, entry)
            if not opened:
                del _contexts[base]


def is_enabled(model: PreTrainedModel) -> bool:
    """Return whether the model is enabled."""
    return isinstance(getattr(base_of(model), "__dict__", {}).get(Generate.name), Generate)


class InstanceMethod:
    """A method of one model object that replaces the class's; copies and pickles of the model have one each."""

    name: str

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.replaced = vars(model).get(self.name)  # a custom_generate repository may have set one

    @property
    def __wrapped__(self) -> Callable[..., object]:  # signature and documentation of the class's method
        return getattr(type(self.model), self.name).__get__(self.model)


class Generate(InstanceMethod):
    """`generate` with `lossy_policy=`."""

    name = "generate"

    def __init__(self, model: PreTrainedModel):
        super().__init__(model)
        self.standing: Standing | None = None

    def __getstate__(self) -> dict[str, object]:
        """Omit the standing policy from copies and pickles, which would copy its draft."""
        return vars(self) | {"standing": None}

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _generate(self, *args, **kwargs)


class SavePretrained(InstanceMethod):
    """`save_pretrained` without the policy in the generation config, which would have no effect after loading."""

    name = "save_pretrained"

    def __call__(self, *args: object, **kwargs: object) -> object:
        with _without_policy(self.model.generation_config) as policy:
            if policy is not None:
                warnings.warn(
                    f"generation_config.json is written without the policy {shown(policy, 200)}, which would not act when it is read back: "
                    "save the policy by itself, policy.save_pretrained(folder)",
                    stacklevel=2,
                )
            return (self.replaced or self.__wrapped__)(*args, **kwargs)


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
    """Call Transformers' `generate`, or this package's loop if there is a policy: an argument, in a generation config, or standing.

    `lossy_policy`: None: no policy for this call, Transformers' `generate`. `head`, `profile`, `companion`: for a method that it names, as in
    `as_policy`.
    """
    model, standing = method.model, method.standing
    parts = dict(zip(PARTS, (head, profile, companion), strict=True))
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")
    in_loop = find_loop(model) is not None and kwargs.get("assistant_model") is not None
    # A call for a draft from Transformers' assisted generation: no config's or standing policy applies.
    drafts = getattr(config, "is_assistant", False)
    if lossy_policy is ... and not drafts:
        lossy_policy = read_policy(config, None if in_loop else model.generation_config)
    if lossy_policy is None and in_loop:
        raise ValueError("lossy_policy=None: the open in_transformers_loop has a policy: call generate outside it")
    if drafts or in_loop or (standing is not None and standing.policy is None):
        standing = None
    call = functools.partial(_call_transformers, method, config)
    chosen = [kwargs.get("custom_generate"), *parts.values()]
    unnamed = lossy_policy is ... and (standing is None or any(value is not None for value in chosen))
    if lossy_policy is None or unnamed:
        _refuse_without_policy(model, parts, kwargs)
        return call(*args, **kwargs)
    named, runners, loose = name_arguments(type(model).generate, args, kwargs), list[Runner](), lossy_policy is ...

    def make_runner(*given: Any, **settings: Any) -> Runner:
        runners.append(Runner(*given, **settings))
        return runners[0]

    try:
        policy = as_policy(standing.policy if standing and loose else lossy_policy, **parts)
        out = speculative_generate(model, policy, make_runner, **(standing.fill(named) if standing else named))
        store_report(model, runners[0].reports)
        return out
    except (TypeError, ValueError) as error:
        begun = any(runner.begun for runner in runners) and not isinstance(error, NotFollowed)
        if not (standing and loose and standing.yields_to(model)) or begun or _find_ours(model, kwargs):
            raise
        reason = one_line(error, 300)
    if named.get("streamer") is not None and any(runner.called for runner in runners):
        args, kwargs = (), named | {"streamer": PromptSeen(named["streamer"])}
    out = call(*args, **kwargs)
    standing.warn(reason)  # only now: an error that Transformers raises, too, is the caller's
    return out


def _call_transformers(method: Generate, config: object, /, *args: object, **kwargs: Any) -> object:
    """Call Transformers' `generate`. After an error or an interrupt while it drafts, the caller's cache holds what it held before."""
    name, configs = passed_as(kwargs), (config, method.model.generation_config)
    drafts = [getattr(each, way, None) for each in configs for way in (*WITHOUT_MODEL, *FROM_STATES)]
    drafts += [*args[2:], *map(kwargs.get, ("assistant_model", *WITHOUT_MODEL, *FROM_STATES))]
    drafts = [each for each in drafts if each is not None and each is not False]
    mark = CacheMark(kwargs[name]) if name is not None and drafts else None
    try:
        return (method.replaced or method.__wrapped__)(*args, **kwargs)
    except BaseException:
        if mark is not None:
            mark.restore()
        raise


def _refuse_without_policy(model: PreTrainedModel, parts: Mapping[str, object], kwargs: Mapping[str, object]) -> None:
    """Raise `ValueError` for arguments that only this package's loop reads, if there is no policy."""
    for name, value in parts.items():
        if value is not None:
            raise ValueError(
                f"{name}=… is for a method of this package, and none is named: pass lossy_policy=… beside it"
            )
    if found := _find_ours(model, kwargs):
        way_out = 'which only a policy starts: pass lossy_policy="strict" or another beside it'
        raise ValueError(f"{found} this package's loop, {way_out}")


def _find_ours(model: PreTrainedModel, kwargs: Mapping[str, object]) -> str | None:
    """Return the beginning of an error about an argument that only this package's loop reads, or None."""
    if isinstance(kwargs.get("assistant_model"), Drafter):
        return f"assistant_model=…: the drafter {type(kwargs['assistant_model']).__name__} drafts in"
    known = [inspect.signature(call).parameters for call in (type(model).generate, model.forward)]
    for name in ("drafter", "generator", "hints"):
        of_others = kwargs.get("custom_generate") is not None or any(name in names for names in known)
        if kwargs.get(name) is not None and not of_others:
            return f"{name}=… is for"
    return None


# -- a policy in a generation config --------------------------------------------------------------------------------------


def read_policy(config: GenerationConfig, model_config: GenerationConfig | None) -> object:
    """Return `find_policy`'s, or `...` if nothing is said: then a standing policy acts. None: the entry of the call's config is None."""
    policy = find_policy(config, model_config)
    return ... if policy is None and not _has_none(config, model_config) else policy


def _has_none(config: GenerationConfig, model_config: GenerationConfig | None) -> bool:
    """Return whether the call's config says that there is no policy, unless it is a copy of the model's that says so."""
    return getattr(config, NAME, ...) is None and getattr(model_config, NAME, ...) is not None


def find_policy(config: GenerationConfig, model_config: GenerationConfig | None) -> object:
    """Return the policy that a generation config activates, or None.

    A name or JSON may come from an untrusted file: in the model's config, or in one read by `GenerationConfig.from_pretrained`, it only
    triggers a warning that says how to use it. An object (a `LossyPolicy`, a stop, …) can only have been set in this process.

    Args:
        config: the generation config of the call, or None. Its entry is used unless it was read from a file or equals the model's.
        model_config: the model's generation config.
    """
    of_model, chosen = getattr(model_config, NAME, None), getattr(config, NAME, None)
    if _has_none(config, model_config):
        return None
    if chosen is not None and not (isinstance(chosen, IN_FILES) and chosen == of_model):
        if not (isinstance(chosen, IN_FILES) and hasattr(config, READ)):
            return chosen
        _warn_unused("the generation config of this call", "generation_config", chosen)
    if not isinstance(of_model, IN_FILES):
        return of_model
    _warn_unused("the model's generation config", "model.generation_config", of_model)
    return None


def _warn_unused(title: str, where: str, policy: object) -> None:
    warnings.warn(
        f"{title} names the policy {shown(policy, 200)}, which is not used: what comes with a model's files "
        f"switches nothing on. To use it, pass lossy_policy={where}.lossy_policy to generate, or set "
        f"{where}.lossy_policy to hf_lossy_assist.as_policy(…) of it; to be rid of this line, set it to None",
        stacklevel=5,
    )


@contextmanager
def _without_policy(config: GenerationConfig) -> Iterator[object]:
    """Remove the entry `lossy_policy` from a generation config inside the context; yield the entry, or None."""
    entry = {NAME: vars(config).pop(NAME)} if hasattr(config, NAME) else {}
    try:
        yield entry.get(NAME)
    finally:
        vars(config).update(entry)
