"""The short form of policies: `top_k:k=4+svip:max_draft=8+fallback`, a rule, a stop and a filter by their names, with parameters."""

import json
import re
from pathlib import Path
from typing import Any

from ..registry import Kind, Names, entry, method
from ..validation import listed, nearest, shown
from .names import SEAMS, by_name, scalar
from .policy import LossyPolicy, made_by
from .serialise import SAVED, parts_in


FALLBACK = "fallback"  # wraps the stop, whichever it is
_NAME = re.compile(r"[A-Za-z_]\w*")
# A plus or a comma inside a value is followed by no name (1e+3), or by one that nothing is assigned to.
_PARTS = re.compile(r"\+(?=[A-Za-z_])")
_PARAMETERS = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")


def is_short_form(text: str) -> bool:
    """Whether a text begins with the name of a method, rule, stop or filter, and `:` or `+` follows."""
    found = _NAME.match(text)
    if found is None or text[found.end() : found.end() + 1] not in (":", "+"):
        return False
    return found[0] in Names("method") or any(found[0] in Names(kind) for kind in SEAMS)


def split_policies(text: str) -> list[str]:
    """The policies of a list such as `svip,top_k:k=4,max=2+svip,strict`: commas in front of `name=` belong to parameters.

    JSON objects may stand in the list as well. Raises: `ValueError`, one line, for an empty entry.
    """
    found, depth, begin = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0 and not re.match(r"\s*[A-Za-z_]\w*\s*=", text[place + 1 :]):
            found.append(text[begin:place].strip())
            begin = place + 1
    found.append(text[begin:].strip())
    if not all(found):
        raise ValueError(f"expected names of policies with commas between them, got {shown(text, 200)}")
    return found


def of_short_form(text: str) -> LossyPolicy:
    """The policy that a short form names: `name[:parameter=value[,…]]`, joined by `+`.

    Each part is a rule, a stop or a filter; the first may be a method (`sprinter:head=folder`), whose parts the others replace;
    `fallback` switches the drafting off while it does not pay. A value is JSON, or a text as it stands.

    Raises: `ValueError`, one line with the nearest match, for unknown names and parameters and for two parts of one kind.
    """
    made: dict[str, Any] = {}
    base, fallback = LossyPolicy(), None
    for i, part in enumerate(_PARTS.split(text)):
        name, parameters = _read(part, text)
        kinds = [kind for kind in SEAMS if name in Names(kind)]
        if name == FALLBACK and "stop" not in parameters:
            fallback = _once(fallback, parameters, "fallback", text)
        elif kinds:
            made[kinds[0]] = _once(made.get(kinds[0]), {"name": name, **parameters}, kinds[0], text)
        elif name in Names("method") and i == 0:
            base = _of_method(name, parameters)
        elif name in Names("method"):
            raise ValueError(
                f"lossy_policy: {shown(text, 200)}: the method {name} stands first, parts that replace its own behind it"
            )
        else:
            by_name(name, Names("method"))  # says what there is
    for kind, spec in made.items():
        _check_required(kind, spec)  # type: ignore[arg-type]
    parts = {"rule": base.rule, "stop": base.stop, "filter": base.filter} | parts_in(made, None)
    policy = LossyPolicy(**parts)
    return policy if fallback is None else policy.with_fallback(**_known(fallback))


def part_names(text: str) -> list[tuple[str, set[str]]]:
    """The parts of a short form: each one's name, and the names of the parameters that it is given."""
    return [(name, set(parameters)) for name, parameters in (_read(part, text) for part in _PARTS.split(text))]


def with_parameter(text: str, name: str, parameter: str, value: Any) -> str:
    """The short form in which the part `name` is also given a parameter."""
    parts = _PARTS.split(text)
    for i, part in enumerate(parts):
        if _read(part, text)[0] == name:
            parts[i] = f"{part}{',' if ':' in part else ':'}{parameter}={json.dumps(value)}"
    return "+".join(parts)


