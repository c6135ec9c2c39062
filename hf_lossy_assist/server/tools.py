"""Read a request's `tools`, `tool_choice` and `parallel_tool_calls`: the functions that may be called, and a grammar of the calls."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..artifacts.json_io import JSONObject
from ..text.json_schema import read_schema
from ..validation import one_line, shown
from .fields import RequestError, read_flag
from .grammars import GrammarSource
from .tool_calls import CallForm, find_form, make_format


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # of a function, as in OpenAI's API
MOST_TOOLS = 128
MOST_SCHEMA = 2**17  # characters, over all schemas of a request: OpenAI's limit is similar
ANY_OBJECT: dict[str, object] = {"type": "object"}
NO_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}}
KINDS = 'none, auto, required or {"type": "function", "function": {"name": …}}'


@dataclass(frozen=True)
class Tools:
    """The functions that a model is shown.

    Args:
        shown: in the form for chat templates. form: of their calls. names: of those that may be called. source: the grammar of the answer.
    """

    shown: list[JSONObject]
    form: CallForm
    names: tuple[str, ...]
    source: GrammarSource


def read_tools(
    body: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, chat: bool, answer: GrammarSource | None
) -> Tools | None:
    """Return a request's tools; None if it has none, or none may be called, in which case the model is not shown them.

    answer: the schema of a text without calls. Raises: `RequestError`, one line.
    """
    given, several = body.get("tools"), read_flag(body, "parallel_tool_calls")
    functions = [_read_function(tool) for tool in _read_list(given)]
    schemas = {function["name"]: _read_parameters(function) for function in functions}
    if len(schemas) < len(functions):
        raise RequestError("tools: two functions have one name: rename one")
    choice, name = _read_choice(body.get("tool_choice"), schemas)
    if not functions or choice == "none":
        return None
    if not chat:
        raise RequestError("tools: they are of chats: use /v1/chat/completions")
    if body.get("logprobs"):
        raise RequestError("logprobs: they are not given beside tools: leave one out")
    named = schemas if name is None else {name: schemas[name]}
    text = choice == "auto"
    shown_tools = [{"type": "function", "function": function} for function in functions]
    form = _find_form(tokenizer, shown_tools)
    several = several is not False and name is None
    tags = make_format(form, named, text, several, None if answer is None else answer.text)
    if len(tags) > MOST_SCHEMA:
        raise RequestError(f"tools: their schemas have {len(tags)} characters, and {MOST_SCHEMA} are the most")
    return Tools(shown_tools, form, tuple(named), GrammarSource("tools", "tags", tags))


def _read_list(given: object) -> list[object]:
    if given is None:
        return []
    if not isinstance(given, list) or len(given) > MOST_TOOLS:
        raise RequestError(f"tools: expected a list of up to {MOST_TOOLS} tools, got {shown(given)}")
    return given


def _read_function(tool: object) -> JSONObject:
    """Return a tool's function in the form shown to the model."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or set(tool) != {"type", "function"}:
        raise RequestError(f'tools: expected objects with type "function" and function, got {shown(tool)}')
    function = tool["function"]
    known = {"name", "description", "parameters", "strict"}
    if not isinstance(function, dict) or not set(function) <= known:
        raise RequestError(
            f"tools: function: expected an object with {', '.join(sorted(known))}, got {shown(function)}"
        )
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"tools: expected a name of 1 to 64 letters, digits, _ and -, got {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"tools: {name}: expected a text as description, got {shown(description)}")
    read_flag(function, "strict", f"tools: {name}: ")  # arguments always match the schema, even without it
    parameters = function.get("parameters")
    return {
        "name": name,
        "description": description or "",
        "parameters": NO_ARGUMENTS if parameters is None else parameters,
    }


def _read_parameters(function: JSONObject) -> dict[str, object]:
    """Return the schema of a function's arguments, which form an object."""
    name, schema = f"tools: {function['name']}: parameters", function["parameters"]
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise RequestError(f'{name}: expected a JSON schema of type "object", got {shown(schema)}')
    read_json_schema(name, schema)
    return ANY_OBJECT | schema


def _read_choice(given: object, schemas: Mapping[str, object]) -> tuple[str, str | None]:
    """Return none, auto or required, and the name of the function that must be called, if there is one."""
    if given is None:
        return "auto", None
    if isinstance(given, str) and given in ("none", "auto", "required"):
        if given == "required" and not schemas:
            raise RequestError("tool_choice: required needs tools")
        return given, None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if not isinstance(given, dict) or not isinstance(function, dict) or set(given) != {"type", "function"}:
        raise RequestError(f"tool_choice: expected {KINDS}, got {shown(given)}")
    name = function.get("name")
    if not isinstance(name, str) or name not in schemas:
        raise RequestError(f"tool_choice: {shown(name)} is none of the tools")
    return "required", name


def _find_form(tokenizer: PreTrainedTokenizerBase, tools: list[JSONObject]) -> CallForm:
    try:
        return find_form(tokenizer, str(tokenizer.get_chat_template(tools=tools)))
    except ValueError as error:
        raise RequestError(
            f"tools: this model's chat template has none that can be read here: {one_line(error, 200)}"
        ) from None


def read_json_schema(name: str, schema: object) -> str:
    """Return the text of a JSON schema. Raises: `RequestError`, one line, for a schema that texts cannot be constrained to."""
    if not isinstance(schema, dict):
        raise RequestError(f"{name}: expected a JSON schema, got {shown(schema)}")
    try:
        return read_schema(schema, MOST_SCHEMA)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: {one_line(error)}") from None
