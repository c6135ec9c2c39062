"""Convert the values of `lossy_policy=` to a `LossyPolicy`: objects, names, short forms `top_k:k=4+svip:max_draft=8`, dicts, folders."""

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..artifacts.files import parse_json
from ..artifacts.head import Head
from ..registry import NEEDS, Names, find_entry, find_example, list_entries
from ..stops.constant import Constant
from ..validation import shown
from .json_form import PARTS, build_parts
from .policy import LossyPolicy, make_head_policy, make_method_policy


FALLBACK = "fallback"  # wraps any stop
_NAME = re.compile(r"[A-Za-z_]\w*")
# A plus or comma inside a value is followed by no name (1e+3), or by a name without an equals sign.
_PLUS = re.compile(r"\+(?=[A-Za-z_])")
_COMMA = re.compile(r",(?=\s*[A-Za-z_]\w*\s*=)")


def as_policy(value: Any, *, head: object = None, profile: object = None, companion: object = None) -> LossyPolicy:
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
    pairs = zip(NEEDS, (head, profile, companion), strict=True)
    needs: dict[str, object] = {name: need for name, need in pairs if need is not None}
    if isinstance(value, str) and value in Names("method"):
        return make_method_policy(find_entry("method", value), needs)
    if needs:
        name = next(iter(needs))
        takers = " or ".join(f'lossy_policy="{m.name}"' for m in list_entries("method") if name in m.parameters)
        raise ValueError(f"{name}=… is for {takers}, not for lossy_policy={shown(value)}: leave it out")
    if isinstance(value, LossyPolicy):
        return value
    for kind, base in PARTS.items():
        if isinstance(value, base):
            return LossyPolicy(**build_parts({kind: value}))
    if isinstance(value, Head):
        return make_head_policy(value)
    if isinstance(value, Mapping):
        return LossyPolicy.from_dict(value)
    if isinstance(value, str | Path):
        return _parse_text(value)
    raise TypeError(
        f"lossy_policy: expected a LossyPolicy, a rule, a stop, a name, a dict or a folder, got {shown(value)}"
    )


def _parse_text(value: str | Path) -> LossyPolicy:
    """Parse a short form, JSON or a folder."""
    text = str(value)
    if text.lstrip().startswith("{"):
        return LossyPolicy.from_dict(parse_json(text, "lossy_policy: the text", infinite=True))
    if isinstance(value, str) and (is_short_form(text) or any(text in Names(kind) for kind in PARTS)):
        return parse_short_form(text)
    # `os.path` returns False for a name that is too long for a path, where `Path` raises.
    if os.path.isdir(text):
        return LossyPolicy.from_pretrained(text)
    if os.sep in text:
        raise ValueError(
            f"lossy_policy: there is no folder {shown(text, 300)} here; one on the Hub: LossyPolicy.from_pretrained(…)"
        )
    raise _make_unknown(text)


def _make_unknown(name: str) -> ValueError:
    """Return the error for a text that is no name and no folder."""
    if example := find_example(_PLUS.split(name)[0].partition(":")[0]):
        return ValueError(f"lossy_policy: {example}")
    names = [entry.name for entry in list_entries("method", *PARTS)]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    hint = (
        f"Did you mean {close[0]!r}?"
        if close
        else "hf-lossy policies lists the names; parameters and parts are written as in top_k:k=4+svip"
    )
    return ValueError(f"lossy_policy: unknown policy {shown(name)}. {hint}")


# -- the short form ---------------------------------------------------------------------------------------------------


def is_short_form(text: str) -> bool:
    """Return whether a text begins with the name of a method, rule, stop or filter, followed by `:` or `+`."""
    match = _NAME.match(text)
    if match is None or text[match.end() : match.end() + 1] not in (":", "+"):
        return False
    return any(match[0] in Names(kind) for kind in ("method", *PARTS))


