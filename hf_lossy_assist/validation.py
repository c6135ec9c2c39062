"""One-line checks of what users pass in."""

import difflib
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any


MOST = 2**31 - 1  # of a whole number that is only compared and counted with
LONGEST_DRAFT = 100_000  # tokens a round; the statistics have a line for each
MOST_NEW_TOKENS = 10**8  # of one text
MOST_ROWS = 10**5  # of one batch
MOST_NESTED = 16  # rules or stops inside one another
MOST_THREADS = 1000
LONGEST_NAME = 200  # characters of one in a list of names
MOST_FACTOR = 1e9  # of a number that others are multiplied with or divided by, where float32 must hold the outcome
# Of one text among others, with the least and the most.
LIMITS = {
    "max_new_tokens": (1, MOST_NEW_TOKENS),
    "min_new_tokens": (0, MOST_NEW_TOKENS),
    "stop_strings": (0, 0),
    "seed": (0, 2**63 - 1),
}
# What a terminal acts on (but for tabs and line ends), what turns the reading direction around, and halves of characters.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# Of huggingface_hub, by its version: their errors are no OSError.
HTTP_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3")


def visible(text: str) -> str:
    """`text` from outside, with every character written out, as in Python, on which a terminal would act."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text.replace("\r\n", "\n"))


def listed(names: Iterable[object], most: int = 20) -> str:
    """Names from outside, such as those of files, for a line of text: without line ends, and neither too many nor too long."""
    all_ = list(names)
    shown_names = ", ".join(one_line(name, LONGEST_NAME) for name in all_[:most])
    return shown_names + (f" and {len(all_) - most} more" if len(all_) > most else "")


def one_line(text: object, longest: int = 200) -> str:
    """Make a text from outside fit for an error message of one line."""
    line = visible(" ".join(str(text)[: 100 * longest].split()))  # what is left out is not gone through
    return line if len(line) <= longest else f"{line[:longest]}…"


def unreached(error: Exception) -> str:
    """Why an HTTP client did not reach the Hub, in a line that shows no header: one holds the token."""
    text = str(error)
    if "header" in text.lower() or isinstance(error, UnicodeEncodeError):
        return (
            "a header cannot be sent; check the token (--token, token= or HF_TOKEN) for characters that belong to none"
        )
    return one_line(text)


def shown(value: object, longest: int = 80) -> str:
    """`value` for an error message: its repr in one line of at most `longest` characters."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        return one_line(repr(value), longest)
    except (ValueError, RecursionError):  # a whole number of more than 4300 digits, lists of lists of lists …
        return f"an object of {type(value).__name__}"


def check_int(name: str, value: object, low: int, high: int = MOST) -> None:
    """Raise unless `value` is a whole number in [low, high]."""
    expected = f"expected a whole number of at least {low}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: {expected}, got {shown(value)}")
    if value < low:
        raise ValueError(f"{name}: {expected}, got {shown(value)}")
    if value > high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, got {shown(value)}")


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise unless `value` is a number in [low, high]; NaN is refused, and so is a whole number of more than 63 bits."""
    expected = f"expected a number from {low:g} to {high:g}" if math.isfinite(high) else f"expected a number ≥ {low:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: {expected}, got {shown(value)}")
    if isinstance(value, int) and abs(value) >= 2**63:  # torch takes it for a whole number, which is to have 64 bits
        raise ValueError(f"{name}: {expected}, got {shown(value)}: write so large a number as 1e20 or inf")
    if not low <= value <= high:
        raise ValueError(f"{name}: {expected}, got {shown(value)}")


def check_positive(name: str, value: object, high: float = MOST_FACTOR, hint: str = "") -> None:
    """Raise unless `value` is a number above 0 and up to `high`; `hint` is added to the line for 0."""
    expected = f"expected a number above 0 and up to {high:g}"
    try:
        check_number(name, value, 0.0, high)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {expected}, got {shown(value)}") from None
    if value == 0:
        raise ValueError(f"{name}: {expected}, got {value}{hint}")


def check_flag(name: str, value: object) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def check_nesting(name: str, depth: int) -> None:
    """Raise for a part with more than `MOST_NESTED` others of its kind inside one another."""
    if depth > MOST_NESTED:
        raise ValueError(f"{name}: more than {MOST_NESTED} inside one another; put them side by side")


def nearest(what: str, given: str, known: Iterable[str]) -> str:
    """Return the line for an unknown name: what was given, what there is, and the closest match if there is one."""
    names = sorted(known)
    if not names:
        return f"unknown {what} {shown(given)}: it takes none, so leave it out"
    close = difflib.get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"unknown {what} {shown(given)}; there are {', '.join(names)}.{hint}"


def read_limits(name: str, values: Mapping[str, object], others: Iterable[str]) -> dict[str, object]:
    """Return the limits of one text among `values`, of which None is none.

    Raises: `ValueError` or `TypeError`, one line that begins with `name`, for a key that is neither of them nor of `others`, and for a wrong value.
    """
    known = [*others, *LIMITS]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(f"{name}: {nearest('key', str(unknown[0]), known)}")
    limits = {key: values[key] for key in LIMITS if values.get(key) is not None}
    for key, value in limits.items():
        least, most = LIMITS[key]
        if key != "stop_strings":
            check_int(f"{name}: {key}", value, least, most)
            continue
        texts = [value] if isinstance(value, str) else value
        if (
            not isinstance(texts, list | tuple)
            or not texts
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise TypeError(
                f"{name}: stop_strings: expected a text or a list of texts, none of them empty, got {shown(value)}"
            )
        limits[key] = list(texts)
    return limits


def renamed(name: str) -> Any:
    """Return a property for an old public name: it reads the attribute that is now called `name`, and warns."""

    def read(instance: object) -> Any:
        warnings.warn(
            f"{type(instance).__name__}: this attribute is now called {name}", DeprecationWarning, stacklevel=2
        )
        return getattr(instance, name)

    return property(read)
