"""JSON schemas that xgrammar enforces; keywords that it would ignore are refused by name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from ..artifacts.files import JSONObject
from ..validation import shown


MOST_CHARACTERS = 1 << 20  # of a grammar's or schema's source
MOST_REPEATS = 128  # in xgrammar's patterns
MOST_LEVELS = 64  # nesting of brackets; xgrammar's parsers are recursive
# Schema keywords that xgrammar accepts but does not enforce.
NOT_HELD = {
    *"not if contains uniqueItems dependentSchemas dependentRequired dependencies unevaluatedItems $dynamicRef $recursiveRef".split()
}
WHOLE = "$ref", "const", "enum", "anyOf", "oneOf", "allOf"  # xgrammar reads one of these and ignores its siblings
NAMED = "properties", "patternProperties", "$defs", "definitions"
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
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_WORD, _YEAR = "[0-9a-fA-F]{1,4}", "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_MONTHS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
_DATE = f"({_YEAR}-({_MONTHS})|{_LEAP}-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9]([.][0-9]+)?(Z|[+-]{_HOURS})"
_SHORTENED = "|".join(f"({_WORD}:){{1,{7 - count}}}(:{_WORD}){{1,{count}}}" for count in range(1, 7))
# Formats that xgrammar enforces loosely, as patterns: it writes 30 February, 12:00:60 and 1.2.3.036.
PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": f"({_BYTE}[.]){{3}}{_BYTE}",
    "ipv6": f"(({_WORD}:){{7}}{_WORD}|({_WORD}:){{1,7}}:|{_SHORTENED}|:((:{_WORD}){{1,7}}|:))",
}
FORMATS = "duration", "uri", "uri-reference", "uri-template", "uuid", *PATTERNS  # all others are loose or ignored
KINDS = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}


# References within a schema, by keywords that are read and checked.
_INSIDE = re.compile(
    rf"#(/({'|'.join(map(re.escape, NAMED))})/[^/]+|/({'|'.join((*TYPED, *WHOLE[3:], 'propertyNames'))})(/[0-9]+)?)*"
)


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out; xgrammar raises it as a RuntimeError."""
    return isinstance(error, MemoryError) or "bad_alloc" in str(error)


def read_schema(source: Mapping[str, object] | str, most: int = MOST_CHARACTERS) -> str:
    """Return a JSON schema as text. Raises: `ValueError`, one line, if it cannot be enforced, or an error of `json`."""
    text = source if isinstance(source, str) else json.dumps(source, allow_nan=False)
    check_size(text, most)
    schema = json.loads(text)
    _check_schema(schema, schema)
    return json.dumps(schema, allow_nan=False)


# xgrammar's rule for the characters of a string with a length.
_RAW = re.compile(r'^(\S+ ::= \(\(\[\^\\"\\\\)\\r\\n(\]\)\))$', re.MULTILINE)


def hold_characters(grammar: object) -> object:
    """Return an `xgrammar.Grammar`, or its source if it lets strings with a length contain raw control characters, which JSON must escape."""
    text, count = _RAW.subn(r"\1\\0-\\x1f\2", str(grammar))
    return text if count else grammar


def check_size(text: str, most: int = MOST_CHARACTERS) -> None:
    """Raise `ValueError` for a grammar or schema that is too long or too deeply nested."""
    if len(text) > most:
        raise ValueError(f"it has {len(text)} characters, and {most} are the most")
    level = 0
    for bracket in re.findall(r"[(\[{)\]}]", text):
        level += 1 if bracket in "([{" else -1
        if level > MOST_LEVELS:
            raise ValueError(f"its brackets are more than {MOST_LEVELS} levels deep")


def _check_schema(schema: object, root: object) -> None:
    """Raise `ValueError` for keywords that xgrammar does not enforce; rewrite lengths and formats as patterns and `oneOf` as `anyOf`, in place."""
    if isinstance(schema, list):
        for item in schema:
            _check_schema(item, root)
    if not isinstance(schema, dict):
        return
    for reason in _not_held(schema):
        raise ValueError(reason)
    if isinstance(branches := schema.get("oneOf"), list) and not _exclude_each_other(branches, root):
        raise ValueError(
            '"oneOf" is held if its branches differ in their type, or in a required constant of objects: use "anyOf"'
        )
    if "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")  # at which xgrammar does not warn
    _rewrite_as_pattern(schema)
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            for branch in value.values():
                _check_schema(branch, root)
        elif key in (*TYPED, *WHOLE, "propertyNames") and key not in ("const", "enum"):
            _check_schema(value, root)


