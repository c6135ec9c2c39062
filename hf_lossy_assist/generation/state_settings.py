"""`use_mtp` and `speculation_type`: settings with which Transformers drafts from the target's hidden states. Here they name a drafter."""

from typing import Any

from transformers import GenerationConfig

from ..drafters.transformers_drafters import MTPDrafter, TransformersDFlashDrafter
from ..validation import check_flag, shown


# Those that this Transformers has.
STATES = tuple(name for name in ("use_mtp", "speculation_type") if hasattr(GenerationConfig(), name))


def take_states(kwargs: dict[str, Any], given: Any, config: GenerationConfig, own: GenerationConfig) -> dict[str, Any]:
    """What the call says of each of `STATES`, and behind `own`'s name what the model's config does; taken out of `kwargs` and `config`."""
    found = {}
    for name in STATES:
        at_call = kwargs.pop(name, None)
        found[name] = getattr(given, name, None) if at_call is None else at_call
        found[f"own {name}"] = getattr(own, name, None)
        setattr(config, name, None)
    return found


def by_states(asked: dict[str, Any], assistant: Any, drafter: Any, others: list[str]) -> tuple[Any, Any]:
    """The assistant and the drafter of a call. `asked`: of `take_states`. `others`: settings that name another way to draft.

    What the model's own config says counts where the call names nothing to draft with. Raises: `ValueError` or `TypeError`, one line.
    """
    mtp, kind = asked.get("use_mtp"), asked.get("speculation_type")
    if assistant is None and drafter is None and not others and kind is None and mtp is None:
        mtp = asked.get("own use_mtp")
    if mtp is not None:
        check_flag("use_mtp", mtp)
    if kind is not None and kind != "dflash":
        raise ValueError(f"speculation_type: expected 'dflash', got {shown(kind)}")
    if mtp:
        _alone("use_mtp", {"assistant_model": assistant, "drafter": drafter, "speculation_type": kind}, others)
        return None, MTPDrafter()
    if kind is None or (
        drafter is not None and assistant is None and not others
    ):  # a DFlash drafter of this package's
        return assistant, drafter
    _alone("speculation_type", {"drafter": drafter}, others)
    if assistant is None:
        raise ValueError('speculation_type="dflash" needs the DFlash model: pass assistant_model=… too')
    return None, TransformersDFlashDrafter(getattr(assistant, "_orig_mod", assistant))


def _alone(name: str, given: dict[str, Any], others: list[str]) -> None:
    named = [other for other, value in given.items() if value is not None]
    for other in [*named, *others]:
        raise ValueError(f"{name} and {other} are two ways to draft: pass one of them")
