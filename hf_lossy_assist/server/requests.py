"""Read a client's request: its body, and the texts to write that it asks for."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..artifacts.files import JSONObject
from ..text.json_schema import read_schema
from ..validation import one_line, shown
from .bodies import (
    MOST_CHARACTERS,
    Body,
    ChatBody,
    CompletionBody,
    RequestError,
    RequestLimits,
    Tool,
    read_body,
    read_tokens,
)
from .detokenize import StopTexts
from .grammars import GrammarSource
from .messages import join_text, read_end, read_messages
from .tool_calls import CallForm, find_form, make_format


MOST_IN_STOPS = 1024  # characters of all stop texts
COLDEST = 1e-3  # dividing logits by less overflows
MOST_SCHEMA = 2**17  # characters, over all schemas of a request: OpenAI's limit is similar
NO_ARGUMENTS: dict[str, object] = {"type": "object", "properties": {}}
MOST_LOGPROBS = 2**18  # probabilities in one answer, each 100 bytes of JSON


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


@dataclass(frozen=True)
class CompletionRequest:
    """A text to write.

    Args:
        ids: of the prompt. policy: its name.
        sampling: arguments of `generate` that texts in one batch share. arguments: those of this text alone.
        stops: texts before which the answer ends. stream: send it while it is written. grammar: the compiled one that it must match.
        tools: those whose calls are parsed from the text. prediction: token ids that the text will copy. tenant: whose finished texts and cached prefixes may be used.
    """

    ids: list[int]
    policy: str
    sampling: dict[str, Any]
    arguments: dict[str, int]
    stops: StopTexts
    stream: bool = False
    grammar: Any = None
    tools: Tools | None = None
    prediction: list[int] = field(default_factory=list)
    tenant: str = ""

    @property
    def repeatable(self) -> bool:
        """Whether this is a sampled text that its seed repeats, whatever other requests run."""
        return bool(self.sampling.get("do_sample")) and "seed" in self.arguments


@dataclass(frozen=True)
class ClientRequest:
    """Everything that one request asks for.

    Args:
        texts: those of the first prompt, then those of the next. prompts: how many prompts they continue.
        include_usage: end a streamed answer with token counts. source: the grammar that all texts must match.
    """

    texts: list[CompletionRequest]
    prompts: int
    include_usage: bool
    source: GrammarSource | None = None


def read_request(
    value: object, tokenizer: PreTrainedTokenizerBase, model: str, limits: RequestLimits, chat: bool
) -> ClientRequest:
    """Read the body of a request to /v1/completions or, with `chat`, /v1/chat/completions. Raises: `RequestError`, one line."""
    body = read_body(ChatBody, value) if chat else read_body(CompletionBody, value)
    if body.model not in (None, model):
        raise RequestError(f"model: this server has {model!r}, got {shown(body.model)}", 404)
    source = _read_format(body)
    tools = _read_tools(body, tokenizer, source)
    if isinstance(body, ChatBody):
        prompts = [read_messages(body, tokenizer, limits, None if tools is None else tools.shown)]
    else:
        prompts = _read_prompts(body, tokenizer, limits)
    source = source if tools is None else tools.source
    if source is not None and isinstance(body, ChatBody) and read_end(body)["continue_final_message"]:
        raise RequestError(f"{source.field}: not supported while the last message is continued: leave one out")
    policy = next(iter(limits.policies)) if body.lossy_policy is None else body.lossy_policy
    if policy not in limits.policies:
        raise RequestError(f"lossy_policy: expected one of {', '.join(limits.policies)}, got {shown(policy)}")
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if (count := sum(map(len, stops))) > MOST_IN_STOPS:
        raise RequestError(f"stop: {count} characters in all, and {MOST_IN_STOPS} are the most: shorten some of them")
    prediction = _read_prediction(body, tokenizer, limits)
    sampling, stop_texts = _read_sampling(body), StopTexts(tokenizer, stops)
    shared = CompletionRequest([], policy, sampling, {}, stop_texts, bool(body.stream), None, tools, prediction)
    texts = [
        replace(shared, ids=ids, arguments=arguments)
        for ids in prompts
        for arguments in _read_arguments(body, len(prompts), len(ids), limits)
    ]
    return ClientRequest(texts, len(prompts), bool((body.stream_options or {}).get("include_usage")), source)


def _read_arguments(
    body: ChatBody | CompletionBody, prompts: int, length: int, limits: RequestLimits
) -> Iterator[dict[str, int]]:
    """Yield the arguments of each text of a prompt. length: of the prompt, in tokens. Raises: `RequestError`, one line."""
    count = body.n or 1
    if body.best_of not in (None, count):
        raise RequestError(f"best_of: only n, which is {count}, is served here, got {body.best_of}")
    if count * prompts > limits.most_texts:
        raise RequestError(f"n: {count} texts of {prompts} prompts are more than {limits.most_texts}: ask for fewer")
    wanted = {most for most in (body.max_completion_tokens, body.max_tokens) if most is not None}
    if len(wanted) > 1:
        raise RequestError("max_tokens and max_completion_tokens are one thing, and differ: leave one out")
    room = limits.longest - length
    if room < 1:
        raise RequestError(
            f"the prompt has {length} tokens, and with its text it may have {limits.longest}: shorten it"
        )
    arguments = {"max_new_tokens": min([limits.most_new_tokens, room, *wanted])}
    alternatives = _count_alternatives(body)
    if alternatives is not None:
        arguments["logprobs"] = alternatives
        logprobs = prompts * count * arguments["max_new_tokens"] * (1 + alternatives)
        if logprobs > MOST_LOGPROBS:
            raise RequestError(
                f"logprobs: {logprobs} probabilities are more than {MOST_LOGPROBS}: ask for fewer, or for a smaller max_tokens"
            )
    for index in range(count):
        yield arguments if body.seed in (None, -1) else arguments | {"seed": _derive_seed(body.seed, index)}


def _derive_seed(seed: int, index: int) -> int:
    """Return the seed of a prompt's text; the first text has the same seed as a request for a single text."""
    return seed if index == 0 else int(np.random.SeedSequence([seed, index]).generate_state(1, np.uint64)[0]) >> 1


