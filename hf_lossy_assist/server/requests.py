"""Read a client's request: check the fields of its JSON, and derive the texts to write."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ..validation import shown
from .detokenize import StopTexts
from .fields import (
    MOST_CHARACTERS,
    RequestError,
    RequestLimits,
    check_text,
    check_values,
    read_flag,
    read_number,
    read_tokens,
    refuse_fields,
)
from .grammars import GrammarSource
from .messages import read_end, read_messages, read_text
from .tools import Tools, read_json_schema, read_tools


MOST_STOPS, LONGEST_STOP, MOST_IN_STOPS = 16, 200, 1024  # texts; characters of one, and of all
COLDEST = 1e-3  # dividing logits by less overflows
MOST_ALTERNATIVES = 20  # tokens per position whose probabilities are returned: OpenAI's limit
MOST_LOGPROBS = 2**18  # probabilities in one answer, each 100 bytes of JSON


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


@dataclass(frozen=True)
class ClientRequest:
    """Everything that one request asks for.

    Args:
        texts: those of the first prompt, then those of the next. prompts: how many prompts they continue.
        include_usage: end a streamed answer with token counts. alternatives: number of tokens whose log-probabilities are returned at each
            position, in addition to the text's token; None: no log-probabilities. source: the grammar that all texts must match.
    """

    texts: list[CompletionRequest]
    prompts: int
    include_usage: bool
    alternatives: int | None
    source: GrammarSource | None = None

    @property
    def stream(self) -> bool:
        return self.texts[0].stream


def read_request(
    body: object, tokenizer: PreTrainedTokenizerBase, model: str, limits: RequestLimits, chat: bool
) -> ClientRequest:
    """Read the body of a request to /v1/completions or, with `chat`, /v1/chat/completions. Raises: `RequestError`, one line."""
    if not isinstance(body, dict):
        raise RequestError(f"the body: expected a JSON object, got {shown(body)}")
    check_values(body)
    refuse_fields(body)
    if body.get("model") not in (None, model):
        raise RequestError(f"model: this server has {model!r}, got {shown(body['model'])}", 404)
    source = read_format(body)
    tools = read_tools(body, tokenizer, chat, source)
    source = source if tools is None else tools.source
    given = [body] if chat else _split_prompts(body, limits)
    count = _read_count(body, len(given), limits)
    if chat:
        prompts = [read_messages(body, tokenizer, limits, tools)]
    else:
        prompts = [_read_prompt(prompt, tokenizer, limits) for prompt in given]
    policy = body.get("lossy_policy")
    policy = next(iter(limits.policies)) if policy is None else policy
    if not isinstance(policy, str) or policy not in limits.policies:
        raise RequestError(f"lossy_policy: expected one of {', '.join(limits.policies)}, got {shown(policy)}")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise RequestError(f"stream_options: expected include_usage alone, got {shown(options)}")
    stream, usage = bool(read_flag(body, "stream")), bool(read_flag(options, "include_usage"))
    alternatives = _read_alternatives(body, chat)
    prediction = _read_prediction(body, tokenizer, limits)
    shared = CompletionRequest(
        [],
        policy,
        _read_sampling(body),
        {},
        StopTexts(tokenizer, _read_stops(body)),
        stream,
        tools=tools,
        prediction=prediction,
    )
    # -1 means no seed in SGLang and llama.cpp.
    seed = None if body.get("seed") == -1 else read_number(body, "seed", int, 0, 2**63 - 1)
    texts = []
    for ids in prompts:
        arguments = {"max_new_tokens": _read_new_tokens(body, len(ids), limits)}
        if alternatives is not None:
            arguments["logprobs"] = alternatives
        for place in range(count):
            seeded = arguments if seed is None else arguments | {"seed": _seed_of(seed, place)}
            texts.append(replace(shared, ids=ids, arguments=seeded))
    places = sum(text.arguments["max_new_tokens"] for text in texts)
    if alternatives is not None and places * (1 + alternatives) > MOST_LOGPROBS:
        raise RequestError(
            f"logprobs: {len(texts)} texts of {places} tokens, each with {1 + alternatives} probabilities, are more than {MOST_LOGPROBS} "
            "probabilities: ask for fewer, or for a smaller max_tokens"
        )
    if source is not None and chat and read_end(body, body["messages"])["continue_final_message"]:
        raise RequestError(f"{source.field}: it is of whole messages, and the last one is continued: leave one out")
    return ClientRequest(texts, len(prompts), usage, alternatives, source)


def read_format(body: Mapping[str, object]) -> GrammarSource | None:
    """Return the grammar for `response_format`; None for plain text. Raises: `RequestError`, one line."""
    name, given = "response_format", body.get("response_format")
    kind = given.get("type") if isinstance(given, dict) else None
    if given is None or given == {"type": "text"}:
        return None
    if given == {"type": "json_object"}:
        return GrammarSource(name, "schema", '{"type": "object"}')
    if not isinstance(given, dict) or kind != "json_schema" or set(given) != {"type", "json_schema"}:
        raise RequestError(
            f"{name}: expected type text, json_object, or json_schema with an object json_schema, got {shown(given)}"
        )
    found = given["json_schema"]
    if not isinstance(found, dict) or not set(found) <= {"name", "description", "schema", "strict"}:
        raise RequestError(f"{name}: json_schema: expected an object with name and schema, got {shown(found)}")
    read_flag(found, "strict", f"{name}: ")  # texts always match the schema, even without it
    return GrammarSource(name, "schema", read_json_schema(f"{name}: schema", found.get("schema")))


def _seed_of(seed: int, place: int) -> int:
    """Return the seed of a prompt's text number `place`; the first text has the same seed as a request for a single text."""
    return seed if place == 0 else int(np.random.SeedSequence([seed, place]).generate_state(1, np.uint64)[0]) >> 1


