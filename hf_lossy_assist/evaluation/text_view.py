"""Texts as HTML, each token with its source as a colour and as a mark, so that nothing is told by colour alone, and with what was thought of it."""

from collections.abc import Sequence
from html import escape

from ..stats.row import SOURCES
from .scoring import Scores


# The class of each source, and how it is marked beside its colour.
CLASSES = ("draft", "lossy", "correction", "bonus")
MARKS = ("plain", "dotted underline", "solid underline", "dashed underline")
ALONE = "target alone"  # the source of a token where nothing was drafted


def text_view(pieces: Sequence[str], sources: Sequence[int], scores: Scores | None = None) -> str:
    """One text: a span for each run of tokens of one source, in it one for each token, whose title says what is known of it. The page shows the title of
    a token that has the focus, for those without a mouse. Line breaks are kept.

    pieces, sources: of each token, its text and an index into `SOURCES`; no sources: the target wrote alone.
    """
    spans: list[str] = []
    begin = 0
    kinds: Sequence[int | None] = list(sources) or [None] * len(pieces)
    for i in range(1, len(pieces) + 1):
        if i == len(pieces) or kinds[i] != kinds[begin]:
            tokens = "".join(
                f'<span class="t" tabindex="0" title="{escape(_about(kinds[j], scores, j))}">{escape(pieces[j])}</span>'
                for j in range(begin, i)
            )
            kind = kinds[begin]
            spans.append(tokens if kind is None else f'<span class="{CLASSES[kind]}">{tokens}</span>')
            begin = i
    return f'<p class="text">{"".join(spans)}</p>'


def legend() -> str:
    """What colours and marks mean, and what is said of a token."""
    entries = ", ".join(f'<span class="{name}">{SOURCES[i]}</span> ({MARKS[i]})' for i, name in enumerate(CLASSES))
    return (
        f'<p class="legend">{entries}. Point at a token, tap it or move the focus there (Tab) to read its source and, where they are known, '
        "p (the target's probability of it), q (the draft's) and what a head says of it. Probabilities are those of one forward over the finished "
        "text, before temperature and filters: in float32 decoding's own to 1e-5, in half precision not to the last digits.</p>"
    )


def _about(kind: int | None, scores: Scores | None, place: int) -> str:
    """What is known of one token."""
    said = [ALONE if kind is None else SOURCES[kind]]
    if scores is not None:
        known: dict[str, Sequence[float | None]] = {"p": scores.p, "q": scores.q, **scores.heads}
        values = {name: its[place] for name, its in known.items() if its}
        said += [f"{name} {value:.3g}" for name, value in values.items() if value is not None]
    return ", ".join(said)
