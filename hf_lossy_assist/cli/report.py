"""`hf-lossy report`: what compare, tune and fit wrote, as one page."""

from pathlib import Path
from typing import Annotated

import typer

from ..terminal import show
from .options import needs


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="folders that compare, tune, fit sprinter or fit autojudge wrote")
    ],
    out: Annotated[Path, typer.Option(help="the page to write; Markdown where it ends in .md")] = Path("report.html"),
) -> None:
    """Put figures with intervals, the front of speed and quality, the texts, and what heads are worth on one self-contained page.

    Example:

      hf-lossy report found tuned head --out report.html
    """
    needs("train", "scipy", "jinja2", "matplotlib")
    if out.suffix not in (".html", ".md"):
        raise ValueError(f"--out: expected a name that ends in .html or .md, got {str(out)!r}")
    from ..artifacts.files import check_file, write_text
    from ..evaluation.page import render_html as html
    from ..evaluation.page import render_markdown as markdown
    from ..evaluation.report_sections import format_title as title_of
    from ..evaluation.report_sections import make_sections as sections
    from ..evaluation.report_sections import read_folder as read

    check_file("--out", out)
    found = [read(folder) for folder in folders]
    write = markdown if out.suffix == ".md" else html
    write_text(out, write(title_of(found), sections(found)))
    show(f"{out}: {len(found)} {'folder' if len(found) == 1 else 'folders'}, {out.stat().st_size // 1024 + 1} KB")
