"""Convert the values of `lossy_policy=` to a `LossyPolicy`: objects, names, short forms `top_k:k=4+svip:max_draft=8`, dicts, folders."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from ..artifacts.head import Head
from ..artifacts.json_io import parse_json
from ..registry import NEEDS, Kind, Method, Names, find_entry, find_method, list_entries
from ..registry.discovery import ENTRIES, LOADED, PACKAGE, PLUGINS
from ..validation import listed, nearest, shown
from .policy import LossyPolicy, make_head_policy, run_recipe
from .serialise import PARTS, SAVED, build_parts


# The values of each requirement, for errors.
MAY_BE = {
    "head": "a Head, a folder or org/name",
    "profile": "a Profile, a folder or org/name",
    "companion": "a model, a folder or org/name",
}
FALLBACK = "fallback"  # wraps any stop
_named: dict[str, tuple[Method, LossyPolicy]] = {}  # policies of methods without parts
_NAME = re.compile(r"[A-Za-z_]\w*")
# A plus or comma inside a value is followed by no name (1e+3), or by a name without an equals sign.
_PARTS = re.compile(r"\+(?=[A-Za-z_])")
_PARAMETERS = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")


def as_policy(given: Any, *, head: object = None, profile: object = None, companion: object = None) -> LossyPolicy:
    """Convert a value of `lossy_policy=` to a policy.

    - An object: a `LossyPolicy`, a rule, a stop, a filter or a trained head.
    - A name, of a method or of a rule, stop or filter without required parameters, or the short form `top_k:k=4+svip`.
    - The JSON form: a dict, or its text, for composite parts on the command line.
    - A folder written by `save_pretrained`. A name takes precedence over a folder, which is then written ./strict. A folder names heads
      by sub-folders or Hub repositories only; a dict may name any folder.

    Args:
        head (`Head` or `str`): for a method name that requires one; a string is a folder or a name on the Hub.
        profile (`Profile` or `str`): the same.
        companion (`PreTrainedModel` or `str`): the same.

    Raises: `TypeError` or `ValueError`, one line with the given value and the options.
    """
    parts = zip(NEEDS, (head, profile, companion), strict=True)
    beside: dict[str, object] = {name: value for name, value in parts if value is not None}
    if isinstance(given, str) and (policy := _find_named(given, beside)) is not None:
        return policy
    if beside:
        name = next(iter(beside))
        takers = " or ".join(f'lossy_policy="{m.name}"' for m in list_entries("method") if name in m.parameters)
        raise ValueError(f"{name}=… is for {takers}, not for lossy_policy={shown(given)}: leave it out")
    if isinstance(given, LossyPolicy):
        return given
    for kind, base in PARTS.items():
        if isinstance(given, base):
            part: dict[str, Any] = {kind: given}
            return LossyPolicy(**part)
    if isinstance(given, Head):
        return make_head_policy(given)
    if isinstance(given, Mapping):
        return LossyPolicy.from_dict(given)
    if isinstance(given, str | Path):
        return _parse_text(given)
    if isinstance(given, type):
        raise TypeError(f"lossy_policy: got the class {given.__name__}; pass an object of it, {given.__name__}(…)")
    if any(given is m.make for m in list_entries("method")):
        raise TypeError(f"lossy_policy: got the function {given.__name__}; pass what it returns, {given.__name__}(…)")
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a folder, got {type(given).__name__}"
    )


def _find_named(name: str, beside: Mapping[str, object]) -> LossyPolicy | None:
    """Return the policy of a method of this name; None: there is none. Those of this package without parts are made once."""
    known = None if beside or PLUGINS not in LOADED else _named.get(name)
    if known is not None and known[0] is ENTRIES["method"].get(name):
        return known[1]
    if name not in Names("method"):
        return None
    policy, method = make_named_policy(name, beside), find_method(name)
    if (
        not beside and method.make.__module__.partition(".")[0] == PACKAGE
    ):  # another's recipe may return another policy
        _named[name] = method, policy
    return policy


def make_named_policy(name: str, beside: Mapping[str, object], **settings: object) -> LossyPolicy:
    """Return the policy of a method with the parts that it requires.

    Args:
        beside: "head", "profile", "companion": objects, folders or names on the Hub.
        settings: other parameters of its recipe.

    Raises: `ValueError`, one line, for missing parts and for unknown parameters.
    """
    method = find_method(name, "lossy_policy: ")
    missing = [need for need in method.needs if need not in beside]
    if missing:
        options = " and ".join(f"{need}=… ({MAY_BE[need]})" for need in missing)
        hint = f"; the folder of that name here is ./{name}" if os.path.isdir(name) else ""
        raise ValueError(
            f"lossy_policy: {name} needs {' and '.join(f'a {need}' for need in method.needs)}: pass {options} beside its name, "
            f"on the command line {name}:{','.join(f'{need}=FOLDER' for need in missing)}{hint}"
        )
    for parameter in (*beside, *settings):
        if parameter not in method.parameters and parameter in NEEDS:
            raise ValueError(f"lossy_policy: {name} takes no {parameter}: leave {parameter}=… out")
        if parameter not in method.parameters:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {name!r}', parameter, method.parameters)}")
    return run_recipe(method, **{need: _load_part(need, value) for need, value in beside.items()}, **settings)


def _load_part(need: str, value: object) -> object:
    """Load a head or a profile from a folder or a repository; a companion is loaded on first use."""
    saved = SAVED.get(need)
    if not isinstance(value, str | Path):
        return value
    return str(value) if saved is None else saved.from_pretrained(value)


def _parse_text(given: str | Path) -> LossyPolicy:
    """Parse a name, a short form, JSON or a folder."""
    if isinstance(given, str) and given.lstrip().startswith("{"):
        return LossyPolicy.from_dict(parse_json(given, "lossy_policy: the text", infinite=True))
    if isinstance(given, str) and (is_short_form(given) or any(given in Names(kind) for kind in PARTS)):
        return parse_short_form(given)
    # `os.path` returns False for a name that is too long for a path, where `Path` raises.
    if os.path.isdir(given):
        return LossyPolicy.from_pretrained(given)
    if os.path.isfile(given):
        raise ValueError(f"lossy_policy: {shown(str(given), 300)} is a file: pass its folder, or the dict in it")
    if isinstance(given, Path) or "/" in given:
        text = str(given)
        may_be_on_the_hub = text.count("/") == 1 and text[0] not in "./~" and not text.endswith("/")
        hint = f"; one on the Hub: LossyPolicy.from_pretrained({shown(text)})" if may_be_on_the_hub else ""
        raise ValueError(f"lossy_policy: there is no folder {shown(text, 300)} here{hint}")
    if given.startswith("+"):
        return parse_short_form(given)  # raises an error about the plus
    _refuse_unknown(given)


def _refuse_unknown(name: str) -> NoReturn:
    """Raise an error for an unregistered name, with the nearest match and all names."""
    parts = name.split(",")
    if len(parts) > 1 and all(any(part.strip() in Names(kind) for kind in (*PARTS, "method")) for part in parts):
        raise ValueError(
            f"lossy_policy: expected one policy, got {len(parts)}, {shown(name)}: pass one of them; "
            "a rule and a stop are joined by +, and hf-lossy compare --policies takes several policies"
        )
    groups = {"policies": sorted(Names("method"))} | {f"{kind}s": sorted(Names(kind)) for kind in PARTS}
    known = [n for names in groups.values() for n in names]
    called = name.partition("(")[0]
    if called in known:
        raise ValueError(
            f"lossy_policy: {shown(name)} is no name: parameters are written as {called}:name=value, or in a dict"
        )
    there_are = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f". Did you mean {close[0]!r}?" if close else f"; there are {there_are}"
    raise ValueError(f"lossy_policy: unknown policy {shown(name)}{hint}")


# -- the short form ---------------------------------------------------------------------------------------------------


def is_short_form(text: str) -> bool:
    """Return whether a text begins with the name of a method, rule, stop or filter, followed by `:` or `+`."""
    match = _NAME.match(text)
    if match is None or text[match.end() : match.end() + 1] not in (":", "+"):
        return False
    return any(match[0] in Names(kind) for kind in ("method", *PARTS))


def parse_short_form(text: str) -> LossyPolicy:
    """Parse the short form of a policy: `name[:parameter=value[,…]]`, joined by `+`.

    Each part is a rule, a stop or a filter; the first may be a method (`sprinter:head=folder`), whose parts the others replace;
    `fallback` disables drafting while it does not pay. A value is JSON, or else a string.

    Raises: `ValueError`, one line with the nearest match, for unknown names and parameters and for two parts of one kind.
    """
    specs: dict[Kind, Any] = {}
    base, fallback = LossyPolicy(), None
    for i, (name, parameters) in enumerate(_parse_part(part, text) for part in _PARTS.split(text)):
        kind = next((kind for kind in PARTS if name in Names(kind)), None)
        if name == FALLBACK and "stop" not in parameters:
            if fallback is not None:
                raise ValueError(f"lossy_policy: {shown(text, 200)} names two fallbacks")
            fallback = _check_fallback(parameters)
        elif kind is not None:
            if kind in specs:
                hint = "; any_of and all_of join stops, union joins rules, in a policy's JSON form"
                raise ValueError(
                    f"lossy_policy: {shown(text, 200)} names two {kind}s{hint if kind != 'filter' else ''}"
                )
            specs[kind] = {"name": name, **parameters}
        elif name not in Names("method"):
            _refuse_unknown(name)
        elif i > 0:
            raise ValueError(
                f"lossy_policy: {shown(text, 200)}: the method {name} stands first, parts that replace its own after it"
            )
        else:
            beside: dict[str, object] = {need: parameters.pop(need) for need in NEEDS if need in parameters}
            base = make_named_policy(name, beside, **parameters)
    for seam, spec in specs.items():
        _check_parameters(seam, spec)
    policy = LossyPolicy(**({kind: getattr(base, kind) for kind in PARTS} | build_parts(specs)))
    return policy if fallback is None else policy.with_fallback(**fallback)


def _check_parameters(kind: Kind, spec: dict[str, Any]) -> None:
    """Raise an error for unknown parameters of a part and, with an example, for missing ones."""
    entry = find_entry(kind, spec["name"])
    for name in spec:
        if name != "name" and name not in entry.parameters:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {kind} {entry.name!r}', name, entry.parameters)}")
    missing = [name for name in entry.required if name not in spec]
    if missing:
        values = {name: entry.example.get(name, "…") for name in missing}
        form = json.dumps({kind: spec | values})
        if all(isinstance(value, bool | int | float) for value in values.values()):
            form = f"{entry.name}:{','.join(f'{name}={json.dumps(value)}' for name, value in values.items())}"
        raise ValueError(
            f"lossy_policy: {entry.name} is a {kind} that needs {listed(missing)}: pass lossy_policy='{form}'"
        )


def _check_fallback(settings: dict[str, object]) -> dict[str, object]:
    """Raise an error for unknown settings of the fallback; return the settings."""
    known = [name for name in find_entry("stop", FALLBACK).parameters if name != "stop"]
    for name in settings:
        if name not in known:
            raise ValueError(f"lossy_policy: {nearest(f'parameter of {FALLBACK!r}', name, known)}")
    return settings


def _parse_part(part: str, text: str) -> tuple[str, dict[str, object]]:
    """Parse one part into a name and parameters."""
    name, colon, rest = part.partition(":")
    if not name or name.endswith("+"):
        raise ValueError(
            f"lossy_policy: + joins two parts, as in top_k:k=4+svip, and one is missing in {shown(text, 200)}: leave the + out, or add the part"
        )
    parameters: dict[str, object] = {}
    if not _NAME.fullmatch(name) or (colon and not rest):
        raise ValueError(
            f"lossy_policy: expected name:parameter=value,… in {shown(text, 200)}, got {shown(part, 100)}"
        )
    for setting in _PARAMETERS.split(rest) if rest else ():
        key, equals, value = (word.strip() for word in setting.partition("="))
        if not equals or not _NAME.fullmatch(key) or not value:
            raise ValueError(
                f"lossy_policy: expected {name}:parameter=value,…, got {shown(setting, 100)} in {shown(text, 200)}"
            )
        if key in parameters:
            raise ValueError(f"lossy_policy: {name} is given {key} twice in {shown(text, 200)}")
        parameters[key] = _parse_value(value)
    return name, parameters


def _parse_value(text: str) -> object:
    """Parse JSON, or return the text. Infinity is a number here, as in a policy's JSON form."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def split_policies(text: str) -> list[str]:
    """Split a list such as `svip,top_k:k=4,max=2+svip,strict` into policies: commas before `name=` belong to parameters.

    The list may contain JSON objects. Raises: `ValueError`, one line, for an empty entry.
    """
    policies, depth, begin = [], 0, 0
    for place, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0 and not _PARAMETERS.match(text, place):
            policies.append(text[begin:place].strip())
            begin = place + 1
    policies.append(text[begin:].strip())
    if not all(policies):
        raise ValueError(f"expected names of policies with commas between them, got {shown(text, 200)}")
    return policies


