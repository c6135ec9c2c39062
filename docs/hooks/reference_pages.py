"""Generate pages at every build from the package: policies, papers, commands, and the public Python names.

The sources are the registry's entries, the typer app and `hf_lossy_assist.__all__`.
"""

import inspect
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import hf_lossy_assist
from hf_lossy_assist.cli import app
from hf_lossy_assist.registry import list_entries


KINDS = {
    "method": (
        "Methods",
        "Names for `lossy_policy=`, with `head=`, `profile=` and `companion=` if the method needs one.",
    ),
    "rule": (
        "Rules",
        "Which drafted tokens are accepted. Every rule except the lossless ones changes the output's distribution.",
    ),
    "stop": ("Draft stops", "How many tokens a round drafts. A stop changes the speed and never the distribution."),
    "filter": ("Verify filters", "Which drafted tokens the target reads."),
    "drafter": ("Drafters", "Where drafted tokens come from."),
}
# The page of each room of the package. A public name in another room fails the build.
ROOMS = {
    "generation": ("generation", "Calling generate", "`lossy_policy=` in `generate`, with and without `enable`."),
    "enabling": ("generation", "", ""),
    "text": ("generation", "", ""),
    "transformers_loop": ("transformers_loop", "Transformers' own loop", "Policies in `generate(assistant_model=…)` as Transformers has it."),
    "policy": ("policy", "Policies and methods", "A policy is a rule, a draft stop and a verify filter."),
    "methods": ("policy", "", ""),
    "registry": ("policy", "", ""),
    "rules": ("rules", "Rules", "Which tokens are accepted, and the distribution of the token after a rejection."),
    "stops": ("stops", "Draft stops", "How many tokens each row drafts in a round."),
    "filters": ("filters", "Drafters and filters", "What drafts, and which drafted tokens the target reads."),
    "drafters": ("filters", "", ""),
    "artifacts": ("artifacts", "Heads and profiles", "Trained or measured files, saved and shared."),
    "models": ("models", "Models", "Helpers for a Transformers model."),
    "evaluation": ("models", "", ""),
    "round": ("round", "One round", "The tensors that rules, stops and filters see."),
    "engine": ("round", "", ""),
    "batch": ("round", "", ""),
    "stats": ("stats", "Statistics", "What `out.speculation` is."),
    "ray": ("ray", "Past one machine", "On a Ray cluster."),
    "demo": ("demo", "The demo", "A task, a tokenizer and trained models that ship with the package."),
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages. mkdocs calls this before it reads any."""
    pages = {"policies.md": policies_page(), "papers.md": papers_page(), "command-line.md": commands_page()}
    pages |= {f"api/{name}.md": text for name, text in api_pages().items()}
    for name, text in pages.items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


# -- policies and papers ----------------------------------------------------------------------------------------------


def build_catalog() -> list[SimpleNamespace]:
    return [SimpleNamespace(**entry.describe()) for entry in list_entries()]


def policies_page() -> str:
    out = [
        "# Policies",
        "Every policy, rule, draft stop and verify filter, as `hf-lossy policies` lists them. "
        "**Neutral**: the setting at which a part equals strict acceptance, bit for bit. "
        "[Rules side by side](../policies.md) measures each lossy rule on the demo; "
        "[choose a policy](../how-to/choose-a-policy.md) recommends which to try first.",
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
        "The source of each policy, rule, draft stop and filter.",
        "## Papers",
        table(("paper", "name", "what it does"), sorted(lines(papers), key=lambda row: row[0], reverse=True)),
        "## Engines, libraries and this package",
        table(("source", "name", "what it does"), lines({s: f for s, f in by_source.items() if s not in papers})),
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
        "Generated from the program, as `hf-lossy COMMAND --help`. "
        "[Use the command line](../how-to/command-line.md) has examples.",
    ]
    group: Any = typer.main.get_command(app)
    for path, command in commands("hf-lossy", group):
        summary, _, examples = (command.help or "").partition("Example")
        lines = [line.strip() for line in examples.splitlines()[1:] if line.strip()]
        out += [f"## `{path}`", cell(summary), "\n".join(["```text", *lines, "```"])]
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


def parameter(param: Any) -> tuple[str, str, str, str]:
    option = param.param_type_name == "option"
    names = [f"`{name}`" for name in [*param.opts, *param.secondary_opts]] if option else [f"`{param.name.upper()}`"]
    flag = option and param.is_flag
    unset = param.default is None or isinstance(param.default, bool) or callable(param.default)
    default = "required" if param.required else "" if unset else f"`{param.default}`"
    return ", ".join(names), "" if flag else value_type(param), default, cell(getattr(param, "help", None) or "")


def value_type(param: Any) -> str:
    """Return the type of an option's value; older typers have click's type, newer ones the annotation."""
    if hasattr(param, "type"):
        return str(param.type.name)
    kind = param.type_descriptor.annotation
    kind = next((a for a in get_args(kind) if a is not type(None)), kind)
    return {Path: "path", str: "text", int: "integer", float: "number"}.get(kind, kind.__name__)


# -- Python -----------------------------------------------------------------------------------------------------------


def api_pages() -> dict[str, str]:
    """Return one page per room, with every name of `__all__` on one of them."""
    pages: dict[str, list[str]] = {}
    for name in hf_lossy_assist.__all__:
        value = getattr(hf_lossy_assist, name)
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
        room = module.removeprefix("hf_lossy_assist.").split(".")[0]
        if room not in ROOMS:
            raise PluginError(f"{name} is in {module}, for which docs/hooks/reference_pages.py has no page")
        names = value.__all__ if isinstance(value, ModuleType) else [value.__qualname__]
        holder = value if isinstance(value, ModuleType) else inspect.getmodule(value)
        for public in names:
            found = getattr(holder, public)
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
    """Escape text for a table's cell, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
