"""One-line checks of what users pass in."""

import difflib
import math
import re
from collections.abc import Iterable
from typing import Any


# What a terminal acts on (but for tabs and line ends), what turns the reading direction around, and halves of characters.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """`text` from outside, with every character written out, as in Python, on which a terminal would act."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def listed(names: Iterable[object], most: int = 20) -> str:
    """Names from outside, such as those of files, for a line of text: without line ends, and not too many of them."""
    all_ = [visible(" ".join(str(name).split())) for name in names]
    return ", ".join(all_[:most]) + (f" and {len(all_) - most} more" if len(all_) > most else "")


def check_int(name: str, value: Any, low: int) -> None:
    """Raise unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected a whole number of at least {low}, got {value!r}")
    if value < low:
        raise ValueError(f"{name}: expected a whole number of at least {low}, got {value}")


def check_number(name: str, value: Any, low: float, high: float) -> None:
    """Raise unless `value` is a number in [low, high]; NaN is refused."""
    expected = f"expected a number from {low:g} to {high:g}" if math.isfinite(high) else f"expected a number ≥ {low:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {expected}, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: {expected}, got {value}")


def nearest(what: str, given: str, known: Iterable[str]) -> str:
    """The line for an unknown name: what was given, what there is, and the closest match if there is one."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {given!r}; there are {', '.join(names)}.{hint}"