def without_paths(text: str) -> str:
    """A policy as it was asked for, to show to others: of a folder or a file of this machine its own name alone."""
    if text.lstrip().startswith("{"):
        return json.dumps(_by_names(_value(text)), ensure_ascii=False)
    if not is_short_form(text):
        return _own_name(text)
    parts = (part.partition(":") for part in _PARTS.split(text))
    return "+".join(name + colon + ",".join(map(_by_name, _PARAMETERS.split(rest))) for name, colon, rest in parts)


def _by_name(setting: str) -> str:
    """`key=folder` with the folder's own name for its path; any other setting as it is."""
    key, equals, text = setting.partition("=")
    value = _value(text.strip())
    return f"{key}={_own_name(value)}" if equals and isinstance(value, str) else setting


def _by_names(spec: Any) -> Any:
    """A JSON form with their own names for paths, however deep they are in it."""
    if isinstance(spec, dict):
        return {key: _by_names(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_by_names(value) for value in spec]
    return _own_name(spec) if isinstance(spec, str) else spec


def _own_name(text: str) -> str:
    """Of a path its last part; any other text as it is."""
    try:
        return Path(text).resolve().name if Path(text).exists() else text
    except (OSError, ValueError):  # too long for a path, or no characters of one
        return text


def _read(part: str, text: str) -> tuple[str, dict[str, Any]]:
    """One part: its name and its parameters."""
    name, colon, rest = part.partition(":")
    parameters: dict[str, Any] = {}
    if not _NAME.fullmatch(name) or (colon and not rest):
        raise ValueError(
            f"lossy_policy: expected name:parameter=value,… in {shown(text, 200)}, got {shown(part, 100)}"
        )
    for setting in _PARAMETERS.split(rest) if rest else ():
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals or not _NAME.fullmatch(key) or not value.strip():
            raise ValueError(
                f"lossy_policy: expected {name}:parameter=value,…, got {shown(setting, 100)} in {shown(text, 200)}"
            )
        if key in parameters:
            raise ValueError(f"lossy_policy: {name} is given {key} twice in {shown(text, 200)}")
        parameters[key] = _value(value.strip())
    return name, parameters


def _value(text: str) -> Any:
    """JSON, or the text itself. Infinity is a number here, as in a policy's JSON form."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _once(before: Any, now: Any, kind: str, text: str) -> Any:
    if before is not None:
        way_out = (
            "; any_of and all_of join stops, union joins rules, in a policy's JSON form"
            if kind in ("rule", "stop")
            else ""
        )
        raise ValueError(f"lossy_policy: {shown(text, 200)} names two {kind}s{way_out}")
    return now


def _of_method(name: str, parameters: dict[str, Any]) -> LossyPolicy:
    """A method's own policy, whose heads and profiles are named by folder or repository."""
    found = method(name)
    for parameter in parameters:
        if parameter not in found.parameters:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {name!r}', parameter, found.parameters)}")
    missing = [need for need in found.needs if need not in parameters]
    if missing:
        raise ValueError(f"lossy_policy: {name} needs {' and '.join(missing)}: write {name}:{missing[0]}=FOLDER")
    for key, saved in SAVED.items():
        if isinstance(parameters.get(key), str):
            parameters[key] = saved.from_pretrained(parameters[key])
    return made_by(found, **parameters)


def _check_required(kind: Kind, spec: dict[str, Any]) -> None:
    """Say how a part is written that lacks a parameter, in the form in which it was asked for."""
    found = entry(kind, spec["name"])
    missing = [name for name in found.required if name not in spec]
    if missing and all(scalar(found.example.get(name)) for name in missing):
        values = ",".join(f"{name}={json.dumps(found.example[name])}" for name in missing)
        raise ValueError(
            f"lossy_policy: {found.name} is a {kind} that needs {listed(missing)}: write {found.name}:{values}"
        )


def _known(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of the fallback, by their names."""
    known = [name for name in entry("stop", FALLBACK).parameters if name != "stop"]
    for name in settings:
        if name not in known:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {FALLBACK!r}', name, known)}")
    return settings
