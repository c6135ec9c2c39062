"""Fields of a request: those supported, those that do not affect the text, and neutral values of unsupported ones; errors for clients."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..validation import one_line, shown


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MOST_CHARACTERS, LIKELY_CHARACTERS = 64, 8  # of a token, at most and on average
MOST_LEVELS = 100  # of values within values
MOST_TEXTS = 128  # that one request may ask for: OpenAI's limit of `n`
# Supported fields.
KNOWN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stream",
    "stream_options", "lossy_policy", "n", "best_of", "logprobs", "top_logprobs", "continue_final_message", "add_generation_prompt",
    "chat_template_kwargs", "response_format",
    "tools", "tool_choice", "parallel_tool_calls",
}  # fmt: skip
# Fields of OpenAI's API that do not affect the text: the user, storage, billing, priority.
SAYS_NOTHING = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options request_id".split()
)
# Unsupported fields that affect the text, with their neutral values; null is always neutral.
NOT_DONE: dict[str, tuple[object, ...]] = {
    "echo": (False,), "suffix": ("",), "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "functions": ([],), "function_call": ("none", "auto"),
    "modalities": (["text"],), "audio": (), "moderation": (), "web_search_options": (), "verbosity": ("medium",), "reasoning_effort": ("medium",),
    # of vLLM, SGLang and llama.cpp
    "repetition_penalty": (1,), "min_p": (0,), "min_tokens": (0,), "ignore_eos": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "stop_token_ids": ([],), "include_stop_str_in_output": (False,), "length_penalty": (1,),
    "use_beam_search": (False,), "bad_words": ([],), "allowed_token_ids": (), "prompt_logprobs": (), "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,), "return_token_ids": (False,), "priority": (0,), "add_special_tokens": (), "documents": ([],),
    "chat_template": (), "logits_processors": ([],), "structured_outputs": (), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (),
}  # fmt: skip


class RequestError(ValueError):
    """A request that gets no text. `status`: of HTTP."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def format_event(value: object) -> str:
    """Return a server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n\n"


def make_error(message: str, status: int) -> dict[str, object]:
    """Return the error object that OpenAI's clients expect."""
    kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


MOST_TOKENS = 1_048_576  # of a text, if the model has no limit


def find_longest(target: object, draft: object, wanted: int | None) -> int:
    """Return the most tokens of a text that both models can read."""
    configs = [
        found for model in (target, draft) if (found := getattr(model, "config", None)) is not None
    ]  # a drafter on states has none
    known = [getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) for config in configs]
    most = min([length for length in known if length is not None], default=MOST_TOKENS)
    if wanted is not None and wanted > most:
        raise ValueError(
            f"the maximal length {wanted} is more than the models were made for, {most}: pass that, or less"
        )
    return most if wanted is None else wanted


@dataclass(frozen=True)
class RequestLimits:
    """Limits set by the operator.

    Args:
        policies: by the names that requests may use; the first is the default.
        most_new_tokens: of a text. longest: tokens of a prompt and its text. most_texts: of a request, over all its prompts.
    """

    policies: Mapping[str, object]
    most_new_tokens: int
    longest: int
    most_texts: int = MOST_TEXTS


def refuse_fields(body: Mapping[str, object]) -> None:
    """Refuse unknown fields, and unsupported values. Raises: `RequestError`, one line."""
    for name, neutral in NOT_DONE.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, each) for each in neutral):
            served = " or ".join(repr(each) for each in neutral) or "null"
            raise RequestError(f"{name}: only {served} is served here, got {shown(value)}")
    if unknown := sorted(set(body) - KNOWN - SAYS_NOTHING - set(NOT_DONE) - {"prediction"}):
        raise RequestError(f"{shown(unknown[0])} is no parameter of this server: leave it out")


def _is_same(value: object, neutral: object) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def read_number(
    body: Mapping[str, object], name: str, kind: type, least: float, most: float, default: object = None
) -> Any:
    """Return a number from `least` to `most`, or `default` if none is given. Raises: `RequestError`, one line."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or type(value) not in (int, kind) or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise RequestError(f"{name}: expected {what} from {least} to {most}, got {shown(value)}")
    return kind(value)


def read_flag(body: Mapping[str, object], name: str, within: str = "") -> bool | None:
    """Return true, false, or None if none is given. `within`: what `body` is, for the error. Raises: `RequestError`, one line."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{within}{name}: expected true or false, got {shown(value)}")
    return value


def check_text(name: str, text: str, limits: RequestLimits) -> None:
    """Refuse a text that tokenizers cannot read, or that is too long whatever its tokens are. Raises: `RequestError`, one line."""
    if len(text) > limits.longest * MOST_CHARACTERS:
        raise RequestError(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    check_value(name, text)


def read_tokens(
    name: str, text: str, tokenizer: "PreTrainedTokenizerBase", limits: RequestLimits, **settings: bool
) -> list[int]:
    """Return the token ids of a text. Raises: `RequestError`, one line, if it is too long: of a very long one only the beginning is read."""
    check_text(name, text, limits)
    begin = tokenizer(text[: limits.longest * LIKELY_CHARACTERS], verbose=False, **settings)["input_ids"]
    if len(begin) > limits.longest + MOST_CHARACTERS:  # more than the last of them, cut in two, can account for
        raise RequestError(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    if len(text) <= limits.longest * LIKELY_CHARACTERS:
        return list(begin)
    ids: list[int] = tokenizer(text, verbose=False, **settings)["input_ids"]
    return ids


def check_values(body: Mapping[str, object]) -> None:
    """Refuse a body with texts that are none, or values nested too deeply. Raises: `RequestError`, one line."""
    for name, value in body.items():
        check_value("the body", name)
        check_value(one_line(name, 40), value)


def check_value(name: str, value: object) -> None:
    """Refuse a JSON value of more than `MOST_LEVELS` levels, or with half of a surrogate pair. Raises: `RequestError`, one line."""
    for text in find_texts(name, value):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{name}: it holds half of a surrogate pair, which is no character") from None


def find_texts(name: str, value: object) -> Iterator[str]:
    """Yield all texts in a JSON value, including keys. Raises: `RequestError`, one line, for more than `MOST_LEVELS` levels."""
    values: list[object] = [value]
    for _ in range(MOST_LEVELS):
        inner = list[object]()
        for each in values:
            if isinstance(each, str):
                yield each
            elif isinstance(each, Mapping):
                inner += [*map(str, each), *each.values()]
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        values = inner
    raise RequestError(f"{name}: more than {MOST_LEVELS} levels of values within values: nest them less")
