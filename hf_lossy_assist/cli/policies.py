"""`hf-lossy policies`: every name of the registry."""

import sys
from typing import Annotated

import typer
from rich.table import Column, Table

from ..policy.catalog import Line, catalog
from ..registry import KINDS, REQUIRED, entry
from ..terminal import console, show, show_json
from ..validation import nearest
from .options import AsJson


def policies(
    name: Annotated[str | None, typer.Argument(help="show this one alone, with all that is known of it")] = None,
    kind: Annotated[str | None, typer.Option(help=f"list only these: {', '.join(KINDS[:-1])} or {KINDS[-1]}")] = None,
    as_json: AsJson = False,
) -> None:
    """List every method, rule, stop, filter and drafter: what each guarantees, its neutral setting, its parameters and source."""
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--kind: {nearest('kind', kind, KINDS)}")
    chosen = [line for line in catalog() if kind in (None, line.kind)]
    if name is not None:
        chosen = [line for line in chosen if line.name == name]
        if not chosen:
            raise ValueError(nearest("policy", name, {line.name for line in catalog() if kind in (None, line.kind)}))
    if as_json:
        show_json([line.to_dict() for line in chosen], indent=1)
        return
    if name is not None:
        show("\n\n".join(map(_in_full, chosen)))
        return
    screen = console(width=None if sys.stdout.isatty() else 160)
    for group in dict.fromkeys(line.kind for line in chosen):
        screen.print(_table(group, [line for line in chosen if line.kind == group]))


def _in_full(line: Line) -> str:
    """One entry as lines, which fit any width."""
    given = ", ".join(name if value == REQUIRED else f"{name}={value}" for name, value in line.parameters.items())
    ladder = entry(line.kind, line.name).ladder
    rows = {
        f"{line.kind} {line.name}": line.summary, "guarantee": line.guarantee, "neutral": line.neutral, "parameters": given or "none",
        "source": line.source, "in Python": f"hla.{line.class_name}",
        "tune tries": "this setting alone" if ladder is None else f"{ladder[0]} = {', '.join(map(str, ladder[1]))}",
    }  # fmt: skip
    return "\n".join(f"{what}: {value}" for what, value in rows.items())


def _table(kind: str, lines: list[Line]) -> Table:
    # Folded, not cut: a name or a source of which a part is missing is of no use.
    titles = (kind, "guarantee", "neutral", "parameters", "source", "what it does")
    table = Table(*(Column(title, overflow="fold") for title in titles), title=f"{kind}s")
    for line in lines:
        given = ", ".join(name if value == REQUIRED else f"{name}={value}" for name, value in line.parameters.items())
        source = line.source.removeprefix("huggingface.co/")
        table.add_row(line.name, line.guarantee, line.neutral, given, source, line.summary)
    return table
