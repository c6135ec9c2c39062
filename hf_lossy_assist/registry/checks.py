"""What a name may stand for: one-line refusals of what could not be listed, written as JSON or read back."""

import dataclasses
import inspect
import re
from typing import Any

from ..validation import UNSEEN, shown


LONGEST_NAME = 64
LONGEST_TEXT = 500  # characters of a summary, or of another line for readers

_NAME = re.compile(r"[a-z][a-z0-9_]*")


def check_name(what: str, name: Any) -> None:
    """Refuse what a policy's JSON form or the command line could not name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what}: expected a name of a-z, 0-9 and _, got {shown(name)}")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"{what}: expected a name of at most {LONGEST_NAME} characters, got {len(name)}")


def check_line(what: str, text: str) -> None:
    """Refuse a text that is more than a line, or on which a terminal would act."""
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"{what}: expected at most {LONGEST_TEXT} characters, got {len(text)}: {shown(text, 40)}")
    if UNSEEN.search(text) or set(text) & set("\n\r\t\u2028\u2029"):
        raise ValueError(f"{what}: expected one line without control characters, got {shown(text)}")


def check_recipe(what: str, recipe: Any) -> None:
    """Refuse a recipe without a name of its own: lists and errors say which function it is."""
    if not all(isinstance(getattr(recipe, name, None), str) for name in ("__name__", "__qualname__", "__module__")):
        raise TypeError(
            f"{what}: expected a recipe with a name of its own, got {shown(recipe)}: write it as a function, def …"
        )


def check_class(what: str, cls: Any, base: type | None) -> None:
    """Refuse what is no class of the kind that `base` is the base of."""
    if not inspect.isclass(cls):
        raise TypeError(f"{what}: expected a class, got {shown(cls)}")
    if base is not None and not issubclass(cls, base):
        raise TypeError(f"{what}: expected a subclass of {base.__name__}, got {shown(cls)}")


def check_fields(what: str, cls: type) -> None:
    """Refuse a class whose parameters are not just its fields: the JSON form is made of the fields, and a policy is read back from it."""
    made = vars(cls).get(
        "__dataclass_params__"
    )  # of the class itself: what only its base has knows no field of its own
    if made is None or not made.frozen:
        raise TypeError(
            f"{what}: {cls.__name__} is no frozen dataclass, so its JSON form would lose its parameters: put @dataclass(frozen=True) above it"
        )
    check_taken(what, cls)


def check_taken(what: str, cls: type) -> None:
    """Refuse a class that is made of other things than its fields, which are what a JSON form or a list of parameters names."""
    fields = [f.name for f in dataclasses.fields(cls)]
    taken = list(inspect.signature(cls.__init__).parameters)[1:]  # type: ignore[misc]
    if set(fields) != set(taken):
        raise TypeError(
            f"{what}: {cls.__name__} takes {', '.join(taken) or 'nothing'}, and its fields are {', '.join(fields) or 'none'}: "
            "its JSON form is made of the fields, so each parameter must be one, and no more (without an __init__ of its own)"
        )


def check_promise(what: str, cls: type, guarantee: str) -> None:
    """Refuse a guarantee that the class attribute `lossless` contradicts; a property may say either."""
    says = getattr(cls, "lossless", None)
    if isinstance(says, bool) and guarantee != "depends" and says != (guarantee == "lossless"):
        raise ValueError(
            f"{what}: guarantee={guarantee!r}, and {cls.__name__}.lossless is {says}: one of them is wrong"
        )
