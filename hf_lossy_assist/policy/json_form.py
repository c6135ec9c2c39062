"""Convert policies to their JSON form and back, and load what a policy's folder names.

A folder is untrusted: it refers to its sub-folders and to repositories on the Hub, and to nothing else on this disk.
"""

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..artifacts.files import JSONObject, read_json
from ..artifacts.head import Head
from ..artifacts.sv_profile import Profile
from ..filters.base import VerifyFilter
from ..registry import Entry, Kind, find_entry, list_entries
from ..rules import AcceptanceRule
from ..stops import DraftStop
from ..validation import nearest, shown


PARTS: dict[Kind, type[AcceptanceRule] | type[DraftStop] | type[VerifyFilter]] = {
    "rule": AcceptanceRule,
    "stop": DraftStop,
    "filter": VerifyFilter,
}
ANY_PART = tuple(PARTS.values())
SAVED: dict[str, type[Head] | type[Profile]] = {"head": Head, "profile": Profile}  # parameters saved in folders
SUBFOLDER = re.compile(r"\w[\w.-]{,99}")  # a single folder, beside policy.json
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?")


def serialise(value: object, kind: Kind, names: Mapping[int, str]) -> object:
    """Convert a part of a policy, or a parameter, to JSON values. `names`: replace the sources of heads and profiles, by `id`.

    Raises: `ValueError`, one line, for a value without a JSON form: a part without a name, a head that was never saved, an object.
    """
    if isinstance(value, ANY_PART):
        name = next((entry.name for entry in list_entries(kind) if entry.make is type(value)), None)
        if name is None:
            raise ValueError(
                f"{type(value).__name__} has no name: register_{kind}(…) gives it one, and a JSON form with it"
            )
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"name": name} | {parameter: serialise(v, kind, names) for parameter, v in fields.items()}
    if isinstance(value, tuple):
        return [serialise(v, kind, names) for v in value]
    if isinstance(value, PreTrainedModel):
        return value.config.name_or_path
    if isinstance(value, Head | Profile):
        source = names.get(id(value), value.source)
        if source is None:
            raise ValueError(
                f"a {value.kind} that was never saved has no JSON form: {value.kind}.save_pretrained(…) first"
            )
        return source
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    raise ValueError(f"{shown(value)} has no JSON form: pass a number, a text or the name of a folder")


def build_parts(spec: Mapping[str, object]) -> JSONObject:
    """Build the parts of a policy from its JSON form.

    Raises: `ValueError`, one line with the nearest match, for unknown entries, names and parameters.
    """
    for key in spec:
        if key not in PARTS:
            raise ValueError(f"lossy_policy: {nearest('entry', str(key), PARTS)}")
    try:
        return {kind: _build(kind, spec[kind]) for kind in PARTS if spec.get(kind) is not None}
    except RecursionError:
        raise ValueError("lossy_policy: rules or stops inside one another without end") from None


def _build(kind: Kind, spec: object) -> Any:
    if isinstance(spec, PARTS[kind]):
        return spec
    parameters = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("name"), str):
        raise ValueError(f'lossy_policy: {kind}: expected a name or {{"name": …}}, got {shown(spec)}')
    parameters = dict(parameters)
    entry = find_entry(kind, parameters.pop("name"), "lossy_policy: ")
    # Earlier versions wrote null for options that are no more.
    parameters = {key: value for key, value in parameters.items() if value is not None or key in entry.parameters}
    if kind in parameters:  # a composite
        parameters[kind] = _build(kind, parameters[kind])
    if isinstance(parameters.get(f"{kind}s"), list | tuple):
        parameters[f"{kind}s"] = tuple(_build(kind, item) for item in parameters[f"{kind}s"])
    return make_entry(entry, parameters)