def _rewrite_as_pattern(schema: JSONObject) -> None:
    """Rewrite a string's lengths, or its format, in place."""
    lengths = [schema[key] for key in ("minLength", "maxLength") if key in schema]
    if (
        lengths
        and all(type(length) is int and length <= MOST_REPEATS for length in lengths)
        and lengths == sorted(lengths)
    ):
        # Patterns may contain what JSON escapes, as an escape; xgrammar's strings with a length may not.
        schema["pattern"] = f"^.{{{schema.pop('minLength', 0)},{schema.pop('maxLength', '')}}}$"
    if schema.get("format") in PATTERNS:
        schema["pattern"] = f"^{PATTERNS[schema.pop('format')]}$"


def _exclude_each_other(branches: Sequence[object], root: object) -> bool:
    """Return whether branches differ in their types, and objects in a constant text of a property that all require.

    No value is then of two branches, and xgrammar, which reads `anyOf`, holds `oneOf`.
    """
    schemas = [_resolve(branch, root) for branch in branches]
    objects = [_find_constants(schema, root) for schema in schemas if schema.get("type") == "object"]
    kinds = [kind for schema in schemas if schema.get("type") != "object" for kind in _find_kinds(schema)]
    kinds += ["object"] * bool(objects)
    if len(set(kinds)) < len(kinds):
        return False
    return len(objects) < 2 or any(len({o.get(name) for o in objects} - {None}) == len(objects) for name in objects[0])


def _find_constants(schema: JSONObject, root: object) -> dict[str, str]:
    """Return the texts that an object's required properties are, by name."""
    named, required = schema.get("properties"), schema.get("required")
    if schema.get("type") != "object" or not isinstance(named, dict) or not isinstance(required, list):
        return {}
    constants = {name: _resolve(value, root).get("const") for name, value in named.items() if name in required}
    return {name: constant for name, constant in constants.items() if isinstance(constant, str)}


def _find_kinds(schema: JSONObject) -> set[str]:
    """Return the types of a schema's values; all, if it does not name them. Each integer is a number, too."""
    values, kinds = [schema["const"]] if "const" in schema else schema.get("enum"), schema.get("type")
    if isinstance(values, list):
        kinds = [KINDS[type(value)] for value in values]
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else KINDS.values()
    return {"number" if kind == "integer" else str(kind) for kind in kinds}


def _resolve(schema: object, root: object) -> JSONObject:
    """Return the schema that a chain of references within `root` leads to; an empty one, which any value is of, if to none."""
    for _ in range(MOST_LEVELS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            break
        value = root
        for name in schema["$ref"].removeprefix("#").split("/")[1:]:
            value = value.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(value, dict) else None
        schema = value
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def _not_held(schema: JSONObject) -> Iterator[str]:
    """Yield a reason for each top-level keyword of a schema that is not enforced."""
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    for key, value in schema.items():
        if key in NOT_HELD and value is not False or (key == "allOf" and isinstance(value, list) and len(value) > 1):
            yield f'"{key}" is not held: leave it out'
        if (key in (*WHOLE, "type") and value == []) or (key in SIZES and isinstance(value, int) and value < 0):
            yield f'"{key}" cannot be {shown(value)}'
    if not _INSIDE.fullmatch(str(schema.get("$ref", "#"))):
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


def _not_held_limits(schema: JSONObject, kinds: list[str]) -> Iterator[str]:
    """Yield a reason for each limit of a typed schema that is not enforced."""
    named, required = schema.get("properties", {}), schema.get("required")
    pattern = str(schema.get("pattern", ""))
    if re.search(r"\(\?(<?[=!])|\\[bB]", pattern):
        yield f"the pattern {shown(pattern)} looks around, which is not held: leave it out"
    plain = re.sub(r"\[\^(\\.|[^\]])*\]", ".", pattern)  # never matches what JSON escapes
    if re.search(r'"|\\\\|\\[tnrfv0]|\\x[01]|\\u00[01]', plain):
        yield "a quote, a backslash or a control character of a pattern is not escaped, so that texts would be no JSON: leave it out"
    if schema.get("format", "uuid") not in FORMATS:
        yield f'"format" {shown(schema["format"])} is not held, only {", ".join(FORMATS)}: write a "pattern", or leave it out'
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
