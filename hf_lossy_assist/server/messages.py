"""Read a chat's messages: the fields of each, and all of them into a text by the tokenizer's chat template."""

import inspect
import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from ..artifacts.json_io import JSONObject
from ..validation import one_line, shown
from .fields import RequestError, RequestLimits, check_text, check_value, find_texts, read_flag, read_tokens


if TYPE_CHECKING:
    from .tools import Tools

Turn = JSONObject  # role and content; and if given a name, tool calls, or the call that a tool message answers
MOST_VARIABLES = 2**16  # characters of a chat template's variables
MOST_RENDERED = 2**24  # of these, if the template writes them with each message
NONE: Mapping[str, object] = MappingProxyType({})

OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}  # fields of these roles only
NO_ARGUMENTS = {
    "messages",
    *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
}  # of a template


def read_messages(
    body: dict[str, object], tokenizer: PreTrainedTokenizerBase, limits: RequestLimits, tools: "Tools | None" = None
) -> list[int]:
    """Return the token ids of a chat with `tools`, up to the beginning of its answer. Raises: `RequestError`, one line."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of messages, got {shown(messages)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("messages: this model's tokenizer has no chat template: use /v1/completions")
    turns = [read_turn(message) for message in messages]
    _check_answered(turns)
    check_text("messages", "".join(find_texts("messages", messages)), limits)
    shown_tools = None if tools is None else tools.shown
    if shown_tools is not None:
        check_text("tools", "".join(find_texts("tools", shown_tools)), limits)
    arguments = _read_arguments(body, tokenizer, len(turns))
    text = render_chat(turns, tokenizer, read_end(body, turns), arguments, shown_tools)
    ids = read_tokens("messages", text, tokenizer, limits, add_special_tokens=False)
    if not ids:
        raise RequestError("messages: the chat template makes nothing of them, and there is nothing to continue")
    return ids


def read_end(body: dict[str, object], turns: list[Turn]) -> dict[str, bool]:
    """Return how the chat ends, by argument names of Transformers and vLLM; if neither is given, an assistant's message is continued."""
    goes_on, begins = read_flag(body, "continue_final_message"), read_flag(body, "add_generation_prompt")
    if goes_on and begins:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other: leave one out")
    if goes_on is None:
        goes_on = begins is None and turns[-1]["role"] == "assistant"
    return {"continue_final_message": goes_on, "add_generation_prompt": not goes_on if begins is None else begins}


def _read_arguments(body: dict[str, object], tokenizer: PreTrainedTokenizerBase, turns: int) -> JSONObject:
    """Return the arguments for the chat template other than the messages, which may write them in each of so many `turns`."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise RequestError(f"chat_template_kwargs: expected an object, got {shown(given)}")
    for name in given:
        if name in NO_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", _find_template(tokenizer)):
            raise RequestError(f"chat_template_kwargs: {shown(name)} is no variable of this model's chat template")
    count = len(json.dumps(given))
    if count > MOST_VARIABLES or count * turns > MOST_RENDERED:
        raise RequestError(
            f"chat_template_kwargs: {count} characters in {turns} messages are more than {MOST_VARIABLES}, or than "
            f"{MOST_RENDERED} over all messages: shorten them"
        )
    return given


def _check_answered(turns: list[Turn]) -> None:
    """Refuse a tool message whose call does not occur in an earlier message. Raises: `RequestError`, one line."""
    known = set[str]()
    for turn in turns:
        known |= {call["id"] for call in turn.get("tool_calls", [])}
        if turn.get("tool_call_id") is not None and turn["tool_call_id"] not in known:
            raise RequestError(f"messages: no message before has a call of id {shown(turn['tool_call_id'])}")


def read_turn(message: object) -> Turn:
    """Return a message's role and text, and its other fields for the template. Raises: `RequestError`, one line."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages: expected objects with role and content, got {shown(message)}")
    read = ("role", "content", "name", *OF_ROLE.get(message["role"], ()))
    unread = [name for name, value in message.items() if name not in read and value not in (None, [])]
    if unread:
        raise RequestError(f"messages: {shown(unread[0])} of a message is not read here: leave it out")
    calls = message.get("tool_calls") or []
    content = "" if calls and message.get("content") is None else message.get("content")
    turn: Turn = {"role": message["role"], "content": read_text("messages", content)}
    if calls:
        if not isinstance(calls, list):
            raise RequestError(f"messages: expected a list as tool_calls, got {shown(calls)}")
        turn["tool_calls"] = [_read_call(call) for call in calls]
    if turn["role"] == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise RequestError(f"messages: expected a text as tool_call_id, got {shown(message.get('tool_call_id'))}")
        turn["tool_call_id"] = message["tool_call_id"]
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise RequestError(f"messages: expected a text as name, got {shown(message['name'])}")
        turn["name"] = message["name"]
    return turn


