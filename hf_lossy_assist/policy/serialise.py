"""Convert policies to their JSON form and back: each part by its name in the registry, with its parameters."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..artifacts.head import Head
from ..artifacts.json_io import read_json
from ..artifacts.sv_profile import Profile
from ..filters.base import VerifyFilter
from ..registry import Entry, Kind, find_entry, find_name
from ..rules import AcceptanceRule
from ..stops import DraftStop
from ..validation import listed, nearest, shown


LONGEST = 2**20  # bytes of policy.json
PARTS: dict[Kind, type[AcceptanceRule] | type[DraftStop] | type[VerifyFilter]] = {
    "rule": AcceptanceRule,
    "stop": DraftStop,
    "filter": VerifyFilter,
}
ANY_PART = tuple(PARTS.values())
SAVED: dict[str, type[Head] | type[Profile]] = {
    "head": Head,
    "profile": Profile,
}  # parameters that are saved in folders


def serialise(value: object, kind: Kind, names: Mapping[int, str]) -> object:
    """Convert a part of a policy, or a parameter, to JSON values. `names`: replace the sources of heads and profiles, by `id`.

    Raises: `ValueError`, one line, for a value without a JSON form: a part without a name, a head that was never saved, an object.
    """
    if isinstance(value, ANY_PART):
        name = find_name(kind, type(value))
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
            what = "head" if isinstance(value, Head) else "profile"
            raise ValueError(f"a {what} that was never saved has no JSON form: {what}.save_pretrained(…) first")
        return source
    if value is None or isinstance(value, bool | int | float | str | list | dict):
        return value
    raise ValueError(f"{shown(value)} has no JSON form: pass a number, a text or the name of a folder")


def build_parts(spec: Mapping[Any, object]) -> dict[str, Any]:
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


def check_parameters(entry: Entry, given: Mapping[str, object]) -> None:
    """Refuse unknown parameters of a name and, with an example, missing ones. Raises: `ValueError`, one line."""
    for name in given:
        if name not in entry.parameters:
            what = f"parameter of {entry.kind} {entry.name!r}"
            raise ValueError(f"lossy_policy: {nearest(what, str(name), entry.parameters)}")
    missing = [name for name in entry.required if name not in given]
    if missing:
        values = {name: entry.example.get(name, "FOLDER") for name in missing}
        form = f"{entry.name}:{','.join(f'{name}={value}' for name, value in values.items())}"
        if any(isinstance(value, list | dict) for value in values.values()):
            form = json.dumps({entry.kind: {"name": entry.name, **values}})
        raise ValueError(
            f"lossy_policy: {entry.name} is a {entry.kind} that needs {listed(missing)}: pass lossy_policy='{form}'"
        )


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
    check_parameters(entry, parameters)
    if kind in parameters:  # a composite
        parameters[kind] = _build(kind, parameters[kind])
    if isinstance(parameters.get(f"{kind}s"), list | tuple):
        parameters[f"{kind}s"] = tuple(_build(kind, part) for part in parameters[f"{kind}s"])
    for what, saved in SAVED.items():
        if isinstance(parameters.get(what), str):
            parameters[what] = saved.from_pretrained(parameters[what])
    return entry.make(**parameters)


def read_spec(file: Path) -> dict[str, Any]:
    """Read the JSON form from a file. Raises: `ValueError`, one line, if it holds none."""
    where = f"lossy_policy: the file {shown(str(file), 200)}"
    spec = read_json(file, where, infinite=True, longest=LONGEST)
    if not isinstance(spec, dict):
        raise ValueError(f'{where} holds {shown(spec)}; expected an object such as {{"stop": "svip"}}')
    return spec


def format_spec(spec: Mapping[str, object]) -> str:
    """Format a JSON form as the text of policy.json."""
    return json.dumps(spec, indent=2, ensure_ascii=False) + "\n"  # writes Infinity, which policies may contain
