"""Values in the JSON of a request, each checked, and the refusal of those that cannot be served."""

from typing import Any

from ..validation import shown


class Refused(ValueError):
    """A request that gets no text. `status`: of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def whole(body: dict[str, Any], name: str, least: int, most: int) -> int | None:
    """Read a whole number; None where it is not given."""
    value = body.get(name)
    if value is not None and not (type(value) is int and least <= value <= most):
        raise Refused(f"{name}: expected a whole number from {least} to {most}, got {shown(value)}")
    return value


def number(body: dict[str, Any], name: str, least: float, most: float, usual: float) -> float:
    """Read a number; `usual` where it is not given."""
    value = body.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refused(f"{name}: expected a number from {least:g} to {most:g}, got {shown(value)}")
    return float(value)


def flag(body: dict[str, Any], name: str) -> bool:
    """Read true or false; false where it is not given."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise Refused(f"{name}: expected true or false, got {shown(value)}")
    return bool(value)