def _read_call(call: object) -> JSONObject:
    """Return a tool call in the form that templates expect: with an object as arguments, where OpenAI has its JSON text."""
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise RequestError(f"messages: tool_calls: expected objects with id and function, got {shown(call)}")
    try:
        given = function.get("arguments")
        arguments = json.loads(given) if isinstance(given, str) else None
        check_value("messages: tool_calls: arguments", arguments)
    except RequestError:
        raise
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(function.get("name"), str) or not isinstance(arguments, dict):
        raise RequestError(
            f"messages: tool_calls: expected a name, and a JSON object's text as arguments, got {shown(function)}"
        )
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_text(name: str, content: object) -> str:
    """Return a text, which may consist of parts. Raises: `RequestError`, one line."""
    if isinstance(content, list):
        if not all(_is_text_part(part) for part in content):
            raise RequestError(f"{name}: this server reads text alone, and there is a part that is none")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"{name}: expected a text as content, got {shown(content)}")
    return content


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def render_chat(
    turns: list[Turn],
    tokenizer: PreTrainedTokenizerBase,
    end: Mapping[str, bool],
    arguments: Mapping[str, object] = NONE,
    tools: list[JSONObject] | None = None,
) -> str:
    """Render a conversation up to its answer; `end`, `arguments`, `tools`: arguments of `apply_chat_template`.

    A developer's turn is passed as the system's if the chat template does not know that role.

    Raises: `RequestError`, one line, if the template refuses the turns or omits one.
    """
    known, given = _replace_developer(turns, tokenizer, tools), {**arguments, **end}
    text = _apply_template(known, tokenizer, given | {"tools": tools})
    # A template may omit roles that it does not know, so each text is marked, and its mark must appear in the result.
    marks = [f" turn{place}end" for place in range(len(turns))]
    marked = [_mark_turn(turn, mark) for turn, mark in zip(known, marks, strict=True)]
    tool_marks = [f"tool{place}end" for place in range(len(tools or []))]
    marked_tools = None if tools is None else [_mark(tool, mark) for tool, mark in zip(tools, tool_marks, strict=True)]
    rendered = _apply_template(marked, tokenizer, given | {"tools": marked_tools})
    if any(mark not in rendered for mark in tool_marks):
        raise RequestError("tools: the chat template does not show them all to the model")
    # All marks are searched at once: a client must not hold the server up with many messages.
    shown_turns, shown_calls = (
        set(re.findall(r"turn\d+end", rendered)),
        set(re.findall(r"call\d+turn\d+end", rendered)),
    )
    for turn, mark in zip(turns, marks, strict=True):
        if turn["content"].strip() and mark.strip() not in shown_turns:
            raise RequestError(
                f"messages: the chat template leaves out a message of role {shown(turn['role'])}: give its text to another role"
            )
        if any(f"call{k}{mark.strip()}" not in shown_calls for k in range(len(turn.get("tool_calls", [])))):
            raise RequestError("messages: the chat template leaves out a call of a tool: give its text to a message")
    return text


def _mark_turn(turn: Turn, mark: str) -> Turn:
    """Return a turn with marks in its text and its calls."""
    marked = turn | {"content": turn["content"] + mark}
    if "tool_calls" in turn:
        marked["tool_calls"] = [_mark(call, f"call{k}{mark.strip()}") for k, call in enumerate(turn["tool_calls"])]
    return marked


def _mark(tool: JSONObject, mark: str) -> JSONObject:
    """Return a tool, or a tool call, with a mark in the function's name."""
    return tool | {"function": tool["function"] | {"name": tool["function"]["name"] + mark}}


def _replace_developer(
    turns: list[Turn], tokenizer: PreTrainedTokenizerBase, tools: list[JSONObject] | None
) -> list[Turn]:
    if not any(turn["role"] == "developer" for turn in turns):
        return turns
    if re.search(r"""["']developer["']""", _find_template(tokenizer, tools)):
        return turns
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


def _find_template(tokenizer: PreTrainedTokenizerBase, tools: list[JSONObject] | None = None) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:  # several templates and no default, or none at all
        raise RequestError(f"messages: {one_line(str(error), 200)}") from None


def _apply_template(turns: list[Turn], tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
    except Exception as error:  # templates raise errors of any type
        raise RequestError(f"messages: the chat template refuses them: {one_line(str(error), 200)}") from None
    return text
