"""Which policy a call has, and what cannot be in a call without one."""

import inspect
import warnings
from typing import Any

from ..drafters.base import Drafter
from ..validation import shown


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

    What the model's own config holds as a name or as JSON may have come with its files, which nobody asked: it does not count, and a
    warning says how to ask for it. An object (a `LossyPolicy`, a stop, …) can only have been put there in this process.

    Args:
        given: the generation config of the call, or None; what it holds counts, unless it is the model's own once more.
        own: the model's generation config.
    """
    of_model = getattr(own, "lossy_policy", None)
    from_files = isinstance(of_model, IN_FILES)
    chosen = getattr(given, "lossy_policy", None)
    if chosen is None:
        chosen = of_model
    if not (from_files and isinstance(chosen, IN_FILES) and chosen == of_model):
        return chosen
    warnings.warn(
        f"the model's generation config names the policy {shown(of_model, 200)}, which is not used: what comes with a model's files "
        "switches nothing on. To use it, pass lossy_policy=model.generation_config.lossy_policy to generate, or set "
        "model.generation_config.lossy_policy to hf_lossy_assist.as_policy(…) of it; to be rid of this line, set it to None",
        stacklevel=4,
    )
    return None
