"""Read a chat's messages: each by its fields, all of them into the text that the tokenizer's chat template makes."""

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..validation import one_line, shown
from .fields import RequestError, RequestLimits, check_text, read_flag


Turn = dict[str, str]  # role and content, and a name where one is given
NONE: Mapping[str, object] = MappingProxyType({})

NO_ARGUMENTS = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)  # of a template


def read_messages(body: dict[str, object], tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    """Return the token ids of a chat, up to where its answer begins. Raises: `RequestError`, one line."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of messages, got {shown(messages)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("messages: this model's tokenizer has no chat template: use /v1/completions")
    turns = [read_turn(message) for message in messages]
    check_text("messages", "".join(text for turn in turns for text in turn.values()), limits)
    text = render_chat(turns, tokenizer, read_end(body, turns), _read_arguments(body, tokenizer))
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise RequestError("messages: the chat template makes nothing of them, and there is nothing to continue")
    return ids


def read_end(body: dict[str, object], turns: list[Turn]) -> dict[str, bool]:
    """Return what ends the chat, by names of Transformers and vLLM; where neither is given, an assistant's message is continued."""
    goes_on, begins = read_flag(body, "continue_final_message"), read_flag(body, "add_generation_prompt")
    if goes_on and begins:
        raise RequestError("continue_final_message and add_generation_prompt exclude each other: leave one out")
    if goes_on is None:
        goes_on = begins is None and turns[-1]["role"] == "assistant"
    return {"continue_final_message": goes_on, "add_generation_prompt": not goes_on if begins is None else begins}


def _read_arguments(body: dict[str, object], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return what a request gives to the chat template beside the messages."""
    given = body.get("chat_template_kwargs") or {}
    if not isinstance(given, dict):
        raise RequestError(f"chat_template_kwargs: expected an object, got {shown(given)}")
    for name in given:
        if name in NO_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", _find_template(tokenizer)):
            raise RequestError(f"chat_template_kwargs: {shown(name)} is no variable of this model's chat template")
    return given


def read_turn(message: object) -> Turn:
    """Return a message's role and text, and its name for the template to show. Raises: `RequestError`, one line."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages: expected objects with role and content, got {shown(message)}")
    read = "role", "content", "name"
    unread = [name for name, value in message.items() if name not in read and value not in (None, [])]
    if unread:
        raise RequestError(f"messages: {shown(unread[0])} of a message is not read here: leave it out")
    turn = {"role": message["role"], "content": read_text("messages", message.get("content"))}
    if message.get("name") is not None:
        if not isinstance(message["name"], str):
            raise RequestError(f"messages: expected a text as name, got {shown(message['name'])}")
        turn["name"] = message["name"]
    return turn


def read_text(name: str, content: object) -> str:
    """Return a text, which may be made of parts. Raises: `RequestError`, one line."""
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
) -> str:
    """Render a conversation up to its answer; `end`, `arguments`: arguments of `apply_chat_template`.

    A developer's turn is given as the system's where the chat template has no such role.

    Raises: `RequestError`, one line, where the template refuses the turns or leaves one out.
    """
    known, given = _replace_developer(turns, tokenizer), {**arguments, **end}
    text = _apply_template(known, tokenizer, given)
    # A template may skip a role that it does not know: each text is marked, and its mark must come out.
    marks = [f" turn{place}end" for place in range(len(turns))]
    marked = [turn | {"content": turn["content"] + mark} for turn, mark in zip(known, marks, strict=True)]
    rendered = _apply_template(marked, tokenizer, given)
    behind = 0  # where the last mark was found: turns stand in their order but for a few that a template moves
    for turn, mark in zip(turns, marks, strict=True):
        place = rendered.find(mark.strip(), behind)
        behind = max(place, behind)
        if turn["content"].strip() and place < 0 and mark.strip() not in rendered:
            raise RequestError(
                f"messages: the chat template leaves out a message of role {shown(turn['role'])}: give its text to another role"
            )
    return text


def _replace_developer(turns: list[Turn], tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    if not any(turn["role"] == "developer" for turn in turns):
        return turns
    if re.search(r"""["']developer["']""", _find_template(tokenizer)):
        return turns
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


def _find_template(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        return str(tokenizer.get_chat_template())
    except ValueError as error:  # several templates and none by default, or none at all
        raise RequestError(f"messages: {one_line(str(error), 200)}") from None


def _apply_template(turns: list[Turn], tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, object]) -> str:
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **arguments)
    except Exception as error:  # a template raises what it likes
        raise RequestError(f"messages: the chat template refuses them: {one_line(str(error), 200)}") from None
    return text
