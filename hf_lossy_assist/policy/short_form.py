"""Parse the short form of policies, `top_k:k=4+svip:max_draft=8+fallback`: a rule, a stop and a filter by name, with parameters."""

import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..registry import Kind, Names, find_entry, find_method
from ..validation import listed, nearest, shown
from .policy import LossyPolicy, run_recipe
from .serialise import SAVED, build_parts


SEAMS: tuple[Kind, ...] = ("rule", "stop", "filter")


def is_scalar(value: Any) -> bool:
    """Return whether a parameter can stand in the short form of a policy, `top_k:k=4`."""
    return isinstance(value, bool | int | float)


def make_part_policy(name: str, policies: Iterable[str]) -> LossyPolicy:
    """Return a policy with one part, the rule, stop or filter called `name`; `policies`: other known names, for the error.

    Raises: `ValueError`, one line, for a part that needs parameters, with its JSON form, and for an unknown name, with all there are.
    """
    for seam in SEAMS:
        if name not in Names(seam):
            continue
        found = find_entry(seam, name)
        if not found.required:
            return LossyPolicy(**{seam: found.make()})
        values = {what: found.example.get(what, "…") for what in found.required}
        form = json.dumps({seam: {"name": name} | values})
        if all(map(is_scalar, values.values())):
            form = f"{name}:{','.join(f'{what}={json.dumps(value)}' for what, value in values.items())}"
        raise ValueError(
            f"lossy_policy: {name} is a {seam} that needs {' and '.join(found.required)}: pass lossy_policy='{form}'"
        )
    groups = {"policies": sorted(policies)} | {f"{seam}s": sorted(Names(seam)) for seam in SEAMS}
    listed = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    close = difflib.get_close_matches(name.lower(), [n for names in groups.values() for n in names], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"lossy_policy: unknown policy {shown(name)}.{hint} There are {listed}")


FALLBACK = "fallback"  # wraps the stop, whichever it is
_NAME = re.compile(r"[A-Za-z_]\w*")
# A plus or a comma inside a value is followed by no name (1e+3), or by one that nothing is assigned to.
_PARTS = re.compile(r"\+(?=[A-Za-z_])")
_PARAMETERS = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")


def is_short_form(text: str) -> bool:
    """Return whether a text begins with the name of a method, rule, stop or filter, and `:` or `+` follows."""
    found = _NAME.match(text)
    if found is None or text[found.end() : found.end() + 1] not in (":", "+"):
        return False
    return found[0] in Names("method") or any(found[0] in Names(kind) for kind in SEAMS)


def split_policies(text: str) -> list[str]:
    """Split a list such as `svip,top_k:k=4,max=2+svip,strict` into policies: commas before `name=` belong to parameters.

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


def parse_short_form(text: str) -> LossyPolicy:
    """Parse a short form into its policy: `name[:parameter=value[,…]]`, joined by `+`.

    Each part is a rule, a stop or a filter; the first may be a method (`sprinter:head=folder`), whose parts the others replace;
    `fallback` switches the drafting off while it does not pay. A value is JSON, or a text as it stands.

    Raises: `ValueError`, one line with the nearest match, for unknown names and parameters and for two parts of one kind.
    """
    made: dict[str, Any] = {}
    base, fallback = LossyPolicy(), None
    for i, part in enumerate(_PARTS.split(text)):
        name, parameters = _parse_part(part, text)
        kinds = [kind for kind in SEAMS if name in Names(kind)]
        if name == FALLBACK and "stop" not in parameters:
            fallback = _refuse_second(fallback, parameters, "fallback", text)
        elif kinds:
            made[kinds[0]] = _refuse_second(made.get(kinds[0]), {"name": name, **parameters}, kinds[0], text)
        elif name in Names("method") and i == 0:
            base = _make_method_policy(name, parameters)
        elif name in Names("method"):
            raise ValueError(
                f"lossy_policy: {shown(text, 200)}: the method {name} stands first, parts that replace its own behind it"
            )
        else:
            make_part_policy(name, Names("method"))  # says what there is
    for kind, spec in made.items():
        _check_required(kind, spec)  # type: ignore[arg-type]
    parts = {"rule": base.rule, "stop": base.stop, "filter": base.filter} | build_parts(made, None)
    policy = LossyPolicy(**parts)
    return policy if fallback is None else policy.with_fallback(**_check_fallback(fallback))


def list_parts(text: str) -> list[tuple[str, set[str]]]:
    """Return the parts of a short form: each one's name, and the names of the parameters that it is given."""
    return [(name, set(parameters)) for name, parameters in (_parse_part(part, text) for part in _PARTS.split(text))]


