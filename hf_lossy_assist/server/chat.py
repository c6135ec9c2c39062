"""The turns of a conversation, and the prompt that a chat template makes of them."""

import re
from typing import Any

from ..validation import one_line, shown
from .fields import Refused


Turn = dict[str, str]  # role and content


def read_turn(message: Any) -> Turn:
    """Read a message's role and text; one made of parts has their texts. Raises: `Refused`, one line."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise Refused(f"messages: expected objects with role and content, got {shown(message)}")
    unread = [name for name, value in message.items() if name not in ("role", "content") and value not in (None, [])]
    if unread:
        raise Refused(f"messages: {shown(unread[0])} of a message is not read here: leave it out")
    content = message.get("content")
    if isinstance(content, list):
        if not all(_is_text(part) for part in content):
            raise Refused("messages: this server reads text alone, and a message has a part that is none")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise Refused(f"messages: expected a text as content, got {shown(content)}")
    return {"role": message["role"], "content": content}


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def chat_prompt(turns: list[Turn], tokenizer: Any) -> str:
    """Render a conversation for its answer: an assistant's turn at the end is continued, behind any other one is begun.

    A developer's turn is given as the system's where the chat template has no such role.

    Raises: `Refused`, one line, where the template refuses the turns or leaves one out.
    """
    known = _with_known_roles(turns, tokenizer)
    text = _render(known, tokenizer)
    # A template may skip a role that it does not know: each text is marked, and its mark must come out.
    marks = [f" turn{place}end" for place in range(len(turns))]
    marked = [turn | {"content": turn["content"] + mark} for turn, mark in zip(known, marks, strict=True)]
    rendered = _render(marked, tokenizer)
    behind = 0  # where the last mark was found: turns stand in their order but for a few that a template moves
    for turn, mark in zip(turns, marks, strict=True):
        place = rendered.find(mark.strip(), behind)
        behind = max(place, behind)
        if turn["content"].strip() and place < 0 and mark.strip() not in rendered:
            raise Refused(
                f"messages: the chat template leaves out a message of role {shown(turn['role'])}: give its text to another role"
            )
    return text


def _with_known_roles(turns: list[Turn], tokenizer: Any) -> list[Turn]:
    if not any(turn["role"] == "developer" for turn in turns):
        return turns
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates and none by default, or none at all
        raise Refused(f"messages: {one_line(str(error), 200)}") from None
    if re.search(r"""["']developer["']""", template):
        return turns
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


def _render(turns: list[Turn], tokenizer: Any) -> str:
    end = "continue_final_message" if turns[-1]["role"] == "assistant" else "add_generation_prompt"
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **{end: True})
    except Exception as error:  # a template raises what it likes
        raise Refused(f"messages: the chat template refuses them: {one_line(str(error), 200)}") from None
    return text
