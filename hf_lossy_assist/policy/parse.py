"""Convert the values of `lossy_policy=` to a `LossyPolicy`: objects, names, short forms `top_k:k=4+svip:max_draft=8`, dicts, folders."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.head import Head
from ..artifacts.json_io import parse_json
from ..registry import NEEDS, Kind, Method, Names, find_method, list_entries
from ..registry.discovery import ENTRIES, LOADED, PACKAGE, PLUGINS
from ..registry.registry import find_example
from ..validation import shown
from .policy import LossyPolicy, make_head_policy, run_recipe
from .serialise import PARTS, SAVED, build_parts, check_parameters


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
    hint = f"; pass an object of it, {given.__name__}(…)" if isinstance(given, type) else ""
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a folder, got {shown(given)}{hint}"
    )


def _find_named(name: str, beside: Mapping[str, object]) -> LossyPolicy | None:
    """Return the policy of a method of this name; None: there is none. Those of this package without parts are made once."""
    known = None if beside or PLUGINS not in LOADED else _named.get(name)
    if known is not None and known[0] is ENTRIES["method"].get(name):
        return known[1]
    if name not in Names("method"):
        return None
    policy, method = _make_named(name, beside), find_method(name)
    if not beside and method.make.__module__.partition(".")[0] == PACKAGE:
        _named[name] = method, policy  # another's recipe may return another policy
    return policy


def _make_named(name: str, parameters: Mapping[str, object]) -> LossyPolicy:
    """Return the policy of a method. `parameters`: of its recipe; heads and profiles may be folders or names on the Hub.

    A companion is loaded on first use. Raises: `ValueError`, one line, for missing and for unknown parameters.
    """
    method = find_method(name)
    check_parameters(method, parameters)
    loaded = dict(parameters)
    for need, value in parameters.items():
        if need in NEEDS and isinstance(value, str | Path):
            loaded[need] = SAVED[need].from_pretrained(value) if need in SAVED else str(value)
    return run_recipe(method, **loaded)


def _parse_text(given: str | Path) -> LossyPolicy:
    """Parse a short form, JSON or a folder."""
    text = str(given)
    if text.lstrip().startswith("{"):
        return LossyPolicy.from_dict(parse_json(text, "lossy_policy: the text", infinite=True))
    if isinstance(given, str) and (is_short_form(given) or any(given in Names(kind) for kind in PARTS)):
        return parse_short_form(given)
    # `os.path` returns False for a name that is too long for a path, where `Path` raises.
    if os.path.isdir(given):
        return LossyPolicy.from_pretrained(given)
    if text.startswith("+"):
        return parse_short_form(text)  # raises an error about the plus
    raise ValueError(_explain_unknown(text))


def _explain_unknown(name: str) -> str:
    """Return the error for a text that is no name and no folder, with the nearest match or else all names."""
    groups = {"policies": sorted(Names("method"))} | {f"{kind}s": sorted(Names(kind)) for kind in PARTS}
    known = [n for names in groups.values() for n in names]
    if example := find_example(_PARTS.split(name)[0].partition(":")[0]):
        return f"lossy_policy: {example}"
    line = f"lossy_policy: unknown policy {shown(name)}"
    if os.sep in name:
        return (
            f"lossy_policy: there is no folder {shown(name, 300)} here; one on the Hub: LossyPolicy.from_pretrained(…)"
        )
    if _NAME.match(name) and (called := re.split(r"\W", name)[0]) in known:
        return f"{line}: pass one; parameters are written as {called}:name=value, and a rule and a stop joined by +"
    there_are = "; ".join(f"{group}: {', '.join(names)}" for group, names in groups.items())
    close = difflib.get_close_matches(name.lower(), known, n=1)
    return f"{line}. Did you mean {close[0]!r}?" if close else f"{line}; there are {there_are}"


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
        if name == FALLBACK and "stop" not in parameters and fallback is None:
            fallback = parameters
        elif kind is not None:
            if kind in specs or name == FALLBACK:
                hint = "; any_of and all_of join stops, union joins rules, in a policy's JSON form"
                raise ValueError(f"lossy_policy: {shown(text, 200)} names two {kind}s{hint}")
            specs[kind] = {"name": name, **parameters}
        elif name not in Names("method"):
            raise ValueError(_explain_unknown(name))
        elif i > 0:
            raise ValueError(
                f"lossy_policy: {shown(text, 200)}: the method {name} stands first, parts that replace its own after it"
            )
        else:
            base = _make_named(name, parameters)
    policy = LossyPolicy(**({kind: getattr(base, kind) for kind in PARTS} | build_parts(specs)))
    return policy if fallback is None else policy.with_fallback(**fallback)


def _parse_part(part: str, text: str) -> tuple[str, dict[str, object]]:
    """Parse one part into a name and parameters."""
    name, colon, rest = part.partition(":")
    if not _NAME.fullmatch(name) or (colon and not rest):
        form = "name:parameter=value,…, joined by + as in top_k:k=4+svip"
        raise ValueError(f"lossy_policy: expected {form}, got {shown(part, 100)} in {shown(text, 200)}")
    parameters: dict[str, object] = {}
    for setting in _PARAMETERS.split(rest) if rest else ():
        key, equals, value = (word.strip() for word in setting.partition("="))
        if not equals or not _NAME.fullmatch(key) or not value or key in parameters:
            line = f"lossy_policy: expected {name}:parameter=value,…, each once, got {shown(setting, 100)}"
            raise ValueError(f"{line} in {shown(text, 200)}")
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
