"""What a client asks for, read from the JSON of a request: everything in it is checked, nothing is guessed."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..validation import shown
from .chat import chat_prompt, read_turn
from .fields import Refused, flag, number, whole


MOST_STOPS, LONGEST_STOP = 16, 200  # texts, characters
MOST_CHARACTERS = 64  # of a token
COLDEST = 1e-3  # logits that are divided by less overflow
# Parameters of OpenAI's API that change the text, and whose work is not done here; with the value that changes nothing.
NOT_DONE: dict[str, Any] = {
    "n": 1, "best_of": 1, "echo": False, "logprobs": None, "top_logprobs": None, "suffix": None, "logit_bias": None,
    "presence_penalty": 0, "frequency_penalty": 0, "tools": None, "tool_choice": None, "functions": None, "function_call": None,
    "response_format": None,
}  # fmt: skip
# Parameters that are understood, or say nothing about the text.
KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream",
    "stream_options", "lossy_policy", "user", "metadata", "store", "service_tier", "parallel_tool_calls",
}  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the operator allows.

    Args:
        policies: by the names that requests may use; the first is used where none is named.
        most_new_tokens: of a text. longest: tokens of a prompt and its text.
    """

    policies: Mapping[str, Any]
    most_new_tokens: int
    longest: int


@dataclass(frozen=True)
class Question:
    """A request that can be answered.

    Args:
        ids: of the prompt. policy: its name. settings: of decoding, the same for all texts that are written together. own: of this text.
        stops: texts behind which the answer ends. stream: whether it is sent as it is written; `usage`: with a last word about it.
    """

    ids: list[int]
    policy: str
    settings: dict[str, Any]
    own: dict[str, Any]
    stops: list[str] = field(default_factory=list)
    stream: bool = False
    usage: bool = False


def read_question(body: Any, tokenizer: Any, model: str, limits: Limits, chat: bool) -> Question:
    """The question in the body of a request to /v1/completions or, with `chat`, /v1/chat/completions.

    Raises: `Refused`, one line.
    """
    if not isinstance(body, dict):
        raise Refused(f"the body: expected a JSON object, got {shown(body)}")
    for name, neutral in NOT_DONE.items():
        if body.get(name) not in (None, neutral):
            raise Refused(f"{name}: only {neutral!r} is served here, got {shown(body[name])}")
    if unknown := sorted(set(body) - KNOWN - set(NOT_DONE)):
        raise Refused(f"{shown(unknown[0])} is no parameter of this server: leave it out")
    asked = body.get("model")
    if asked is not None and asked != model:
        raise Refused(f"model: this server has {model!r}, got {shown(asked)}", 404)
    ids = _chat_ids(body, tokenizer, limits) if chat else _prompt_ids(body, tokenizer, limits)
    policy = body.get("lossy_policy", next(iter(limits.policies)))
    if not isinstance(policy, str) or policy not in limits.policies:
        raise Refused(f"lossy_policy: expected one of {', '.join(limits.policies)}, got {shown(policy)}")
    own: dict[str, Any] = {"max_new_tokens": _new_tokens(body, len(ids), limits)}
    seed = whole(body, "seed", 0, 2**63 - 1)
    if seed is not None:
        own["seed"] = seed
    stream = flag(body, "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise Refused(f"stream_options: expected include_usage alone, got {shown(options)}")
    return Question(ids, policy, _sampling(body), own, _stops(body), stream, flag(options, "include_usage"))


def _prompt_ids(body: dict[str, Any], tokenizer: Any, limits: Limits) -> list[int]:
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        [prompt] = prompt
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(_readable("prompt", prompt, limits))["input_ids"]
    elif isinstance(prompt, list) and len(prompt) <= limits.longest and _are_tokens(prompt, len(tokenizer)):
        ids = prompt
    else:
        raise Refused(f"prompt: expected one text, or the token ids of one, got {shown(prompt)}")
    if not ids:
        raise Refused("prompt: it is empty, and there is nothing to continue")
    return ids


def _readable(name: str, text: str, limits: Limits) -> str:
    """Refuse texts that no tokenizer reads, and those that are too long whatever their tokens are."""
    if len(text) > limits.longest * MOST_CHARACTERS:
        raise Refused(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    if not _is_whole(text):
        raise Refused(f"{name}: it holds half of a surrogate pair, which is no character")
    return text


def _are_tokens(ids: list[Any], count: int) -> bool:
    return all(type(token) is int and 0 <= token < count for token in ids)


def _chat_ids(body: dict[str, Any], tokenizer: Any, limits: Limits) -> list[int]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise Refused(f"messages: expected a list of messages, got {shown(messages)}")
    if getattr(tokenizer, "chat_template", None) is None:
        raise Refused("messages: this model's tokenizer has no chat template: use /v1/completions")
    turns = [read_turn(message) for message in messages]
    _readable("messages", "".join(text for turn in turns for text in turn.values()), limits)
    ids: list[int] = tokenizer(chat_prompt(turns, tokenizer), add_special_tokens=False)["input_ids"]
    if not ids:
        raise Refused("messages: the chat template makes nothing of them, and there is nothing to continue")
    return ids


def _new_tokens(body: dict[str, Any], prompt: int, limits: Limits) -> int:
    asked = [whole(body, name, 1, limits.most_new_tokens) for name in ("max_completion_tokens", "max_tokens")]
    if len({its for its in asked if its is not None}) > 1:
        raise Refused("max_tokens and max_completion_tokens are one thing, and differ: leave one out")
    found = next((its for its in asked if its is not None), None)
    room = limits.longest - prompt
    if room < 1 or (found is not None and found > room):
        raise Refused(
            f"the prompt has {prompt} tokens, and with its text it may have {limits.longest}: shorten it, or ask for fewer tokens"
        )
    return min(limits.most_new_tokens, room) if found is None else found


def _sampling(body: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`. As in OpenAI's API, texts are sampled unless the temperature is 0."""
    temperature = number(body, "temperature", 0.0, 2.0, 1.0)
    if temperature == 0:
        return {"do_sample": False}
    if temperature < COLDEST:
        raise Refused(
            f"temperature: expected 0, which is greedy, or a number from {COLDEST:g} to 2, got {shown(temperature)}"
        )
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_p": number(body, "top_p", 1e-6, 1.0, 1.0),
        "top_k": whole(body, "top_k", 0, 2**31 - 1) or 0,
    }


def _stops(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(_is_stop(text) for text in stops):
        raise Refused(f"stop: expected up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters, got {shown(stop)}")
    return stops


def _is_stop(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= LONGEST_STOP and _is_whole(text)


def _is_whole(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)
