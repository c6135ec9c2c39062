"""Bodies of requests: the supported fields with their types and bounds, and neutral values of the others; errors for clients."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, Json, ValidationError
from transformers import PreTrainedTokenizerBase

from ..validation import MOST, one_line, shown


ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
MOST_CHARACTERS = 64  # of a token
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
MOST_ALTERNATIVES = 20  # tokens per position whose probabilities are returned: OpenAI's limit
MOST_TOOLS = 128
MOST_ERRORS = 100  # whose values are looked at
FIRST_ERROR = Field(fail_fast=True)  # so that a long list has one error

Count = Annotated[int, Field(ge=1, le=MOST)]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], FIRST_ERROR]
Stop = Annotated[str, Field(min_length=1, max_length=200)]


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
    name: str, text: str, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits, **settings: bool
) -> list[int]:
    """Return the token ids of a text. Raises: `RequestError`, one line, if it is too long to be read."""
    if len(text) > limits.longest * MOST_CHARACTERS:
        raise RequestError(f"{name}: {len(text)} characters are more than {limits.longest} tokens: shorten it")
    ids: list[int] = tokenizer(text, verbose=False, **settings)["input_ids"]
    return ids


class RequestObject(BaseModel, strict=True, extra="forbid"):
    """An object of a body: no other fields, and no conversion of types."""


class TextPart(RequestObject, extra="ignore"):
    """A part of a message."""

    type: Literal["text"] = "text"
    text: str


Content = str | Annotated[list[TextPart], FIRST_ERROR]


class Prediction(RequestObject):
    """A text that the answer will copy: a hint about speed."""

    type: Literal["content"]
    content: Content


class FunctionCall(RequestObject, extra="ignore"):
    """A call of a function in an earlier message."""

    name: str
    arguments: Json[dict[str, object]]


class ToolCall(RequestObject, extra="ignore"):
    """A tool call in an earlier message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(RequestObject, extra="allow"):
    """A message of a chat."""

    role: str
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_ERROR] | None = None
    tool_call_id: str | None = None


class Function(RequestObject):
    """A function that may be called; its arguments follow the schema, strict or not."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]  # as in OpenAI's API
    description: str | None = None
    parameters: dict[str, object] | None = None
    strict: bool | None = None


class Tool(RequestObject):
    """A function as an entry of `tools`."""

    type: Literal["function"]
    function: Function


class SchemaSource(RequestObject):
    """A JSON schema with its name; texts follow it, strict or not."""

    name: str | None = None
    description: str | None = None
    source: Annotated[dict[str, object], Field(alias="schema")]
    strict: bool | None = None


class Format(RequestObject):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaSource | None = None


class Body(RequestObject, extra="allow"):
    """Fields of both kinds of requests. Null is as if the field were left out."""

    model: str | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=1e-6, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None  # -1 is vLLM's "all"
    seed: Annotated[int, Field(ge=-1, lt=2**63)] | None = None  # -1 means no seed in SGLang and llama.cpp
    stop: Stop | Annotated[list[Stop], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: dict[Literal["include_usage", "include_obfuscation"], bool | None] | None = None
    lossy_policy: str | None = None
    n: Count | None = None
    best_of: Count | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None


class ChatBody(Body):
    """The body of a request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, object] | Annotated[list[object], Field(max_length=0)] | None = None


class CompletionBody(Body):
    """The body of a request to /v1/completions."""

    prompt: str | Tokens | Annotated[list[str | Tokens], FIRST_ERROR]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | Literal[False] | None = None
    top_logprobs: Literal[0] | None = None  # of chats

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        several = [prompt for prompt in self.prompt if not isinstance(prompt, int)]
        return several or [[token for token in self.prompt if isinstance(token, int)]]


SUPPORTED = frozenset(ChatBody.model_fields) | frozenset(CompletionBody.model_fields)
AnyBody = TypeVar("AnyBody", bound=Body)


def read_body(kind: type[AnyBody], value: object) -> AnyBody:
    """Return a body of this kind. Raises: `RequestError`, one line, if a field is unknown, unsupported or has a wrong value."""
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        if error.error_count() > MOST_ERRORS:
            raise RequestError(f"the body has {error.error_count()} errors") from None
        worst = max(
            error.errors(include_url=False), key=lambda one: len(one["loc"])
        )  # of a union's types the likeliest
        path = one_line(".".join(map(str, worst["loc"])) or "the body")
        raise RequestError(f"{path}: {one_line(worst['msg'])}, got {shown(worst['input'])}") from None
    for name, extra in (body.model_extra or {}).items():
        neutral = NEUTRAL.get(name, ())
        if name in IGNORED or (extra is None and name in {*NEUTRAL, *SUPPORTED}):
            continue
        if name not in NEUTRAL:
            raise RequestError(f"{shown(name)} is no parameter of this address: leave it out")
        if not any(isinstance(extra, bool) == isinstance(other, bool) and extra == other for other in neutral):
            served = " or ".join(map(repr, neutral)) or "null"
            raise RequestError(f"{name}: only {served} is served here, got {shown(extra)}")
    return body
