"""`hf-lossy policies`: every name of the registry."""

from textwrap import fill, indent
from typing import Annotated, Any

import typer
from rich.text import Text

from ..registry import KINDS, REQUIRED
from ..registry import find_entry as entry
from ..registry.registry import CatalogEntry as Line
from ..registry.registry import build_catalog as catalog
from ..terminal import console, show, show_json
from ..validation import nearest
from .options import AsJson


def policies(
    name: Annotated[str | None, typer.Argument(help="show this one alone, with all that is known of it")] = None,
    kind: Annotated[str | None, typer.Option(help=f"list only these: {', '.join(KINDS[:-1])} or {KINDS[-1]}")] = None,
    as_json: AsJson = False,
) -> None:
    """List every method, rule, stop, filter and drafter: what each guarantees, its neutral setting, its parameters and source.

    Examples:

      hf-lossy policies

      hf-lossy policies top_k

      hf-lossy policies --kind stop
    """
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
    screen = console(highlight=False)
    for group in dict.fromkeys(line.kind for line in chosen):
        _show_group(screen, group, [line for line in chosen if line.kind == group])


def _in_full(line: Line) -> str:
    """One entry as lines, which fit any width."""
    ladder = entry(line.kind, line.name).ladder
    rows = {
        f"{line.kind} {line.name}": line.summary, "guarantee": line.guarantee, "neutral": line.neutral, "parameters": _given(line) or "none",
        "source": line.source, "in Python": f"hla.{line.class_name}",
        "tune tries": "this setting alone" if ladder is None else f"{ladder[0]} = {', '.join(map(str, ladder[1]))}",
    }  # fmt: skip
    return "\n".join(f"{what}: {value}" for what, value in rows.items())


def _show_group(screen: Any, kind: str, lines: list[Line]) -> None:
    """Entries below each other: six columns beside each other take more than a terminal is wide."""
    screen.print(Text(f"{kind}s", style="bold underline"))
    for line in lines:
        title = Text().append(line.name, style="bold").append(f"  {line.guarantee}")
        facts = {
            "parameters": _given(line),
            "neutral": line.neutral,
            "source": line.source.removeprefix("huggingface.co/"),
        }
        beside = "; ".join(f"{what}: {value}" for what, value in facts.items() if value)
        screen.print(title, overflow="fold")
        for text, style in ((line.summary, ""), (beside, "dim")):
            screen.print(Text(indent(fill(text, screen.width - 4), "    "), style=style))
    screen.print()


def _given(line: Line) -> str:
    return ", ".join(name if value == REQUIRED else f"{name}={value}" for name, value in line.parameters.items())
