"""Pages that the package itself writes, made anew at every build: policies, papers, commands, and the public Python names.

Nothing in them is typed twice: they come from `build_catalog()`, from the typer app and from `hf_lossy_assist.__all__`.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import hf_lossy_assist
from hf_lossy_assist.cli import app
from hf_lossy_assist.registry.registry import build_catalog


KINDS = {
    "method": (
        "Methods",
        "What `lossy_policy=` takes by name; beside the name, `head=`, `profile=` and `companion=` where the method needs one.",
    ),
    "rule": ("Rules", "What is accepted. Every rule but the lossless ones changes the distribution of the text."),
    "stop": ("Draft stops", "How many tokens a round drafts. A stop changes the speed and never the distribution."),
    "filter": ("Verify filters", "Which drafted tokens go to the target."),
    "drafter": ("Drafters", "Where drafted tokens come from."),
}
# The room of the package that a public name lives in, and its page. A name in another room fails the build.
ROOMS = {
    "generation": ("generation", "Calling generate", "How a model learns `lossy_policy=`, and the same without `enable`."),
    "policy": ("policy", "Policies and methods", "A policy is a rule, a draft stop and a verify filter."),
    "methods": ("policy", "", ""),
    "registry": ("policy", "", ""),
    "rules": ("rules", "Rules", "What is accepted, and what the token after a rejection is drawn from."),
    "stops": ("stops", "Draft stops", "How many tokens each row drafts in a round."),
    "filters": ("filters", "Drafters and filters", "What writes ahead, and which drafted tokens go to the target."),
    "drafters": ("filters", "", ""),
    "artifacts": ("artifacts", "Heads and profiles", "What is trained or measured, saved and shared."),
    "models": ("models", "Models", "Helpers around a Transformers model."),
    "evaluation": ("models", "", ""),
    "round": ("round", "One round", "The tensors that rules, stops and filters see."),
    "engine": ("round", "", ""),
    "batch": ("round", "", ""),
    "stats": ("stats", "Statistics", "What `out.speculation` is."),
    "demo": ("demo", "The demo", "A task, a tokenizer and trained models that ship with the package."),
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages; mkdocs calls this before it reads any."""
    pages = {"policies.md": policies_page(), "papers.md": papers_page(), "command-line.md": commands_page()}
    pages |= {f"api/{name}.md": text for name, text in api_pages().items()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


# -- policies and papers ----------------------------------------------------------------------------------------------


def policies_page() -> str:
    out = [
        "# Policies",
        "Every policy, rule, draft stop and verify filter, as `hf-lossy policies` lists them. "
        "**Neutral**: the setting at which the text is strict acceptance's, bit for bit. "
        "[Rules side by side](../policies.md) has each lossy rule measured on the demo; "
        "[choose a policy](../how-to/choose-a-policy.md) says which to try first.",
    ]
    entries = build_catalog()
    for kind in [*KINDS, *sorted({e.kind for e in entries} - set(KINDS))]:
        title, lead = KINDS.get(kind, (kind.capitalize(), ""))
        out += [f"## {title}", lead]
        for e in (e for e in entries if e.kind == kind):
            out += [f"### `{e.name}` {{ #{kind}-{e.name} }}", cell(e.summary), facts(e)]
    return "\n\n".join(out) + "\n"


def facts(entry: Any) -> str:
    given = ", ".join(k if v == "required" else f"{k}={shown(v)}" for k, v in entry.parameters.items())
    lines = {
        "guarantee": f"**{entry.guarantee}**" if entry.guarantee.startswith("lossy") else entry.guarantee,
        "neutral": entry.neutral,
        "by name": f'`lossy_policy="{entry.name}"`' if entry.kind == "method" else "",
        "Python": f"`{entry.class_name}({given})`" if entry.kind != "drafter" else "",
        "source": source(entry.source),
    }
    return "\n".join(f"- {name}: {text}" for name, text in lines.items() if text)


def papers_page() -> str:
    by_source: dict[str, list[Any]] = {}
    for e in build_catalog():
        by_source.setdefault(e.source, []).append(e)
    papers = {s: found for s, found in by_source.items() if s.startswith("huggingface.co/")}
    out = [
        "# Papers and engines",
        "Where each policy, rule, draft stop and filter comes from.",
        "## Papers",
        table(("paper", "here", "what it does"), sorted(lines(papers), key=lambda row: row[0], reverse=True)),
        "## Engines, libraries and this package",
        table(("source", "here", "what it does"), lines({s: f for s, f in by_source.items() if s not in papers})),
    ]
    return "\n\n".join(out) + "\n"


def lines(by_source: dict[str, list[Any]]) -> Iterable[tuple[str, str, str]]:
    for found, entries in by_source.items():
        names = ", ".join(f"[`{e.name}`](policies.md#{e.kind}-{e.name}) ({e.kind})" for e in entries)
        yield source(found), names, cell(entries[0].summary)


def source(text: str) -> str:
    if not text.startswith("huggingface.co/"):
        return cell(text)
    return f"[{text.removeprefix('huggingface.co/').removeprefix('papers/')}](https://{text})"


# -- commands ---------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    out = [
        "# Command line",
        "Made from the program itself; `hf-lossy COMMAND --help` says the same. "
        "[Use the command line](../how-to/command-line.md) shows what for.",
    ]
    group: Any = typer.main.get_command(app)
    for path, command in commands("hf-lossy", group):
        said, _, examples = (command.help or "").partition("Example")
        lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
        out += [f"## `{path}`", cell(said), "\n".join(["```text", *lines, "```"])]
        rows = [parameter(p) for p in command.params if p.name != "help"]
        out += [table(("option", "value", "default", "what it is"), rows)] if rows else []
    return "\n\n".join(out) + "\n"


