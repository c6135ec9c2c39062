"""Texts as HTML, each token with its source as a colour and as a mark, so that nothing is told by colour alone."""

from collections.abc import Sequence
from html import escape

from ..stats.row import SOURCES


# The class of each source, and how it is marked beside its colour.
CLASSES = ("draft", "lossy", "correction", "bonus")
MARKS = ("plain", "dotted underline", "solid underline", "dashed underline")


def text_view(pieces: Sequence[str], sources: Sequence[int]) -> str:
    """One text: a span for each run of tokens of one source, whose title says what it is; line breaks are kept.

    pieces, sources: of each token, its text and an index into `SOURCES`.
    """
    spans: list[str] = []
    begin = 0
    for i in range(1, len(pieces) + 1):
        if i == len(pieces) or sources[i] != sources[begin]:
            kind, run = sources[begin], pieces[begin:i]
            tokens = "".join(f'<span class="t">{escape(piece)}</span>' for piece in run)
            count = f"{len(run)} token{'s' if len(run) > 1 else ''}"
            spans.append(f'<span class="{CLASSES[kind]}" title="{SOURCES[kind]}, {count}">{tokens}</span>')
            begin = i
    return f'<p class="text">{"".join(spans)}</p>'


def legend() -> str:
    """What colours and marks mean."""
    entries = (f'<span class="{name}">{SOURCES[i]}</span> ({MARKS[i]})' for i, name in enumerate(CLASSES))
    return f'<p class="legend">{", ".join(entries)}</p>'
