"""One HTML page that needs nothing from elsewhere: no script, no font, no request."""

from collections.abc import Sequence
from html import escape


STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6370; --page: #fff; --line: #d8dbe0; --draft: #1a7f37; --lossy: #a626a4; --correction: #b35900; --bonus: #0b6e99; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3b0; --page: #15181c; --line: #343a42; --draft: #5fd07f; --lossy: #e29bf0; --correction: #f0b060; --bonus: #6cc5ee; }
}
* { box-sizing: border-box; }
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: min(12rem, 30vw); max-width: min(16rem, 34vw); position: sticky; left: 0; background: var(--page); }
.advice { border-left: .25rem solid var(--bonus); padding-left: .75rem; font-weight: 600; }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--soft); }
.text { white-space: pre-wrap; border: 1px solid var(--line); border-radius: .4rem; padding: .6rem; }
.prompt, .legend, .small, figcaption { color: var(--soft); white-space: pre-wrap; } .small, figcaption { font-size: .9rem; }
.t:hover, .t:focus { outline: 1px solid currentColor; }
.t:focus::after { content: attr(title); position: fixed; left: .5rem; right: .5rem; bottom: .5rem; padding: .5rem .75rem; color: var(--page); background: var(--ink); border-radius: .4rem; }
.draft { color: var(--draft); } .lossy { color: var(--lossy); text-decoration: underline dotted; }
.correction { color: var(--correction); text-decoration: underline; } .bonus { color: var(--bonus); text-decoration: underline dashed; }
.wide, .narrow { margin-top: 1rem; } figure { margin: 0; flex: 1 1 20rem; max-width: 28rem; } .pair { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } svg .count { fill: var(--soft); font-size: 10px; }
svg .axis, svg .bar, svg .curve { stroke: var(--soft); fill: none; } svg .curve { stroke: var(--bonus); stroke-width: 2; } svg .even { stroke: var(--soft); stroke-dasharray: 4 4; }
svg .point { fill: var(--bonus); } svg .lossy-point { fill: var(--lossy); } svg circle { stroke: var(--page); } svg .lead { stroke: var(--soft); stroke-opacity: .5; }
.narrow { display: none; } @media (max-width: 44rem) { .wide { display: none; } .narrow { display: block; } }
"""


def page(title: str, body: Sequence[str]) -> str:
    """The whole document; `body`: parts that are HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    inside = "\n".join([f"<h1>{escape(title)}</h1>", *body])
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{inside}\n</body></html>\n'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself, also by keys, where the screen is narrower."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
    )


def paragraph(text: str, kind: str) -> str:
    """A paragraph of the class `kind`; nothing in `text` acts."""
    return f'<p class="{kind}">{escape(text)}</p>'