def add_parameter(text: str, name: str, parameter: str, value: Any) -> str:
    """Add a parameter to the part `name` of a short form."""
    parts = _PARTS.split(text)
    for i, part in enumerate(parts):
        if _parse_part(part, text)[0] == name:
            parts[i] = f"{part}{',' if ':' in part else ':'}{parameter}={json.dumps(value)}"
    return "+".join(parts)


def strip_paths(text: str) -> str:
    """Replace each path of this machine in a policy's text by its last part, for a text that others see."""
    if text.lstrip().startswith("{"):
        return json.dumps(_strip_spec(_parse_value(text)), ensure_ascii=False)
    if not is_short_form(text):
        return _strip_path(text)
    parts = (part.partition(":") for part in _PARTS.split(text))
    return "+".join(
        name + colon + ",".join(map(_strip_setting, _PARAMETERS.split(rest))) for name, colon, rest in parts
    )


def _strip_setting(setting: str) -> str:
    """Replace the path in `key=folder` by its last part; return any other setting unchanged."""
    key, equals, text = setting.partition("=")
    value = _parse_value(text.strip())
    return f"{key}={_strip_path(value)}" if equals and isinstance(value, str) else setting


def _strip_spec(spec: Any) -> Any:
    """Replace each path in a JSON form by its last part, at any depth."""
    if isinstance(spec, dict):
        return {key: _strip_spec(value) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_strip_spec(value) for value in spec]
    return _strip_path(spec) if isinstance(spec, str) else spec


def _strip_path(text: str) -> str:
    """Return the last part of an existing path; any other text unchanged."""
    try:
        return Path(text).resolve().name if Path(text).exists() else text
    except (OSError, ValueError):  # too long for a path, or no characters of one
        return text


def _parse_part(part: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse one part into its name and its parameters."""
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
        parameters[key] = _parse_value(value.strip())
    return name, parameters


def _parse_value(text: str) -> Any:
    """JSON, or the text itself. Infinity is a number here, as in a policy's JSON form."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _refuse_second(before: Any, now: Any, kind: str, text: str) -> Any:
    if before is not None:
        way_out = (
            "; any_of and all_of join stops, union joins rules, in a policy's JSON form"
            if kind in ("rule", "stop")
            else ""
        )
        raise ValueError(f"lossy_policy: {shown(text, 200)} names two {kind}s{way_out}")
    return now


def _make_method_policy(name: str, parameters: dict[str, Any]) -> LossyPolicy:
    """Make a method's policy, loading heads and profiles that are named by folder or repository."""
    found = find_method(name)
    for parameter in parameters:
        if parameter not in found.parameters:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {name!r}', parameter, found.parameters)}")
    missing = [need for need in found.needs if need not in parameters]
    if missing:
        raise ValueError(f"lossy_policy: {name} needs {' and '.join(missing)}: write {name}:{missing[0]}=FOLDER")
    for key, saved in SAVED.items():
        if isinstance(parameters.get(key), str):
            parameters[key] = saved.from_pretrained(parameters[key])
    return run_recipe(found, **parameters)


def _check_required(kind: Kind, spec: dict[str, Any]) -> None:
    """Refuse a part that lacks a parameter, with the short form that has it."""
    found = find_entry(kind, spec["name"])
    missing = [name for name in found.required if name not in spec]
    if missing and all(is_scalar(found.example.get(name)) for name in missing):
        values = ",".join(f"{name}={json.dumps(found.example[name])}" for name in missing)
        raise ValueError(
            f"lossy_policy: {found.name} is a {kind} that needs {listed(missing)}: write {found.name}:{values}"
        )


def _check_fallback(settings: dict[str, Any]) -> dict[str, Any]:
    """Refuse unknown settings of the fallback; return the settings."""
    known = [name for name in find_entry("stop", FALLBACK).parameters if name != "stop"]
    for name in settings:
        if name not in known:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {FALLBACK!r}', name, known)}")
    return settings
