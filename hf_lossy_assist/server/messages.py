"""Read a chat's messages: the fields of each, and all of them into a text by the tokenizer's chat template."""

import inspect
import json
import re
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from ..artifacts.files import JSONObject
from ..validation import one_line, shown
from .bodies import ChatBody, Message, RequestError, RequestLimits, TextPart, read_tokens


Turn = JSONObject  # role and content; and if given a name, tool calls, or the call that a tool message answers
MOST_VARIABLES = 2**20  # characters of a chat template's variables, if the template writes them with each message
ROLES = {"tool_calls": "assistant", "tool_call_id": "tool"}  # of messages that may have this field
# Arguments of `apply_chat_template`, which are no variables of a template.
RESERVED = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}


def read_messages(
    body: ChatBody, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits, tools: list[JSONObject] | None = None
) -> list[int]:
    """Return the token ids of a chat with `tools`, as templates take them, up to the beginning of its answer. Raises: `RequestError`, one line."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("messages: this model's tokenizer has no chat template: use /v1/completions")
    turns = [make_turn(message) for message in body.messages]
    variables = body.chat_template_kwargs if isinstance(body.chat_template_kwargs, dict) else {}
    for name in variables:
        if name in RESERVED or not re.search(rf"\b{re.escape(name)}\b", _find_template(tokenizer)):
            raise RequestError(f"chat_template_kwargs: {shown(name)} is no variable of this model's chat template")
    if (count := len(json.dumps(variables)) * len(turns)) > MOST_VARIABLES:
        raise RequestError(
            f"chat_template_kwargs: {count} characters in {len(turns)} messages are more than {MOST_VARIABLES}: shorten them"
        )
    text = render_chat(turns, tokenizer, variables | read_end(body), tools)
    ids = read_tokens("messages", text, tokenizer, limits, add_special_tokens=False)
    if not ids:
        raise RequestError("messages: the chat template makes nothing of them, and there is nothing to continue")
    return ids


def read_end(body: ChatBody) -> dict[str, bool]:
    """Return how the chat ends, by argument names of Transformers and vLLM; if neither is given, an assistant's message is continued."""
    goes_on, begins = body.continue_final_message, body.add_generation_prompt
    if goes_on and begins:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other: leave one out")
    if goes_on is None:
        goes_on = begins is None and body.messages[-1].role == "assistant"
    return {"continue_final_message": goes_on, "add_generation_prompt": not goes_on if begins is None else begins}


def make_turn(message: Message) -> Turn:
    """Return a message's role and text, and its other fields for the template. Raises: `RequestError`, one line."""
    fields = {name: getattr(message, name) for name in ROLES} | (message.model_extra or {})
    for name, value in fields.items():
        if value not in (None, []) and ROLES.get(name) != message.role:
            raise RequestError(f"messages: {shown(name)} of a message of this role is not supported: leave it out")
    if message.role == "tool" and message.tool_call_id is None:
        raise RequestError("messages: a tool's message needs the tool_call_id that it answers")
    if message.content is None and not message.tool_calls:
        raise RequestError("messages: expected a text as content, got None")
    turn = message.model_dump(include={"role", "name", *ROLES}, exclude_none=True)
    return {name: value for name, value in turn.items() if value != []} | {"content": join_text(message.content or "")}


def join_text(content: str | Sequence[TextPart]) -> str:
    """Return a text, which may consist of parts."""
    return content if isinstance(content, str) else "".join(piece.text for piece in content)


def render_chat(
    turns: list[Turn],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, object],
    tools: list[JSONObject] | None = None,
) -> str:
    """Render a conversation up to its answer; `arguments`, `tools`: those of `apply_chat_template`.

    A developer's turn is passed as the system's if the chat template does not know that role.

    Raises: `RequestError`, one line, if the template refuses the turns or omits one.
    """
    passed, has_developer = turns, any(turn["role"] == "developer" for turn in turns)
    if has_developer and not re.search(r"""["']developer["']""", _find_template(tokenizer, tools)):
        passed = [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]
    text = _apply_template(passed, tokenizer, arguments, tools)
    # A template may omit what it does not know, so each text and each function is marked, and the marks must appear in the result.
    marked = [_mark_turn(turn, f"turn{n}end") for n, turn in enumerate(passed)]
    marked_tools = None if tools is None else [_mark(tool, f"tool{n}end") for n, tool in enumerate(tools)]
    rendered = _apply_template(marked, tokenizer, arguments, marked_tools)
    # All marks are searched at once: a client must not hold the server up with many messages.
    marks = set(re.findall(r"(?:tool|turn|call\d+turn)\d+end", rendered))
    if any(f"tool{n}end" not in marks for n in range(len(tools or ()))):
        raise RequestError("tools: the chat template does not show them all to the model")
    for n, turn in enumerate(turns):
        if turn["content"].strip() and f"turn{n}end" not in marks:
            raise RequestError(
                f"messages: the chat template leaves out a message of role {shown(turn['role'])}: give its text to another role"
            )
        if any(f"call{k}turn{n}end" not in marks for k in range(len(turn.get("tool_calls", ())))):
            raise RequestError("messages: the chat template leaves out a call of a tool: give its text to a message")
    return text


def _mark_turn(turn: Turn, mark: str) -> Turn:
    """Return a turn with marks in its text and its calls."""
    calls = [_mark(call, f"call{k}{mark}") for k, call in enumerate(turn.get("tool_calls", ()))]
    return turn | {"content": f"{turn['content']} {mark}"} | ({"tool_calls": calls} if calls else {})


def _mark(tool: JSONObject, mark: str) -> JSONObject:
    """Return a tool, or a tool call, with a mark in the function's name."""
    return tool | {"function": tool["function"] | {"name": tool["function"]["name"] + mark}}


def _find_template(tokenizer: PreTrainedTokenizerBase, tools: list[JSONObject] | None = None) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError as error:  # several templates and no default, or none at all
        raise RequestError(f"messages: {one_line(str(error), 200)}") from None


def _apply_template(
    turns: list[Turn],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Mapping[str, object],
    tools: list[JSONObject] | None,
) -> str:
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, tools=tools, **arguments)
    except Exception as error:  # templates raise errors of any type
        raise RequestError(f"messages: the chat template refuses them: {one_line(str(error), 200)}") from None
    return text
