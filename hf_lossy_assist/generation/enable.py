"""`model.generate(..., lossy_policy=…)`: opt-in for one model object, nothing patched at import.

`enable(model)` puts a `generate` on the instance. Without a policy it calls Transformers' `generate` and nothing else. A policy that came
with a model's files is never one by itself (`find_policy`).
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from ..drafters.base import Drafter
from ..models.introspection import base_of
from ..policy.parse import as_policy
from ..validation import shown
from .speculative import name_arguments, speculative_generate


NAME = "lossy_policy"
READ = "_original_object_hash"  # an attribute of configs that `GenerationConfig.from_pretrained` read, and of their copies
IN_FILES = (str, int, float, list, dict)  # what an entry of a generation_config.json is, if it is not null


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Let this model object's `generate` take `lossy_policy=`; returns the model. Enabling twice changes nothing.

    For a PEFT model the Transformers model inside is enabled. Copies and pickles of an enabled model are enabled. `save_pretrained`
    leaves a policy out of generation_config.json.
    """
    base = base_of(model)
    if not isinstance(base, GenerationMixin):
        raise TypeError(f"enable(model): expected a Transformers model with generate(), got {type(model).__name__}")
    if not is_enabled(model):
        for kind in (Generate, SavePretrained):
            setattr(base, kind.name, kind(base))
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; returns the model. Disabling a model that is not enabled changes nothing.

    The entry `lossy_policy` of its generation config goes too: Transformers takes an argument of `generate` whose name stands there as
    that entry, and would pass over a policy without a word.
    """
    base = base_of(model)
    if is_enabled(model):
        for kind in (Generate, SavePretrained):
            replaced = vars(base).pop(kind.name).replaced
            if replaced is not None:
                setattr(base, kind.name, replaced)
        vars(base.generation_config).pop(NAME, None)
    return model


def is_enabled(model: PreTrainedModel) -> bool:
    """Return True after `enable(model)`."""
    return isinstance(getattr(base_of(model), "__dict__", {}).get(Generate.name), Generate)


class InstanceMethod:
    """A method of one model object in the place of its class's; the model's copies and pickles have one of their own."""

    name: str

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.replaced = vars(model).get(self.name)  # a custom_generate repository may have put one there

    @property
    def __wrapped__(self) -> Callable[..., object]:  # signature and documentation are those of the class's method
        return getattr(type(self.model), self.name).__get__(self.model)


class Generate(InstanceMethod):
    """`generate`, which takes `lossy_policy=`."""

    name = "generate"

    def __call__(self, *args: object, **kwargs: object) -> object:
        return _generate(self.replaced, self.model, *args, **kwargs)


class SavePretrained(InstanceMethod):
    """`save_pretrained` without the policy in the generation config, which would not act when it is read back."""

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
    replaced: Callable[..., object] | None,
    model: PreTrainedModel,
    *args: object,
    lossy_policy: object = None,
    head: object = None,
    profile: object = None,
    companion: PreTrainedModel | str | None = None,
    **kwargs: object,
) -> object:
    """Call Transformers' `generate`, or with a policy (here or in a generation config) this package's loop inside it.

    `head`, `profile`, `companion`: what the method that `lossy_policy` names needs, as `as_policy` takes them.
    """
    parts = {"head": head, "profile": profile, "companion": companion}
    config = args[1] if len(args) > 1 else kwargs.get("generation_config")
    # Transformers' own loop asks for a draft: no policy of a config's applies to it.
    if lossy_policy is None and not getattr(config, "is_assistant", False):
        lossy_policy = find_policy(config, model.generation_config)
    if lossy_policy is None:
        _refuse_without_policy(model, parts, kwargs)
        call = functools.partial(type(model).generate, model) if replaced is None else replaced
        return call(*args, **kwargs)
    named = name_arguments(type(model).generate, args, kwargs)
    return speculative_generate(model, as_policy(lossy_policy, **parts), **named)


def _refuse_without_policy(model: PreTrainedModel, parts: Mapping[str, object], kwargs: Mapping[str, object]) -> None:
    """Refuse what only this package's loop takes, for nobody else would read it."""
    for name, value in parts.items():
        if value is not None:
            raise ValueError(
                f"{name}=… is for a method of this package, and none is named: pass lossy_policy=… beside it"
            )
    way_out = 'which only a policy starts: pass lossy_policy="strict" or another beside it'
    if isinstance(kwargs.get("assistant_model"), Drafter):
        name = type(kwargs["assistant_model"]).__name__
        raise ValueError(f"assistant_model=…: the drafter {name} drafts in this package's loop, {way_out}")
    known = [inspect.signature(call).parameters for call in (type(model).generate, model.forward)]
    for name in ("drafter", "generator"):
        of_others = kwargs.get("custom_generate") is not None or any(name in names for names in known)
        if kwargs.get(name) is not None and not of_others:
            raise ValueError(f"{name}=… is for this package's loop, {way_out}")


# -- a policy in a generation config --------------------------------------------------------------------------------------


def find_policy(config: GenerationConfig, model_config: GenerationConfig | None) -> object:
    """Return the policy that a generation config switches on, or None.

    A name or JSON may have come from a file that nobody read: in the model's config, and in one that `GenerationConfig.from_pretrained`
    read, it switches nothing on, and a warning says how to use it. An object (a `LossyPolicy`, a stop, …) can only have been put there in
    this process.

    Args:
        config: the generation config of the call, or None; what it holds counts, unless it was read or is the model's once more.
        model_config: the model's generation config.
    """
    of_model, chosen = getattr(model_config, NAME, None), getattr(config, NAME, None)
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
    """Within this context a generation config has no entry `lossy_policy`; yield what the entry was, or None."""
    entry = {NAME: vars(config).pop(NAME)} if hasattr(config, NAME) else {}
    try:
        yield entry.get(NAME)
    finally:
        vars(config).update(entry)