def _count_alternatives(body: ChatBody | CompletionBody) -> int | None:
    """Return how many tokens are returned at each position with their log-probabilities; None: none, not even the text's."""
    if isinstance(body, CompletionBody):
        return None if body.logprobs is False else body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs: needs logprobs: true beside it")
    return (body.top_logprobs or 0) if body.logprobs else None


def _read_prompts(body: CompletionBody, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[list[int]]:
    """Return the token ids of the prompts."""
    if len(body.prompts) > limits.most_texts:
        raise RequestError(f"prompt: {len(body.prompts)} prompts are more than {limits.most_texts}: send fewer")
    out = [read_tokens("prompt", text, tokenizer, limits) if isinstance(text, str) else text for text in body.prompts]
    for ids in out:
        if not ids:
            raise RequestError("prompt: it is empty, and there is nothing to continue")
        if max(ids) >= len(tokenizer):
            raise RequestError(f"prompt: the model has {len(tokenizer)} tokens, got token id {max(ids)}")
    return out


def _read_prediction(body: Body, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    """Return the first token ids of a prediction, a hint about speed, which does not affect texts."""
    if body.prediction is None:
        return []
    most = 2 * limits.most_new_tokens
    text = join_text(body.prediction.content)[: most * MOST_CHARACTERS]
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:most]


def _read_sampling(body: Body) -> dict[str, Any]:
    """Return arguments of `generate`. As in OpenAI's API, texts are sampled unless the temperature is 0."""
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        return {"do_sample": False}
    if temperature < COLDEST:
        raise RequestError(
            f"temperature: expected 0, which is greedy, or a number from {COLDEST:g} to 2, got {shown(temperature)}"
        )
    top_p = 1.0 if body.top_p is None else body.top_p
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": max(body.top_k or 0, 0)}


def _read_format(body: Body) -> GrammarSource | None:
    """Return the grammar for `response_format`; None for plain text."""
    name, form = "response_format", body.response_format
    if form is None or form.type == "text":
        return None
    if (form.type == "json_schema") != (form.json_schema is not None):
        raise RequestError(f"{name}: json_schema is for type json_schema, and needed there")
    schema: dict[str, object] = {"type": "object"} if form.json_schema is None else form.json_schema.source
    return GrammarSource(name, "schema", _read_schema(f"{name}: schema", schema))


def _read_tools(body: Body, tokenizer: PreTrainedTokenizerBase, answer: GrammarSource | None) -> Tools | None:
    """Return a request's tools; None if it has none, or none may be called, in which case the model is not shown them.

    answer: the schema of a text without calls. Raises: `RequestError`, one line.
    """
    functions, schemas = [tool.function for tool in body.tools or ()], dict[str, dict[str, object]]()
    for function in functions:
        field_name = f"tools: {function.name}: parameters"
        schema = NO_ARGUMENTS if function.parameters is None else function.parameters
        if schema.get("type", "object") != "object":
            raise RequestError(f'{field_name}: expected a JSON schema of type "object", got {shown(schema)}')
        _read_schema(field_name, schema)
        schemas[function.name] = schema
    if len(schemas) < len(functions):
        raise RequestError("tools: two functions have one name: rename one")
    choice, callable_names = body.tool_choice or "auto", tuple(schemas)
    if isinstance(choice, Tool):
        if choice.function.name not in schemas:
            raise RequestError(f"tool_choice: {shown(choice.function.name)} is none of the tools")
        callable_names = (choice.function.name,)
    elif choice == "required" and not functions:
        raise RequestError("tool_choice: required needs tools")
    if not functions or choice == "none":
        return None
    if not isinstance(body, ChatBody):
        raise RequestError("tools are only supported by /v1/chat/completions")
    if body.logprobs:
        raise RequestError("logprobs: not supported with tools: leave one out")
    entries = [{"name": f.name, "description": f.description or "", "parameters": schemas[f.name]} for f in functions]
    tools: list[JSONObject] = [{"type": "function", "function": entry} for entry in entries]
    try:
        form = find_form(tokenizer, str(tokenizer.get_chat_template(tools=tools)))
    except Exception as error:  # templates raise errors of any type
        reason = one_line(error, 200)
        raise RequestError(f"tools: this model's chat template has none that can be read here: {reason}") from None
    several = body.parallel_tool_calls is not False and not isinstance(choice, Tool)
    arguments = {name: {"type": "object"} | schemas[name] for name in callable_names}
    tags = make_format(form, arguments, choice == "auto", several, None if answer is None else answer.text)
    if len(tags) > MOST_SCHEMA:
        raise RequestError(f"tools: their schemas have {len(tags)} characters, and {MOST_SCHEMA} are the most")
    return Tools(tools, form, callable_names, GrammarSource("tools", "tags", tags))


def _read_schema(name: str, schema: dict[str, object]) -> str:
    """Return the text of a JSON schema. Raises: `RequestError`, one line, for a schema that texts cannot be constrained to."""
    try:
        return read_schema(schema, MOST_SCHEMA)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: {one_line(error)}") from None