def commands(path: str, group: Any) -> Iterable[tuple[str, Any]]:
    inside = getattr(group, "commands", None)
    if inside is None:
        yield path, group
        return
    for name in group.list_commands(None):  # in the order of the work
        yield from commands(f"{path} {name}", inside[name])


def parameter(its: Any) -> tuple[str, str, str, str]:
    option = its.param_type_name == "option"
    names = ", ".join(f"`{name}`" for name in [*its.opts, *its.secondary_opts]) if option else f"`{its.name.upper()}`"
    flag = option and its.is_flag
    unset = its.default is None or isinstance(its.default, bool) or callable(its.default)
    default = "required" if its.required else "" if unset else f"`{its.default}`"
    return names, "" if flag else value_of(its), default, cell(getattr(its, "help", None) or "")


def value_of(its: Any) -> str:
    """What kind of value an option takes; older typers keep click's type, newer ones the annotation."""
    if hasattr(its, "type"):
        return str(its.type.name)
    kind = its.type_descriptor.annotation
    kind = next((a for a in get_args(kind) if a is not type(None)), kind)
    return {Path: "path", str: "text", int: "integer", float: "number"}.get(kind, kind.__name__)


# -- Python -----------------------------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """A page for each room; every name of `__all__` on one of them."""
    pages: dict[str, list[str]] = {}
    for name in hf_lossy_assist.__all__:
        value = getattr(hf_lossy_assist, name)
        where = value.__name__ if isinstance(value, ModuleType) else value.__module__
        room = where.removeprefix("hf_lossy_assist.").split(".")[0]
        if room not in ROOMS:
            raise PluginError(f"{name} lives in {where}, for which docs/hooks/reference_pages.py has no page")
        names = value.__all__ if isinstance(value, ModuleType) else [value.__qualname__]
        holder = value if isinstance(value, ModuleType) else inspect.getmodule(value)
        for its in names:
            found = getattr(holder, its)
            if callable(found):  # constants have no docstring
                pages.setdefault(ROOMS[room][0], []).append(f"::: {found.__module__}.{found.__qualname__}")
    titles = {page: (title, lead) for page, title, lead in ROOMS.values() if title}
    return {
        page: "\n\n".join([f"# {titles[page][0]}", titles[page][1], *dict.fromkeys(found)]) + "\n"
        for page, found in pages.items()
    }


# -- Markdown ---------------------------------------------------------------------------------------------------------


def table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    head = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


def cell(text: str) -> str:
    """Text for a table: on one line, and a bar in it is no border."""
    return " ".join(text.split()).replace("|", "\\|")


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