def make_entry(entry: Entry, parameters: Mapping[str, object]) -> Any:
    """Make a part or a method's policy; heads and profiles may be folders or names on the Hub.

    Raises: `ValueError`, one line, for missing and for unknown parameters.
    """
    try:
        entry.signature.bind(**parameters)
    except TypeError as error:
        takes = ", ".join(entry.parameters) or "no parameters"
        raise ValueError(f"lossy_policy: the {entry.kind} {entry.name} takes {takes}: {error}") from None
    loaded = dict(parameters)
    for name, kind in SAVED.items():
        if isinstance(value := loaded.get(name), str | Path):
            loaded[name] = kind.from_pretrained(value)
    return entry.make(**loaded)


def read_spec(file: Path) -> JSONObject:
    """Read the JSON form from a file. Raises: `ValueError`, one line, if it holds none."""
    where = f"lossy_policy: the file {shown(str(file), 200)}"
    spec = read_json(file, where, infinite=True)
    if not isinstance(spec, dict):
        raise ValueError(f'{where} holds {shown(spec)}; expected an object such as {{"stop": "svip"}}')
    return spec


def format_spec(spec: Mapping[str, object]) -> str:
    """Format a JSON form as the text of policy.json."""
    return json.dumps(spec, indent=2, ensure_ascii=False) + "\n"  # writes Infinity, which policies may contain


# -- references in a policy's folder ----------------------------------------------------------------------------------


def walk_objects(spec: object) -> Iterator[dict[str, object]]:
    """Yield every object in a policy's JSON form."""
    if isinstance(spec, dict):
        yield spec
    for value in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from walk_objects(value)


def load_references(spec: object, folder: Path, *, companion: object = None, **kwargs: Any) -> None:
    """Replace the names of heads and profiles in the JSON form of a policy in `folder` by the loaded objects.

    `companion`: replaces every companion that the policy names; chosen by the caller, so it may be anything. `kwargs`: see `hub.download`.
    """
    if companion is not None and not any("companion" in item for item in walk_objects(spec)):
        raise ValueError("this policy has no companion: leave companion=… out")
    kwargs.pop("revision", None)  # the policy's
    for item in walk_objects(spec):
        for key, kind in SAVED.items():
            if isinstance(name := item.get(key), str) and SUBFOLDER.fullmatch(name):
                _refuse_links(folder / name)
                item[key] = kind.read(folder / name)
            elif isinstance(name, str):
                _check_on_the_hub(key, name)
                item[key] = kind.from_pretrained(name, **kwargs)
        if "companion" in item and companion is not None:
            item["companion"] = companion
    if companion is None:
        check_shareable(spec)


def check_shareable(spec: object) -> None:
    """Refuse a policy that, on the Hub, would refer to a path on this disk."""
    for item in walk_objects(spec):
        if isinstance(name := item.get("companion"), str):
            _check_on_the_hub("companion", name)


def _refuse_links(subfolder: Path) -> None:
    """Refuse a sub-folder that is a link, or that contains a linked file: either would lead elsewhere on this disk.

    Files in the Hub's cache are links to the blobs beside its snapshots, created by the client.
    """
    snapshot = subfolder.parent.resolve()
    blobs = snapshot.parent.parent / "blobs" if snapshot.parent.name == "snapshots" else None
    for path in (subfolder, *subfolder.glob("*")):
        if path.is_symlink() and (path == subfolder or path.resolve().parent != blobs):
            raise ValueError(f"{path} is a link to another place: put a copy in its place")


def _check_on_the_hub(key: str, name: str) -> None:
    if not HUB_ID.fullmatch(name):
        subfolder = "" if key == "companion" else "one of its own sub-folders or "
        raise ValueError(
            f"a policy's folder names as its {key} {subfolder}a repository on the Hub (org/name), not {shown(name)}: pass a companion on "
            "this disk yourself, from_pretrained(…, companion=…)"
        )
    if os.path.exists(name):
        raise ValueError(
            f"this policy names its {key} {shown(name)} on the Hub, and a folder here has that name too, which would be taken "
            "instead: rename that, or run in another folder"
        )
