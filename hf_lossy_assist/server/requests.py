"""Read a client's request: the fields of its JSON, checked one by one, and the prompt that a chat template makes of messages."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..validation import one_line, shown


MOST_STOPS, LONGEST_STOP = 16, 200  # texts, characters
MOST_CHARACTERS = 64  # of a token
COLDEST = 1e-3  # logits that are divided by less overflow
# Parameters of OpenAI's API that change the text, and whose work is not done here; with the value that changes nothing.
NOT_DONE: dict[str, object] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": None, "top_logprobs": None, "suffix": None, "logit_bias": None,
    "presence_penalty": 0, "frequency_penalty": 0, "tools": None, "tool_choice": None, "functions": None, "function_call": None,
    "response_format": None,
}  # fmt: skip
# Parameters that are understood, or say nothing about the text.
KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream",
    "stream_options", "lossy_policy", "user", "metadata", "store", "service_tier", "parallel_tool_calls",
}  # fmt: skip
Turn = dict[str, str]  # role and content


class RequestError(ValueError):
    """A request that gets no text. `status`: of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class RequestLimits:
    """Limits that the operator sets.

    Args:
        policies: by the names that requests may use; the first is used where none is named.
        most_new_tokens: of a text. longest: tokens of a prompt and its text.
    """

    policies: Mapping[str, object]
    most_new_tokens: int
    longest: int


@dataclass(frozen=True)
class CompletionRequest:
    """A request that can be served.

    Args:
        ids: of the prompt. policy: its name.
        sampling: arguments of `generate` that texts in one batch share. arguments: those of this text alone.
        stops: texts before which the answer ends. stream: it is sent as it is written; include_usage: with token counts at its end.
    """

    ids: list[int]
    policy: str
    sampling: dict[str, Any]
    arguments: dict[str, int]
    stops: list[str] = field(default_factory=list)
    stream: bool = False
    include_usage: bool = False


def read_request(
    body: object, tokenizer: PreTrainedTokenizerBase, model: str, limits: RequestLimits, chat: bool
) -> CompletionRequest:
    """Read the body of a request to /v1/completions or, with `chat`, /v1/chat/completions. Raises: `RequestError`, one line."""
    if not isinstance(body, dict):
        raise RequestError(f"the body: expected a JSON object, got {shown(body)}")
    for name, neutral in NOT_DONE.items():
        if body.get(name) not in (None, neutral):
            raise RequestError(f"{name}: only {neutral!r} is served here, got {shown(body[name])}")
    if unknown := sorted(set(body) - KNOWN - set(NOT_DONE)):
        raise RequestError(f"{shown(unknown[0])} is no parameter of this server: leave it out")
    if body.get("model") not in (None, model):
        raise RequestError(f"model: this server has {model!r}, got {shown(body['model'])}", 404)
    ids = _read_messages(body, tokenizer, limits) if chat else _read_prompt(body, tokenizer, limits)
    policy = body.get("lossy_policy", next(iter(limits.policies)))
    if not isinstance(policy, str) or policy not in limits.policies:
        raise RequestError(f"lossy_policy: expected one of {', '.join(limits.policies)}, got {shown(policy)}")
    arguments = {"max_new_tokens": _read_new_tokens(body, len(ids), limits)}
    if (seed := _read_number(body, "seed", int, 0, 2**63 - 1)) is not None:
        arguments["seed"] = seed
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise RequestError(f"stream_options: expected include_usage alone, got {shown(options)}")
    stream, usage = _read_flag(body, "stream"), _read_flag(options, "include_usage")
    return CompletionRequest(ids, policy, _read_sampling(body), arguments, _read_stops(body), stream, usage)


def _read_number(
    body: dict[str, object], name: str, kind: type, least: float, most: float, default: object = None
) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or type(value) not in (int, kind) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(f"{name}: expected {what} from {least} to {most}, got {shown(value)}")
    return kind(value)


def _read_flag(body: dict[str, object], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name}: expected true or false, got {shown(value)}")
    return bool(value)


def _read_prompt(body: dict[str, object], tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str):
        _check_text("prompt", prompt, limits)
        ids: list[int] = tokenizer(prompt)["input_ids"]
    elif (
        isinstance(prompt, list)
        and len(prompt) <= limits.longest
        and all(type(token) is int and 0 <= token < len(tokenizer) for token in prompt)
    ):
        ids = prompt
    else:
        raise RequestError(f"prompt: expected one text, or the token ids of one, got {shown(prompt)}")
    if not ids:
        raise RequestError("prompt: it is empty, and there is nothing to continue")
    return ids