def list_parts(text: str) -> list[tuple[str, dict[str, str]]]:
    """Return the name of each part of a short form, and its parameters as texts. Raises: `ValueError`, one line."""
    items = []
    for item in _PLUS.split(text):
        name, colon, rest = item.partition(":")
        settings = [setting.partition("=") for setting in _COMMA.split(rest)] if colon else []
        parameters = {key.strip(): value.strip() for key, _, value in settings}
        if (
            not all(map(_NAME.fullmatch, (name, *parameters)))
            or not all(parameters.values())
            or len(parameters) < len(settings)
        ):
            form = "name:parameter=value,…, each once, joined by + as in top_k:k=4+svip"
            raise ValueError(f"lossy_policy: expected {form}, got {shown(item, 100)} in {shown(text, 200)}")
        items.append((name, parameters))
    return items


def _format_parts(items: list[tuple[str, dict[str, str]]]) -> str:
    """Return the short form of parts, as `list_parts` reads it."""
    texts = [(name, ",".join(f"{key}={value}" for key, value in parameters.items())) for name, parameters in items]
    return "+".join(f"{name}:{settings}" if settings else name for name, settings in texts)


def parse_short_form(text: str) -> LossyPolicy:
    """Parse the short form of a policy: `name[:parameter=value[,…]]`, joined by `+`.

    Each part is a rule, a stop or a filter; the first may be a method (`sprinter:head=folder`), whose parts the others replace;
    `fallback` disables drafting while it does not pay. A value is JSON, or else a string.

    Raises: `ValueError`, one line with the nearest match, for unknown names and parameters and for two parts of one kind.
    """
    base, specs, taken = LossyPolicy(), {}, set[str | None]()
    for i, (name, settings) in enumerate(list_parts(text)):
        parameters = {key: _parse_value(value) for key, value in settings.items()}
        kind = next((kind for kind in PARTS if name in Names(kind)), None)
        key = FALLBACK if name == FALLBACK and "stop" not in parameters else kind
        if key in taken:
            hint = "any_of and all_of join stops, union joins rules, in a policy's JSON form"
            raise ValueError(f"lossy_policy: {shown(text, 200)} names two {key}s; {hint}")
        taken |= {key} - {None}
        is_method = name in Names("method")
        whole = is_method and key == "filter" and i == 0  # sv's stop drafts as many tokens as its profile has
        if key is not None and not whole:
            specs[key] = {"name": name, **parameters}
        elif not is_method:
            raise _make_unknown(name)
        elif i > 0:
            raise ValueError(
                f"lossy_policy: {shown(text, 200)}: the method {name} stands first, before what replaces its parts"
            )
        else:
            base = make_method_policy(find_entry("method", name), parameters)
    fallback = specs.pop(FALLBACK, None)
    seams: dict[str, Any] = {kind: getattr(base, kind) for kind in PARTS} | specs
    if fallback is not None:
        seams["stop"] = fallback | {"stop": seams["stop"] or Constant()}
    return LossyPolicy(**build_parts(seams))


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
    policies, depth = [""], 0
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if char == "," and depth == 0 and not _COMMA.match(text, i):
            policies.append("")
        else:
            policies[-1] += char
    if not all(map(str.strip, policies)):
        raise ValueError(f"expected names of policies with commas between them, got {shown(text, 200)}")
    return [policy.strip() for policy in policies]


def add_parameter(text: str, name: str, parameter: str, value: object) -> str:
    """Add a parameter to the part `name` of a short form."""
    items = list_parts(text)
    for item, parameters in items:
        if item == name:
            parameters[parameter] = json.dumps(value)
    return _format_parts(items)


def strip_paths(text: str) -> str:
    """Replace each existing local path in a policy's text by its last item, before it is published."""
    if text.lstrip().startswith("{"):
        return re.sub(r'"(?:[^"\\]|\\.)*"', lambda match: json.dumps(_strip(json.loads(match[0]))), text)
    if not is_short_form(text):
        return _strip(text)
    items = list_parts(text)
    for _, parameters in items:
        values = {key: _parse_value(value) for key, value in parameters.items()}
        parameters |= {key: _strip(value) for key, value in values.items() if isinstance(value, str)}
    return _format_parts(items)


def _strip(value: str) -> str:
    """Return the last item of an existing path, and any other text as it is."""
    try:
        return Path(value).resolve().name if Path(value).exists() else value
    except (OSError, ValueError):  # not a valid path
        return value
