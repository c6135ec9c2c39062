"""Commands without models: `policies` and `suggest` list what exists, `report` shows measurements, `push` and `pull` share folders on the Hub."""

import inspect
from itertools import groupby
from pathlib import Path
from textwrap import fill, indent
from typing import Annotated

import typer
from rich.text import Text

from .. import policy
from ..registry import KINDS, PACKAGE, REQUIRED, Entry, list_entries
from ..terminal import console, show, show_json
from ..validation import nearest
from . import _options
from .published import find_published


Token = Annotated[str | None, "access token of the Hub (default: the stored one, or HF_TOKEN)"]
Revision = Annotated[str | None, "branch, tag or commit"]


@_options.command
def policies_command(
    *,
    name: Annotated[str | None, typer.Argument(help="show this one alone, with all that is known of it")] = None,
    kind: Annotated[str | None, f"list only these: {', '.join(KINDS[:-1])} or {KINDS[-1]}"] = None,
    as_json: _options.AsJson = False,
) -> None:
    """List every method, rule, stop, filter and drafter with its guarantee; of one, show all.

    Examples:

      hf-lossy policies

      hf-lossy policies top_k

      hf-lossy policies --kind stop
    """
    if kind is not None and kind not in KINDS:
        raise ValueError(f"--kind: {nearest('kind', kind, KINDS)}")
    entries = [entry for entry in list_entries() if kind in (None, entry.kind)]
    chosen = [entry for entry in entries if name in (None, entry.name)]
    if not chosen:
        raise ValueError(nearest("policy", str(name), {entry.name for entry in entries}))
    if as_json:
        show_json([entry.describe() for entry in chosen], indent=1)
        return
    if name is not None:
        show("\n\n".join(map(_format_entry, chosen)))
        return
    screen = console(highlight=False)
    for group, members in groupby(chosen, key=lambda entry: entry.kind):
        screen.print(Text(f"{group}s", style="bold underline"))
        for entry in members:
            guarantee = entry.condition or entry.guarantee
            screen.print(Text().append(entry.name, style="bold").append(f"  {guarantee}"), overflow="fold")
            screen.print(Text(indent(fill(entry.summary, screen.width - 4), "    ")))
        screen.print()
    show("all of an entry: hf-lossy policies NAME")


@_options.command
def suggest_command(
    model: Annotated[str, typer.Argument(help="the target: a Hub id or a folder of that name")],
    as_json: _options.AsJson = False,
) -> None:
    """Name published drafts for a target, from a table in this package: nothing is downloaded, and which one pays is measured.

    Example:

      hf-lossy suggest Qwen/Qwen2.5-7B-Instruct
    """
    if not model.strip():
        raise ValueError("MODEL: expected a Hub id or a folder, got an empty text")
    drafts = find_published(model)
    if as_json:
        show_json(drafts)
        return
    for draft in drafts:
        show(f"{draft['draft']}: {draft['kind']}\n  {draft['line']}\n  {draft['source']}")
    if drafts:
        show(f"which one pays: hf-lossy compare --model {model}, with the option above and --prompts FILE")
    else:
        show(
            f"no draft for {model} is in the table. Without one: hf-lossy generate --model {model} --drafter suffix; "
            "a drafter of your own: hf-lossy collect --for eagle3"
        )


@_options.command
def push_command(
    path: Annotated[Path, typer.Argument(help="folder of a head, policy, profile, drafter, models or dataset, …")],
    repo_id: Annotated[str, typer.Argument(help="repository on the Hub: org/name")],
    private: Annotated[bool, "--private", "make a new repository private"] = False,
    revision: Revision = None,
    message: Annotated[str | None, "commit message"] = None,
    token: Token = None,
) -> None:
    """Upload a folder to the Hub, after checking that it loads and contains no pickle.

    Example:

      hf-lossy push head org/name --private
    """
    show(policy.sharing.push(path, repo_id, private=private or None, token=token, message=message, revision=revision))


@_options.command
def pull_command(
    repo_id: Annotated[str, typer.Argument(help="org/name, org/name@revision or datasets/org/name")],
    out: Annotated[Path | None, "folder to copy it into; must not exist"] = None,
    revision: Revision = None,
    token: Token = None,
    local_files_only: Annotated[bool, "--local-files-only", "use the local cache and no network"] = False,
    force_download: Annotated[bool, "--force-download", "download again what is in the cache"] = False,
) -> None:
    """Download a head, a policy, models or a dataset from the Hub, check them, and print the folder.

    Examples:

      hf-lossy pull org/name --out head

      hf-lossy pull datasets/org/name --out data
    """
    where = {"local_files_only": local_files_only, "force_download": force_download}
    show(policy.sharing.pull(repo_id, out, revision=revision, token=token, **where))


def _format_entry(entry: Entry) -> str:
    """Format one entry as lines, which fit any width."""
    facts, ladder, module = entry.describe(), entry.ladder, entry.make.__module__
    parameters = (name if value == REQUIRED else f"{name}={value}" for name, value in facts["parameters"].items())
    rows = {
        f"{entry.kind} {entry.name}": entry.summary,
        "guarantee": facts["guarantee"],
        "neutral": facts["neutral"],
        "parameters": ", ".join(parameters) or "none",
        "source": entry.source,
        # A plugin's class is not a name of ours.
        "in Python": f"{'hla' if module.startswith(f'{PACKAGE}.') else module}.{entry.make.__name__}",
        "tune tries": "this setting alone" if ladder is None else f"{ladder[0]} = {', '.join(map(str, ladder[1]))}",
        "in detail": inspect.getdoc(entry.make),
    }
    return "\n".join(f"{what}: {value}" for what, value in rows.items())