def _check_text(name: str, text: str, limits: RequestLimits) -> None:
    """Refuse a text that no tokenizer reads, and one that is too long whatever its tokens are."""
    if len(text) > limits.longest * MOST_CHARACTERS:
        raise RequestError(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    if not _is_whole(text):
        raise RequestError(f"{name}: it holds half of a surrogate pair, which is no character")


def _is_whole(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _read_messages(body: dict[str, object], tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages: expected a list of messages, got {shown(messages)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise RequestError("messages: this model's tokenizer has no chat template: use /v1/completions")
    turns = [read_turn(message) for message in messages]
    _check_text("messages", "".join(text for turn in turns for text in turn.values()), limits)
    ids: list[int] = tokenizer(render_chat(turns, tokenizer), add_special_tokens=False)["input_ids"]
    if not ids:
        raise RequestError("messages: the chat template makes nothing of them, and there is nothing to continue")
    return ids


def _read_new_tokens(body: dict[str, object], prompt: int, limits: RequestLimits) -> int:
    """Return the most new tokens. prompt: number of its tokens."""
    given = [_read_number(body, n, int, 1, limits.most_new_tokens) for n in ("max_completion_tokens", "max_tokens")]
    wanted = {most for most in given if most is not None}
    if len(wanted) > 1:
        raise RequestError("max_tokens and max_completion_tokens are one thing, and differ: leave one out")
    room = limits.longest - prompt
    most = min([limits.most_new_tokens, room] if not wanted else wanted)
    if room < 1 or most > room:
        raise RequestError(
            f"the prompt has {prompt} tokens, and with its text it may have {limits.longest}: shorten it, or ask for fewer tokens"
        )
    return most


def _read_sampling(body: dict[str, object]) -> dict[str, Any]:
    """Return arguments of `generate`. As in OpenAI's API, texts are sampled unless the temperature is 0."""
    temperature = _read_number(body, "temperature", float, 0.0, 2.0, 1.0)
    if temperature == 0:
        return {"do_sample": False}
    if temperature < COLDEST:
        raise RequestError(
            f"temperature: expected 0, which is greedy, or a number from {COLDEST:g} to 2, got {shown(temperature)}"
        )
    top_p = _read_number(body, "top_p", float, 1e-6, 1.0, 1.0)
    top_k = _read_number(body, "top_k", int, 0, 2**31 - 1, 0)
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def _read_stops(body: dict[str, object]) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP and _is_whole(text) for text in stops)
    ):
        raise RequestError(
            f"stop: expected up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters, got {shown(stop)}"
        )
    return stops


def read_turn(message: object) -> Turn:
    """Return a message's role and text; one made of parts has their texts. Raises: `RequestError`, one line."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"messages: expected objects with role and content, got {shown(message)}")
    unread = [name for name, value in message.items() if name not in ("role", "content") and value not in (None, [])]
    if unread:
        raise RequestError(f"messages: {shown(unread[0])} of a message is not read here: leave it out")
    content = message.get("content")
    if isinstance(content, list):
        if not all(_is_text_part(part) for part in content):
            raise RequestError("messages: this server reads text alone, and a message has a part that is none")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RequestError(f"messages: expected a text as content, got {shown(content)}")
    return {"role": message["role"], "content": content}


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)


def render_chat(turns: list[Turn], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render a conversation for its answer: an assistant's turn at the end is continued, after any other one a turn is begun.

    A developer's turn is given as the system's where the chat template has no such role.

    Raises: `RequestError`, one line, where the template refuses the turns or leaves one out.
    """
    known = _replace_developer(turns, tokenizer)
    text = _apply_template(known, tokenizer)
    # A template may skip a role that it does not know: each text is marked, and its mark must come out.
    marks = [f" turn{place}end" for place in range(len(turns))]
    marked = [turn | {"content": turn["content"] + mark} for turn, mark in zip(known, marks, strict=True)]
    rendered = _apply_template(marked, tokenizer)
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
    try:
        template = tokenizer.get_chat_template()
    except ValueError as error:  # several templates and none by default, or none at all
        raise RequestError(f"messages: {one_line(str(error), 200)}") from None
    if re.search(r"""["']developer["']""", template):
        return turns
    return [turn | {"role": "system"} if turn["role"] == "developer" else turn for turn in turns]


def _apply_template(turns: list[Turn], tokenizer: PreTrainedTokenizerBase) -> str:
    end = "continue_final_message" if turns[-1]["role"] == "assistant" else "add_generation_prompt"
    try:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, **{end: True})
    except Exception as error:  # a template raises what it likes
        raise RequestError(f"messages: the chat template refuses them: {one_line(str(error), 200)}") from None
    return text
