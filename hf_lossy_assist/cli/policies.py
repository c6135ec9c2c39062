"""The command that lists every rule, stop, filter and policy. `cli` adds it to `hf-lossy`."""

import sys
from typing import Annotated

import typer

from ..terminal import console, show_json


def add_to(app: typer.Typer) -> None:
    """Add every command here to `app`."""
    app.command()(policies)


def policies(
    kind: Annotated[str | None, typer.Option(help="only these: rule, stop, filter or policy")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON list and nothing else")] = False,
) -> None:
    """List every rule, stop, filter and policy: what each guarantees, its neutral value, its parameters and source."""
    from rich.table import Column, Table

    from ..policy.catalog import catalog
    from ..validation import nearest

    entries = catalog()
    kinds = list(dict.fromkeys(entry.kind for entry in entries))
    if kind is not None and kind not in kinds:
        raise ValueError(f"--kind: {nearest('kind', kind, kinds)}")
    chosen = [entry for entry in entries if kind in (None, entry.kind)]
    if as_json:
        show_json([entry.to_dict() for entry in chosen], indent=1)
        return
    screen = console(width=None if sys.stdout.isatty() else 160)
    for group in dict.fromkeys(entry.kind for entry in chosen):
        # Folded, not cut: a name or a source of which a part is missing is of no use.
        columns = [
            Column(title, overflow="fold")
            for title in (group, "guarantee", "neutral", "parameters", "source", "what it does")
        ]
        table = Table(*columns, title=f"{group}s" if group != "policy" else "policies")
        for e in (entry for entry in chosen if entry.kind == group):
            given = ", ".join(
                name if default == "required" else f"{name}={default}" for name, default in e.parameters.items()
            )
            table.add_row(e.name, e.guarantee, e.neutral, given, e.source.removeprefix("huggingface.co/"), e.summary)
        screen.print(table)
