"""From the policies that were asked for to the settings that are tried: a rule without its parameter stands for its ladder."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..policy.parse import as_policy
from ..policy.policy import LossyPolicy
from ..policy.short_form import add_parameter, is_short_form, list_parts
from ..registry import Entry, Kind, Names, find_entry
from .choosing import Step


KINDS: tuple[Kind, ...] = ("rule", "method")  # that have ladders


@dataclass(frozen=True)
class Field:
    """The settings of a search: lossless ones, by name, which need no certificate, and steps of ladders."""

    lossless: dict[str, LossyPolicy]
    steps: list[Step]
    policies: dict[str, LossyPolicy]  # of all, by name


def field_of(texts: Sequence[str]) -> Field:
    """Read the policies of `--policies`; `top_k+svip` is top_k's whole ladder beside svip, `top_k:k=3+svip` one step of it.

    Raises: `ValueError`, one line, where no lossless policy is among them, which the others have to beat.
    """
    lossless: dict[str, LossyPolicy] = {}
    steps: list[Step] = []
    policies: dict[str, LossyPolicy] = {}
    for text in texts:
        for name in expanded(text):
            policy = as_policy(name)
            policies[name] = policy
            if policy.lossless:
                lossless[name] = policy
            elif name not in {step.name for step in steps}:
                ladder = text if len(expanded(text)) > 1 else _ladder_of(name)
                steps.append(Step(name, ladder, sum(step.ladder == ladder for step in steps)))
    if not lossless:
        raise ValueError("no lossless policy is among these: add svip, or strict, which the others have to beat")
    return Field(lossless, steps, policies)


def expanded(text: str) -> list[str]:
    """The settings that a text stands for, from strict to lax; the text itself where it names no ladder."""
    if not (is_short_form(text) or text in Names("rule") or text in Names("method")):
        return [text]
    for name, given in list_parts(text):
        found = _with_ladder(name)
        if found is not None and found.ladder is not None and found.ladder[0] not in given:
            parameter, values = found.ladder
            return [add_parameter(text, name, parameter, value) for value in values]
    return [text]


def _with_ladder(name: str) -> Entry | None:
    for kind in KINDS:
        if name in Names(kind):
            found = find_entry(kind, name)
            if found.ladder is not None:
                return found
    return None


def _ladder_of(name: str) -> str:
    """Single settings of one rule, in the order in which they were given, are a ladder as well."""
    names = [part for part, _ in list_parts(name)] if is_short_form(name) else [name]
    return next((part for part in names if _with_ladder(part) is not None), name)