def list_parts(text: str) -> list[tuple[str, set[str]]]:
    """Return the name and the parameter names of each part of a short form."""
    return [(name, set(parameters)) for name, parameters in (_parse_part(part, text) for part in _PARTS.split(text))]


def add_parameter(text: str, name: str, parameter: str, value: object) -> str:
    """Add a parameter to the part `name` of a short form."""
    parts = _PARTS.split(text)
    for i, part in enumerate(parts):
        if part.partition(":")[0] == name:
            parts[i] = f"{part}{',' if ':' in part else ':'}{parameter}={json.dumps(value)}"
    return "+".join(parts)


def strip_paths(text: str) -> str:
    """Replace each existing local path in a policy's text by its last component, before it is published."""
    if text.lstrip().startswith("{"):
        return json.dumps(_strip(_parse_value(text)), ensure_ascii=False)
    if not is_short_form(text):
        return str(_strip(text))
    parts = (part.partition(":") for part in _PARTS.split(text))
    return "+".join(
        name + colon + ",".join(map(_strip_setting, _PARAMETERS.split(rest))) for name, colon, rest in parts
    )


def _strip_setting(setting: str) -> str:
    """Replace the path in `key=folder` by its last component; return any other setting unchanged."""
    key, equals, text = setting.partition("=")
    value = _parse_value(text.strip())
    return f"{key}={_strip(value)}" if equals and isinstance(value, str) else setting


def _strip(value: object) -> object:
    """Replace existing paths in a JSON value by their last components, recursively."""
    if isinstance(value, dict):
        return {key: _strip(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_strip(inner) for inner in value]
    try:
        return Path(value).resolve().name if isinstance(value, str) and Path(value).exists() else value
    except (OSError, ValueError):  # not a valid path
        return value
