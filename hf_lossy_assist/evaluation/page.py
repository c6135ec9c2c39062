"""A report's parts, and the two forms in which they are written: one HTML page, which asks nobody for anything, and Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from ..artifacts.cards import escape
from ..stats.speculation import SOURCES


NONE = "–"  # a cell without a figure


@dataclass(frozen=True)
class Table:
    """A table, whose columns without any figure are left out, and its charts (address of the image, caption)."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    charts: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shown = [i for i in range(len(self.heads)) if i == 0 or any(row[i] != NONE for row in self.rows)]
        object.__setattr__(self, "heads", [self.heads[i] for i in shown])
        object.__setattr__(self, "rows", [[row[i] for i in shown] for row in self.rows])


@dataclass(frozen=True)
class SourcedText:
    """A text, in runs of tokens of one source: (name of the source, text)."""

    title: str
    runs: list[tuple[str, str]]


@dataclass(frozen=True)
class Section:
    """One folder's part. `texts`: by a title each, the first of which is open."""

    title: str
    about: list[str]
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    texts: list[tuple[str, list[SourcedText]]] = field(default_factory=list)


def group_by_source(title: str, pieces: Sequence[str], sources: Sequence[int]) -> SourcedText:
    """Make a `Text` of tokens. `sources`: of each an index into `SOURCES`; empty: the target wrote alone."""
    names = [SOURCES[source] for source in sources] or ["target alone"] * len(pieces)
    pairs = groupby(zip(names, pieces, strict=True), key=lambda pair: pair[0])
    return SourcedText(title, [(name, "".join(piece for _, piece in run)) for name, run in pairs])


def render_html(title: str, sections: Sequence[Section]) -> str:
    """Write the page; nothing in names and texts acts there."""
    import jinja2

    here = jinja2.FileSystemLoader(Path(__file__).parent)
    made = jinja2.Environment(loader=here, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return made.get_template("page.html.jinja").render(title=title, sections=sections, sources=SOURCES)


def render_markdown(title: str, sections: Sequence[Section]) -> str:
    """Write the same without charts and texts."""
    parts = [f"# {title}"]
    for section in sections:
        parts += [f"## {escape(section.title)}", *(escape(line) for line in section.about)]
        parts += [f"**{escape(line)}**" for line in section.notes]
        for table in section.tables:
            lines = [table.heads, ["---"] * len(table.heads), *escape(table.rows)]
            parts += [f"{table.title}:", "\n".join("| " + " | ".join(row) + " |" for row in lines)]
    return "\n\n".join(parts) + "\n"
