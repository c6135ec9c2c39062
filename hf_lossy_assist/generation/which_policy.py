"""Which policy a call has, and what cannot be in a call without one."""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..drafters.base import Drafter
from ..validation import shown


NAME = "lossy_policy"
READ = "_original_object_hash"  # an attribute of configs that `GenerationConfig.from_pretrained` read, and of their copies
IN_FILES = (str, int, float, list, dict)  # what an entry of a generation_config.json is, if it is not null


def refuse_without_policy(model: Any, beside: dict[str, Any], kwargs: dict[str, Any]) -> None:
    """Refuse what only this package's loop takes, for nobody else would read it."""
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"{name}=… is for a method of this package, and none is named: pass lossy_policy=… beside it"
            )
    if isinstance(kwargs.get("assistant_model"), Drafter):
        name = type(kwargs["assistant_model"]).__name__
        raise ValueError(
            f'assistant_model=…: the drafter {name} drafts in this package\'s loop, which only a policy starts: pass lossy_policy="strict" or '
            "another beside it"
        )
    known = [inspect.signature(call).parameters for call in (type(model).generate, model.forward)]
    for name in ("drafter", "generator"):
        of_others = kwargs.get("custom_generate") is not None or any(name in names for names in known)
        if kwargs.get(name) is not None and not of_others:
            raise ValueError(
                f'{name}=… is for this package\'s loop, which only a policy starts: pass lossy_policy="strict" or another beside it'
            )


def policy_in(given: Any, own: Any) -> Any:
    """The policy that a generation config switches on, or None.

    A name or JSON may have come from a file that nobody read: in the model's own config, and in one that
    `GenerationConfig.from_pretrained` read, it switches nothing on, and a warning says how to use it. An object (a `LossyPolicy`, a stop,
    …) can only have been put there in this process.

    Args:
        given: the generation config of the call, or None; what it holds counts, unless it was read or is the model's own once more.
        own: the model's generation config.
    """
    of_model, chosen = getattr(own, NAME, None), getattr(given, NAME, None)
    if chosen is not None and not (isinstance(chosen, IN_FILES) and chosen == of_model):
        if not (isinstance(chosen, IN_FILES) and hasattr(given, READ)):
            return chosen
        _warn("the generation config of this call", "generation_config", chosen)
    if not isinstance(of_model, IN_FILES):
        return of_model
    _warn("the model's generation config", "model.generation_config", of_model)
    return None


def _warn(title: str, where: str, policy: Any) -> None:
    warnings.warn(
        f"{title} names the policy {shown(policy, 200)}, which is not used: what comes with a model's files "
        f"switches nothing on. To use it, pass lossy_policy={where}.lossy_policy to generate, or set "
        f"{where}.lossy_policy to hf_lossy_assist.as_policy(…) of it; to be rid of this line, set it to None",
        stacklevel=5,
    )


@contextmanager
def without_policy(config: Any) -> Iterator[Any]:
    """Within this context a generation config has no entry `lossy_policy`; yields what the entry was, or None."""
    entry = {NAME: vars(config).pop(NAME)} if hasattr(config, NAME) else {}
    try:
        yield entry.get(NAME)
    finally:
        vars(config).update(entry)
