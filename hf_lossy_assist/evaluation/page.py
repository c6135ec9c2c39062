"""One HTML page that needs nothing from elsewhere: no script, no font, no request."""

from collections.abc import Sequence
from html import escape


STYLE = """
:root { --ink: #1c1e21; --soft: #5c6370; --page: #fff; --line: #d8dbe0; --draft: #1a7f37; --lossy: #a626a4; --correction: #b35900; --bonus: #0b6e99; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #9aa3b0; --page: #15181c; --line: #343a42; --draft: #5fd07f; --lossy: #e29bf0; --correction: #f0b060; --bonus: #6cc5ee; }
}
body { color: var(--ink); background: var(--page); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; color: var(--soft); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.advice { border-left: .25rem solid var(--bonus); padding-left: .75rem; font-weight: 600; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: .4rem; padding: .6rem; }
.t:hover { outline: 1px solid currentColor; } .prompt, .legend, .small { color: var(--soft); white-space: pre-wrap; overflow-wrap: anywhere; }
.draft { color: var(--draft); } .lossy { color: var(--lossy); text-decoration: underline dotted; }
.correction { color: var(--correction); text-decoration: underline; } .bonus { color: var(--bonus); text-decoration: underline dashed; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg .axis, svg .bar { stroke: var(--soft); fill: none; } svg .point { fill: var(--bonus); } svg .lossy-point { fill: var(--lossy); } svg .lead { stroke: var(--line); }
"""


def page(title: str, body: Sequence[str]) -> str:
    """The whole document; `body`: parts that are HTML already."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
    inside = "\n".join([f"<h1>{escape(title)}</h1>", *body])
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n{inside}\n</body></html>\n'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where the screen is narrower."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>\n{lines}</tbody></table></div>'
