"""Settings that are declared once, as fields of a dataclass: type, bounds and help, for the check and for options.

batch_size: Annotated[int, (1, MOST), "texts at a time"] = 8
"""

from typing import Annotated, NamedTuple, get_args, get_origin, get_type_hints

from .validation import check_int, check_number


class Setting(NamedTuple):
    """A field or a parameter: its type, its bounds or None, and texts: names of its option, and last the help."""

    kind: object
    bounds: tuple[float, float] | None = None
    texts: tuple[object, ...] = ()

    def check(self, name: str, value: object) -> None:
        """Refuse a number beyond the bounds; None is no number. Raises: `ValueError` or `TypeError`, one line."""
        if self.bounds is None or value is None:
            return
        low, high = self.bounds
        if int in (self.kind, *get_args(self.kind)):
            check_int(name, value, int(low), int(high))
        else:
            check_number(name, value, low, high)


def read_setting(annotation: object) -> Setting:
    """Read `Annotated[type, (least, most), …, help]`, of which all but the type may be left out."""
    if get_origin(annotation) is not Annotated:
        return Setting(annotation)
    kind, *texts = get_args(annotation)
    bounds = texts.pop(0) if isinstance(texts[0], tuple) else None
    return Setting(kind, bounds, tuple(texts))


def check_bounds(settings: object, prefix: str = "") -> None:
    """Refuse fields of a dataclass beyond their bounds. Raises: `ValueError` or `TypeError`, one line."""
    for name, annotation in get_type_hints(type(settings), include_extras=True).items():
        read_setting(annotation).check(f"{prefix}{name}", getattr(settings, name))
