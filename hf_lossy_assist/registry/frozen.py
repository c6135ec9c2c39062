"""The base of policies and their parts: immutable settings, checked by their annotations and registered by class keywords."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args, get_origin

from typing_extensions import dataclass_transform

from ..validation import (
    LONGEST_DRAFT,
    MOST_FACTOR,
    check_flag,
    check_int,
    check_number,
    check_positive,
    nearest,
    shown,
)
from . import PACKAGE, Kind, register_class, set_base


S = TypeVar("S", bound="Frozen")
Check: TypeAlias = Callable[[str, object], None]  # raises an error for a value of a field, which it names

Share = Annotated[float, functools.partial(check_number, low=0.0, high=1.0)]
Positive = Annotated[float, check_positive]
PositiveShare = Annotated[float, functools.partial(check_positive, high=1.0)]
Amount = Annotated[float, functools.partial(check_number, low=0.0, high=math.inf)]
Factor = Annotated[float, functools.partial(check_number, low=0.0, high=MOST_FACTOR)]
Number = Annotated[float, functools.partial(check_number, low=-math.inf, high=math.inf)]
Count = Annotated[int, functools.partial(check_int, low=0)]
Several = Annotated[int, functools.partial(check_int, low=1)]
DraftLength = Annotated[int, functools.partial(check_int, low=1, high=LONGEST_DRAFT)]


def find_check(hint: object) -> Check | None:
    """Return the check of a field by its annotation: a type above, a `Literal`, `bool`, a class of this package, or one and None."""
    options = get_args(hint)
    if get_origin(hint) is Annotated:
        check: Check = options[1]
        return check
    if get_origin(hint) is Literal:
        return functools.partial(check_choice, choices=options)
    if type(None) in options:
        inner = find_check(options[0])
        return inner and (lambda name, value: None if value is None else inner(name, value))
    if isinstance(hint, type) and hint.__module__.startswith(PACKAGE):
        return functools.partial(check_instance, cls=hint)
    return check_flag if hint is bool else None


def check_instance(name: str, value: object, cls: type) -> None:
    """Raise `TypeError` unless `value` is an instance of `cls`."""
    if not isinstance(value, cls):
        raise TypeError(f"{name}: expected {cls.__name__}, got {shown(value)}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(nearest(name, str(value), choices))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Frozen:
    """The base of policies and their parts, which are immutable: a deep copy is the object itself, with the same companion and heads.

    Transformers deep-copies a generation config, which may hold a policy, several times per call. Pickling makes a new object. Values are
    checked by the fields' annotations (`find_check`).

    Class keywords: `name` registers the class, which becomes a frozen dataclass (with `eq`, as for `dataclass`); `entry`: other
    fields of `Entry`. `kind`: the class is the base of this kind.
    """

    checks: ClassVar[dict[str, Check]] = {}

    def __init_subclass__(cls, kind: Kind | None = None, name: str = "", eq: bool = True, **entry: Any) -> None:
        super().__init_subclass__()
        hints = inspect.get_annotations(cls).items()
        cls.checks = cls.checks | {key: check for key, hint in hints if (check := find_check(hint)) is not None}
        if kind is not None:
            set_base(kind, cls)
        if name:
            register_class(name, dataclass(frozen=True, eq=eq)(cls), **entry)

    def __post_init__(self) -> None:
        for name, check in self.checks.items():
            check(f"{type(self).__name__}.{name}", getattr(self, name))

    def __deepcopy__(self: S, memo: dict[int, object]) -> S:
        return self
