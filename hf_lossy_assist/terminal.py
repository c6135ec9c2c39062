"""The way to the terminal: what models, files and servers wrote is shown as text, and no terminal and no markup acts on it.

Everything that this package prints goes through here (`tests/test_terminal.py` holds it to that).
"""

import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from .validation import UNSEEN, one_line, visible


LONGEST = 1000  # characters of a warning: what it quotes may be of any length


def show(*texts: object, file: TextIO | None = None) -> None:
    """`print`, of text that may hold anything."""
    print(visible(" ".join(map(str, texts))), file=file)


def show_json(value: Any, **settings: Any) -> None:
    """`value` as JSON, whose texts are whole: what a terminal would act on is written as \\u…, which JSON reads back.

    Of an infinite number and of NaN, which JSON does not have, the name is a text.
    """
    text = json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, **settings)
    print(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {_finite(name): _finite(inside) for name, inside in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inside) for inside in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def console(**settings: Any) -> Any:
    """A rich console that takes no text for its markup; `settings` as of `rich.console.Console`."""
    from rich.console import Console
    from rich.segment import Segment

    class Plain(Console):
        def render(self, *args: Any, **kwargs: Any) -> Iterator[Segment]:
            for piece in super().render(*args, **kwargs):
                yield piece if piece.control else Segment(visible(piece.text), piece.style)

    return Plain(markup=False, emoji=False, **settings)


def streamer(tokenizer: Any, **settings: Any) -> Any:
    """Transformers' streamer of text to the terminal."""
    from transformers import TextStreamer

    class Plain(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            super().on_finalized_text(visible(text), stream_end)

    return Plain(tokenizer, **settings)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings are one line each on stderr, without the place in the code, of which a command's user knows nothing."""
    import sys

    def tell(message: Warning | str, *_: Any, **__: Any) -> None:
        show(f"warning: {one_line(message, LONGEST)}", file=sys.stderr)

    before, warnings.showwarning = warnings.showwarning, tell
    try:
        yield
    finally:
        warnings.showwarning = before
