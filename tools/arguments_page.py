"""Writes docs/arguments.md from the table of arguments, `hf_lossy_assist.generation.arguments.ARGUMENTS`.

python tools/arguments_page.py
"""

from pathlib import Path

from hf_lossy_assist.generation.arguments import ARGUMENTS, HONOURED, REFUSED, WITHOUT_EFFECT


PAGE = Path(__file__).parent.parent / "docs" / "arguments.md"
TOP = """# Arguments and settings of `generate`

Every parameter of Transformers' `generate` and every setting of its `GenerationConfig` (5.17 to 5.24), and its status in a call
with a policy. `tools/arguments_page.py` writes this page; `tests/generation/test_arguments.py` tries every row.
"""
SECTIONS = {
    HONOURED: "As in Transformers: with the strict policy the output is the one of `generate` with the same value.",
    REFUSED: "In one line that names the setting, if its value would change something.",
    WITHOUT_EFFECT: "",
}
COLUMNS = {HONOURED: "remark", REFUSED: "what it is", WITHOUT_EFFECT: "why"}


def write_page() -> str:
    """Return the page's text."""
    out = [TOP]
    for title, text in SECTIONS.items():
        out += [f"## {title}\n"] + ([f"{text}\n"] if text else []) + [f"| names | {COLUMNS[title]} |", "|---|---|"]
        for row in ARGUMENTS[title]:
            out.append(f"| {', '.join(f'`{name}`' for name in row.checks)} | {row.remark} |".replace("  |", " |"))
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
