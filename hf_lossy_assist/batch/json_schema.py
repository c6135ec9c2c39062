"""JSON schemas that xgrammar enforces; keywords that it would ignore are refused by name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..validation import shown


MOST_CHARACTERS = 1 << 20  # of a grammar's or schema's source
MOST_REPEATS = 128  # in xgrammar's patterns
MOST_LEVELS = 64  # nesting of brackets; xgrammar's parsers are recursive
# Schema keywords that xgrammar accepts but does not enforce.
NOT_HELD = {
    *"not if contains uniqueItems dependentSchemas dependentRequired dependencies unevaluatedItems $dynamicRef $recursiveRef".split()
}
WHOLE = "$ref", "const", "enum", "anyOf", "oneOf", "allOf"  # xgrammar reads one of these and ignores its siblings
BY_NAME = "properties", "patternProperties", "$defs", "definitions"
TYPED = (
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "items",
    "prefixItems",
)  # xgrammar infers the type from these
SIZES = "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"
RANGE = "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"
UNTYPED = *SIZES, *RANGE, "multipleOf", "pattern", "format", "required", "propertyNames"  # but not from these
KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


def read_schema(source: Mapping[str, object] | str, most: int = MOST_CHARACTERS) -> str:
    """Return a JSON schema as text. Raises: `ValueError`, one line, if it cannot be enforced, or an error of `json`."""
    text = source if isinstance(source, str) else json.dumps(source, allow_nan=False)
    check_size(text, most)
    schema = json.loads(text)
    _check_schema(schema)
    return json.dumps(schema, allow_nan=False)


def check_size(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raise `ValueError` for a grammar or schema that is too long or too deeply nested."""
    if len(text) > most:
        raise ValueError(f"it has {len(text)} characters, and {most} are the most")
    level = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        level += 1 if bracket in "([{" else -1
        if level > MOST_LEVELS:
            raise ValueError(f"its brackets are more than {MOST_LEVELS} levels deep")


def _check_schema(schema: object) -> None:
    """Raise `ValueError` for keywords that xgrammar does not enforce; rewrite string lengths as patterns, in place."""
    if isinstance(schema, list):
        for each in schema:
            _check_schema(each)
    if not isinstance(schema, dict):
        return
    for reason in _not_held(schema):
        raise ValueError(reason)
    lengths = [schema[key] for key in ("minLength", "maxLength") if key in schema]
    if (
        lengths
        and all(type(length) is int and length <= MOST_REPEATS for length in lengths)
        and lengths == sorted(lengths)
    ):
        # xgrammar's strings with a length may contain raw control characters, which JSON must escape; its patterns may not.
        schema["pattern"] = f"^.{{{schema.pop('minLength', 0)},{schema.pop('maxLength', '')}}}$"
    for key, value in schema.items():
        if key in BY_NAME and isinstance(value, dict):
            for each in value.values():
                _check_schema(each)
        elif key in (*TYPED, *WHOLE, "propertyNames") and key not in ("const", "enum"):
            _check_schema(value)


def _not_held(schema: dict[str, Any]) -> Iterator[str]:
    """Yield a reason for each top-level keyword of a schema that is not enforced."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    for key, value in schema.items():
        if key in NOT_HELD and value is not False or (key == "allOf" and isinstance(value, list) and len(value) > 1):
            yield f'"{key}" is not held: leave it out'
        if (key in (*WHOLE, "type") and value == []) or (key in SIZES and isinstance(value, int) and value < 0):
            yield f'"{key}" cannot be {shown(value)}'
    if not re.match(r"#(/|\Z)", str(schema.get("$ref", "#"))):
        yield f'"$ref" is held within the schema alone, as "#/$defs/…": got {shown(schema["$ref"])}'
    for whole in (key for key in WHOLE if key in schema):
        values = {"const": [schema.get("const")], "enum": schema.get("enum")}.get(whole)
        for key in (key for key in ("type", *WHOLE, *TYPED, *UNTYPED) if key in schema and key != whole):
            if key != "type" or not isinstance(values, list) or not all(_is_of(value, kinds) for value in values):
                yield f'"{key}" beside "{whole}" is not held: leave one of them out'
        return
    if not kinds and not any(key in schema for key in TYPED):
        yield from (f'"{key}" without "type" is not held: say the type' for key in UNTYPED if key in schema)
    yield from _not_held_limits(schema, kinds)


def _not_held_limits(schema: dict[str, Any], kinds: list[str]) -> Iterator[str]:
    """Yield a reason for each limit of a typed schema that is not enforced."""
    named, required = schema.get("properties", {}), schema.get("required")
    pattern = str(schema.get("pattern", ""))
    if re.search(r"\(\?(<?[=!])|\\[bB]", pattern):
        yield f"the pattern {shown(pattern)} looks around, which is not held: leave it out"
    plain = re.sub(r"\[\^(\\.|[^\]])*\]", ".", pattern)  # never matches what JSON escapes
    if re.search(r'"|\\\\|\\[tnrfv0]|\\x[01]|\\u00[01]', plain) or "json-pointer" in str(schema.get("format")):
        yield "a quote, a backslash or a control character of a pattern is not escaped, so that texts would be no JSON: leave it out"
    ways = [key for key in ("pattern", "format", "minLength", "maxLength") if key in schema]
    if len(ways) > 1 and ways != ["minLength", "maxLength"]:
        yield f'"{ways[1]}" beside "{ways[0]}" is not held: leave one of them out'
    if "multipleOf" in schema and (kinds != ["integer"] or any(key in schema for key in RANGE)):
        yield '"multipleOf" is held for an integer without a range alone: leave it out'
    for name in required if isinstance(required, list) and isinstance(named, dict) else ():
        if name not in named:
            yield f'"required" names {shown(name)}, which "properties" do not: say what it is'


def _is_of(value: object, kinds: Sequence[str]) -> bool:
    kind = KINDS.get(type(value), "")
    return kind in kinds or (kind == "integer" and "number" in kinds)
