"""Output to the terminal: text from models, files and servers is shown literally, without control characters or markup.

Everything that this package prints goes through this module (checked by `tests/cli/test_terminal.py`).
"""

import json
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console
from rich.segment import Segment
from rich.table import Column, Table

from .validation import UNSEEN, one_line, visible


LONGEST = 1000  # characters of a warning, which may quote texts of any length


def show(*texts: object, file: TextIO | None = None) -> None:
    """Print text of any content, and flush it, so that a reader of a pipe gets it at once."""
    print(visible(" ".join(map(str, texts))), file=file, flush=True)


def show_json(value: Any, **settings: Any) -> None:
    """Print `value` as JSON with its texts unchanged: control characters are written as \\u…, which JSON decodes.

    Infinity and NaN, which JSON does not have, are written as texts.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **settings)
    print(UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", text), flush=True)


def _finite(value: object) -> Any:
    if isinstance(value, dict):
        return {_finite(name): _finite(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class PlainConsole(Console):
    """A rich console that shows a text's control characters by their codes."""

    def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
        for piece in super().render(*args, **kwargs):
            yield piece if piece.control else Segment(visible(piece.text), piece.style)


def console(**settings: Any) -> PlainConsole:
    """Return a rich console that does not interpret texts as markup; `settings`: see `rich.console.Console`."""
    return PlainConsole(markup=False, emoji=False, **settings)


def table(first: str, *others: str) -> Table:
    """Return a rich table for 80 columns: long names in the first column are folded, figures in the others are never
    cut.

    A title may contain line ends, to make it as narrow as its figures.
    """
    figures = (Column(title, justify="right", no_wrap=True) for title in others)
    return Table(Column(first, overflow="fold"), *figures, box=None, padding=(0, 2, 0, 0))


class Bar:
    """A progress bar on stderr with the remaining time, from the mean speed so far; it also moves by fractions of a
    unit.

    Args:
        total: number of units. what, unit: what is being done, and to what; both are shown.
        quiet: show nothing.
    """

    def __init__(self, total: int, what: str, unit: str, *, quiet: bool = False):
        from huggingface_hub.utils import tqdm

        self._bar = tqdm(
            total=total,
            desc=what,
            unit=unit,
            disable=quiet,
            smoothing=0,
            miniters=0,
            mininterval=0.2,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} {unit}, {elapsed}, {remaining} to go",
        )

    def to(self, done: float) -> None:
        """Show that so many units are done in total. The bar never goes back."""
        self._bar.update(max(done - self._bar.n, 0.0))

    def say(self, what: str) -> None:
        """Show what is being done now."""
        self._bar.set_description(what, refresh=True)

    @property
    def done(self) -> float:
        """Return the number of units done."""
        return float(self._bar.n)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()  # it stays visible


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings as one line each on stderr, without the position in the code, which means nothing to a command's
    user."""

    def tell(message: Warning | str, *_: object, **__: object) -> None:
        show(f"warning: {one_line(message, LONGEST)}", file=sys.stderr)

    before, warnings.showwarning = warnings.showwarning, tell
    try:
        yield
    finally:
        warnings.showwarning = before


def digits(speed: float) -> int:
    """Return the decimal places for tokens per second, so that slow models show three digits."""
    return 0 if speed >= 100 else 1 if speed >= 10 else 2