def _split_prompts(body: dict[str, object], limits: RequestLimits) -> list[object]:
    """Return the prompts, each a text or token ids."""
    given = body.get("prompt")
    several = isinstance(given, list) and len(given) > 0 and isinstance(given[0], str | list)
    prompts = given if several and isinstance(given, list) else [given]
    if len(prompts) > limits.most_texts:
        raise RequestError(
            f"prompt: {len(prompts)} prompts are more than {limits.most_texts}: send some of them later"
        )
    return prompts


def _read_prompt(prompt: object, tokenizer: PreTrainedTokenizerBase, limits: RequestLimits) -> list[int]:
    if isinstance(prompt, str):
        ids = read_tokens("prompt", prompt, tokenizer, limits)
    elif (
        isinstance(prompt, list)
        and len(prompt) <= limits.longest
        and all(type(token) is int and 0 <= token < len(tokenizer) for token in prompt)
    ):
        ids = prompt
    elif isinstance(prompt, list) and len(prompt) > limits.longest:
        raise RequestError(f"prompt: {len(prompt)} tokens are more than {limits.longest}: shorten it")
    else:
        raise RequestError(f"prompt: expected a text, the token ids of one, or a list of these, got {shown(prompt)}")
    if not ids:
        raise RequestError("prompt: it is empty, and there is nothing to continue")
    return ids


def _read_count(body: Mapping[str, object], prompts: int, limits: RequestLimits) -> int:
    """Return how many texts each prompt gets."""
    count: int = read_number(body, "n", int, 1, limits.most_texts, 1)
    if read_number(body, "best_of", int, 1, limits.most_texts, count) != count:
        raise RequestError(f"best_of: only n, which is {count}, is served here, got {shown(body['best_of'])}")
    if count * prompts > limits.most_texts:
        raise RequestError(
            f"n: {count} texts for each of {prompts} prompts are more than {limits.most_texts}: ask for fewer"
        )
    return count


def _read_alternatives(body: Mapping[str, object], chat: bool) -> int | None:
    """Return how many tokens are returned at each position with their log-probabilities; None: none, not even the text's."""
    if not chat:
        if body.get("logprobs") is False:  # a chat's form of no logprobs
            return None
        if body.get("top_logprobs"):
            raise RequestError("top_logprobs: it is of chats: pass their number as logprobs here")
        out: int | None = read_number(body, "logprobs", int, 0, MOST_ALTERNATIVES)
        return out
    wanted = read_flag(body, "logprobs")
    count: int = read_number(body, "top_logprobs", int, 0, MOST_ALTERNATIVES, 0)
    if count and not wanted:
        raise RequestError("top_logprobs: needs logprobs: true beside it")
    return count if wanted else None


def _read_prediction(
    body: Mapping[str, object], tokenizer: PreTrainedTokenizerBase, limits: RequestLimits
) -> list[int]:
    """Return the first token ids of a prediction, a hint about speed, which does not affect texts."""
    given = body.get("prediction")
    if given is None:
        return []
    if not isinstance(given, dict) or given.get("type") != "content":
        raise RequestError(f'prediction: expected an object with type "content" and content, got {shown(given)}')
    text = read_text("prediction", given.get("content"))
    check_text("prediction", text, limits)
    most = 2 * limits.most_new_tokens
    ids: list[int] = tokenizer(text[: most * MOST_CHARACTERS], add_special_tokens=False)["input_ids"]
    return ids[:most]


def _read_new_tokens(body: Mapping[str, object], prompt: int, limits: RequestLimits) -> int:
    """Return the most new tokens: the requested number, as far as there is room. prompt: its number of tokens."""
    given = [read_number(body, name, int, 1, 2**31 - 1) for name in ("max_completion_tokens", "max_tokens")]
    wanted = {most for most in given if most is not None}
    if len(wanted) > 1:
        raise RequestError("max_tokens and max_completion_tokens are one thing, and differ: leave one out")
    room = limits.longest - prompt
    if room < 1:
        raise RequestError(
            f"the prompt has {prompt} tokens, and with its text it may have {limits.longest}: shorten it"
        )
    return min([limits.most_new_tokens, room, *wanted])


def _read_sampling(body: Mapping[str, object]) -> dict[str, Any]:
    """Return arguments of `generate`. As in OpenAI's API, texts are sampled unless the temperature is 0."""
    temperature = read_number(body, "temperature", float, 0.0, 2.0, 1.0)
    top_p = read_number(body, "top_p", float, 1e-6, 1.0, 1.0)
    top_k = max(read_number(body, "top_k", int, -1, 2**31 - 1, 0), 0)  # -1 is vLLM's "all"
    if temperature == 0:
        return {"do_sample": False}
    if temperature < COLDEST:
        raise RequestError(
            f"temperature: expected 0, which is greedy, or a number from {COLDEST:g} to 2, got {shown(temperature)}"
        )
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k}


def _read_stops(body: Mapping[str, object]) -> list[str]:
    stop = body.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in stops)
    ):
        raise RequestError(
            f"stop: expected up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters, got {shown(stop)}"
        )
    if (count := sum(map(len, stops))) > MOST_IN_STOPS:
        raise RequestError(f"stop: {count} characters in all, and {MOST_IN_STOPS} are the most: shorten some of them")
    return stops
