"""Which calls of two models are of one kind: what a stop has learnt in one is of use in the next."""

from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ..artifacts.conditions import read_sampling
from ..artifacts.head import Head
from ..artifacts.sv_profile import Profile
from ..drafters.base import Drafter
from ..policy.policy import LossyPolicy


def kind_of(policy: LossyPolicy, drafter: Drafter | None, config: Any, *where: Any) -> Hashable:
    """What the seconds of a call's rounds and the tokens that are accepted depend on, beside its models and its stop.

    Settings of sampling count to one decimal place: texts of temperature 0.7 and 0.72 are much alike.

    Args:
        drafter: what drafts in place of the assistant alone. config: the call's `GenerationConfig`. where: device, precision and the like.
    """
    decoding = tuple((name, round(value, 1)) for name, value in read_sampling(config).items())
    return (
        tuple(_settings_of(part) for part in (policy.rule, policy.filter, drafter)),
        decoding,
        tuple(map(str, where)),
    )


def _settings_of(value: Any) -> Hashable:
    """A part of a policy by its settings; heads and profiles by where they came from, others by which they are: none must be kept alive."""
    if isinstance(value, Head | Profile):
        return value.source or id(value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value).__qualname__, *(_settings_of(getattr(value, its.name)) for its in fields(value))
    if isinstance(value, list | tuple):
        return tuple(map(_settings_of, value))
    if isinstance(value, Mapping):
        return tuple((str(name), _settings_of(its)) for name, its in value.items())
    return value if isinstance(value, int | float | str | type(None)) else (type(value).__qualname__, id(value))
