"""Fields of a request that do not affect the text, and neutral values of unsupported ones; errors for clients; the operator's limits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MOST_CHARACTERS, LIKELY_CHARACTERS = 64, 8  # of a token, at most and on average
MOST_TEXTS = 128  # that one request may ask for: OpenAI's limit of `n`
MOST_TOKENS = 1_048_576  # of a text, if the model has no limit
# Fields of OpenAI's API that do not affect the text: the user, storage, billing, priority.
IGNORED = frozenset(
    "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention prompt_cache_options request_id".split()
)
# Unsupported fields that affect the text, with their neutral values; null is always neutral.
NEUTRAL: dict[str, tuple[object, ...]] = {
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


def find_longest(target: object, draft: object, wanted: int | None) -> int:
    """Return the most tokens of a text that both models can read."""
    # A drafter on states has no config.
    configs = [config for model in (target, draft) if (config := getattr(model, "config", None)) is not None]
    lengths = [getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) for config in configs]
    most = min([length for length in lengths if length is not None], default=MOST_TOKENS)
    if wanted is not None and wanted > most:
        raise ValueError(f"the models were made for {most} tokens: pass that as maximal length, or less than {wanted}")
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


def read_tokens(
    name: str, text: str, tokenizer: "PreTrainedTokenizerBase", limits: RequestLimits, **settings: bool
) -> list[int]:
    """Return the token ids of a text. Raises: `RequestError`, one line, if it is too long: of a very long one only the beginning is read."""
    begin: list[int] = tokenizer(text[: limits.longest * LIKELY_CHARACTERS], verbose=False, **settings)["input_ids"]
    # A token that is cut in two has at most so many.
    if len(begin) > limits.longest + MOST_CHARACTERS or len(text) > limits.longest * MOST_CHARACTERS:
        raise RequestError(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    return (
        begin
        if len(text) <= limits.longest * LIKELY_CHARACTERS
        else tokenizer(text, verbose=False, **settings)["input_ids"]
    )
