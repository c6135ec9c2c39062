"""Read a request's `tools`, `tool_choice` and `parallel_tool_calls`: the functions that may be called, and a grammar of the calls."""

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..artifacts.json_io import JSONObject
from ..text.json_schema import read_schema
from ..validation import one_line, shown
from .bodies import Body, ChatBody, Function
from .fields import RequestError
from .grammars import GrammarSource
from .tool_calls import CallForm, find_form, make_format


MOST_SCHEMA = 2**17  # characters, over all schemas of a request: OpenAI's limit is similar
NO_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}}


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


def read_tools(body: Body, tokenizer: PreTrainedTokenizerBase, answer: GrammarSource | None) -> Tools | None:
    """Return a request's tools; None if it has none, or none may be called, in which case the model is not shown them.

    answer: the schema of a text without calls. Raises: `RequestError`, one line.
    """
    functions = [tool.function for tool in body.tools or ()]
    schemas = {function.name: _read_parameters(function) for function in functions}
    if len(schemas) < len(functions):
        raise RequestError("tools: two functions have one name: rename one")
    choice, name = _read_choice(body, schemas)
    if not functions or choice == "none":
        return None
    if not isinstance(body, ChatBody):
        raise RequestError("tools are only supported by /v1/chat/completions")
    if body.logprobs:
        raise RequestError("logprobs: not supported with tools: leave one out")
    callable_now = schemas if name is None else {name: schemas[name]}
    shown_tools = [_show(function) for function in functions]
    form = _find_form(tokenizer, shown_tools)
    several = body.parallel_tool_calls is not False and name is None
    tags = make_format(form, callable_now, choice == "auto", several, None if answer is None else answer.text)
    if len(tags) > MOST_SCHEMA:
        raise RequestError(f"tools: their schemas have {len(tags)} characters, and {MOST_SCHEMA} are the most")
    return Tools(shown_tools, form, tuple(callable_now), GrammarSource("tools", "tags", tags))


def _show(function: Function) -> JSONObject:
    """Return a function in the form shown to the model."""
    parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
    shown_function = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": shown_function}


def _read_parameters(function: Function) -> dict[str, object]:
    """Return the schema of a function's arguments, which form an object."""
    name, schema = f"tools: {function.name}: parameters", function.parameters or NO_ARGUMENTS
    if schema.get("type", "object") != "object":
        raise RequestError(f'{name}: expected a JSON schema of type "object", got {shown(schema)}')
    read_json_schema(name, schema)
    return {"type": "object"} | schema


def _read_choice(body: Body, names: Collection[str]) -> tuple[str, str | None]:
    """Return none, auto or required, and the name of the function that must be called, if there is one."""
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        if choice == "required" and not names:
            raise RequestError("tool_choice: required needs tools")
        return choice or "auto", None
    if choice.function.name not in names:
        raise RequestError(f"tool_choice: {shown(choice.function.name)} is none of the tools")
    return "required", choice.function.name


def _find_form(tokenizer: PreTrainedTokenizerBase, tools: list[JSONObject]) -> CallForm:
    try:
        return find_form(tokenizer, str(tokenizer.get_chat_template(tools=tools)))
    except ValueError as error:
        raise RequestError(
            f"tools: this model's chat template has none that can be read here: {one_line(error, 200)}"
        ) from None


def read_json_schema(name: str, schema: dict[str, object]) -> str:
    """Return the text of a JSON schema. Raises: `RequestError`, one line, for a schema that texts cannot be constrained to."""
    try:
        return read_schema(schema, MOST_SCHEMA)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: {one_line(error)}") from None
