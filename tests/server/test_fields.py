"""Fields and their values, streamed and not, read with the openai client's types: done, without effect on the text, or refused by name."""

import copy
import itertools
import json
import re
import urllib.error
import urllib.request

import pytest
from openai.types import Completion
from openai.types import completion_create_params as of_completions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.chat import completion_create_params as of_chats
from support.serving import serving

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.server.bodies import IGNORED, SUPPORTED, RequestError, RequestLimits
from hf_lossy_assist.server.bodies import NEUTRAL as NEUTRAL_VALUES
from hf_lossy_assist.server.requests import read_request


TURN = {"role": "user", "content": demo.problems(1, seed=7)[0].prompt}
CHAT = {"model": "demo", "messages": [TURN], "max_tokens": 4, "temperature": 0}
COMPLETION = {"model": "demo", "prompt": TURN["content"], "max_tokens": 4, "temperature": 0}
SDK = {"role": "assistant", "content": "yo", "refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}

NEUTRAL = [  # for both addresses: the text is as without them
    {"n": 1}, {"n": None}, {"best_of": 1}, {"best_of": None}, {"frequency_penalty": 0.0}, {"presence_penalty": 0}, {"logit_bias": {}}, {"logit_bias": None},
    {"stop": None}, {"stop": []}, {"seed": None}, {"seed": -1}, {"seed": 5}, {"user": "u"}, {"top_p": 1}, {"top_p": 1.0}, {"temperature": 0.0}, {"lossy_policy": None},
    {"lossy_policy": "strict"}, {"repetition_penalty": 1.0}, {"min_p": 0.0}, {"top_k": -1}, {"top_k": 0}, {"min_tokens": 0}, {"ignore_eos": False},
    {"skip_special_tokens": True}, {"stop_token_ids": []}, {"include_stop_str_in_output": False}, {"length_penalty": 1.0}, {"use_beam_search": False},
    {"echo": False}, {"logprobs": None}, {"top_logprobs": None}, {"stream_options": None}, {"priority": 0}, {"request_id": "r"}, {"bad_words": []},
    {"spaces_between_special_tokens": True}, {"truncate_prompt_tokens": None}, {"guided_json": None}, {"max_completion_tokens": None},
]  # fmt: skip
CHATS = [
    {"logprobs": False}, {"logprobs": False, "top_logprobs": 0}, {"response_format": {"type": "text"}}, {"response_format": None}, {"tools": []}, {"tool_choice": "none"},
    {"tools": None, "tool_choice": None}, {"tools": [], "tool_choice": "auto"}, {"metadata": {}}, {"metadata": {"a": "b"}}, {"store": False}, {"store": True},
    {"service_tier": "auto"}, {"parallel_tool_calls": True}, {"modalities": ["text"]}, {"reasoning_effort": None}, {"reasoning_effort": "medium"}, {"audio": None},
    {"prediction": None}, {"prediction": {"type": "content", "content": "We"}}, {"prediction": {"type": "content", "content": [{"type": "text", "text": "We"}]}},
    {"web_search_options": None}, {"safety_identifier": "abc"}, {"prompt_cache_key": "abc"}, {"prompt_cache_retention": "24h"}, {"verbosity": None},
    {"verbosity": "medium"}, {"functions": None, "function_call": None}, {"functions": [], "function_call": "none"}, {"max_completion_tokens": 4, "max_tokens": None},
    {"add_generation_prompt": True}, {"add_generation_prompt": False}, {"continue_final_message": False}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": []}, {"chat_template_kwargs": None},
    {"messages": [TURN | {"name": "bob"}]}, {"messages": [{"role": "user", "content": [{"type": "text", "text": TURN["content"]}]}]},
    {"messages": [TURN | {"role": "developer"}]}, {"messages": [TURN | {"role": "system"}]}, {"continue_final_message": True},
]  # fmt: skip
COMPLETIONS = [{"suffix": None}, {"suffix": ""}, {"prompt": [TURN["content"]]}, {"logprobs": False}, {"add_special_tokens": None}]  # fmt: skip
MORE = [  # done, and another answer
    (CHAT, {"n": 3}), (CHAT, {"n": 2, "temperature": 1.5, "seed": 3}), (CHAT, {"logprobs": True}), (CHAT, {"logprobs": True, "top_logprobs": 5, "n": 2}),
    (CHAT, {"max_tokens": 4096}), (CHAT, {"max_tokens": None}), (CHAT, {"stop": ["a", "e"]}), (CHAT, {"messages": [TURN, SDK, TURN]}),
    (CHAT, {"messages": [TURN, {"role": "assistant", "content": " We go"}]}), (CHAT, {"stream_options": {"include_usage": True}}),
    (CHAT, {"temperature": 1.0, "top_p": 0.5, "top_k": 3, "seed": 1}), (CHAT, {"stop": "<eos>"}), (CHAT, {"stop": ["a"], "logprobs": True, "n": 2}),
    (COMPLETION, {"prompt": [TURN["content"], "How many"], "n": 2}), (COMPLETION, {"prompt": [[5, 6], [7]]}), (COMPLETION, {"prompt": [5, 6, 7]}),
    (COMPLETION, {"logprobs": 0}), (COMPLETION, {"logprobs": 5, "prompt": ["a", "How many"]}), (COMPLETION, {"max_tokens": 1}), (COMPLETION, {"n": 2, "best_of": 2}),
]  # fmt: skip
REFUSED = [
    (CHAT, {"tools": [TOOL]}, "tools"), (CHAT, {"tool_choice": "required"}, "tool_choice"), (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    (CHAT, {"logit_bias": {"5": 10}}, "logit_bias"), (CHAT, {"presence_penalty": 0.5}, "presence_penalty"), (CHAT, {"n": True}, "n"), (CHAT, {"n": 10**9}, "n"),
    (CHAT, {"top_logprobs": 3}, "top_logprobs: needs logprobs: true"), (CHAT, {"logprobs": 3}, "logprobs: Input should be a valid boolean"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities"), (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"prompt": "a"}, "'prompt'"), (CHAT, {"prediction": {"type": "content"}}, "prediction"), (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "stream_options"),
    (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"), (CHAT, {"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"), (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (CHAT, {"messages": []}, "messages"), (CHAT, {"messages": [TURN | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (COMPLETION, {"echo": True}, "echo"), (COMPLETION, {"echo": 0}, "echo"), (COMPLETION, {"suffix": "end"}, "suffix"), (COMPLETION, {"n": 2, "best_of": 1}, "best_of"),
    (COMPLETION, {"logprobs": True}, "logprobs"), (COMPLETION, {"logprobs": 21}, "logprobs"), (COMPLETION, {"top_logprobs": 2}, "top_logprobs"), (COMPLETION, {"messages": [TURN]}, "'messages'"),
    (COMPLETION, {"prompt": []}, "prompt"), (COMPLETION, {"prompt": ["a", 5]}, "prompt"), (COMPLETION, {"prompt": [[5], []]}, "prompt"), (COMPLETION, {"prompt": [5, True]}, "prompt"),
    (COMPLETION, {"prompt": ["a"] * 60, "n": 3}, "n"), (COMPLETION, {"prompt": ["a"] * 200}, "prompt"), (COMPLETION, {"prompt": None}, "prompt"), (COMPLETION, {"seed": -2}, "seed"),
    (COMPLETION, {"stream": "yes"}, "stream"), (COMPLETION, {"typo": None}, "'typo'"), (COMPLETION, {"stop": [5]}, "stop"), (COMPLETION, {"stop": [""]}, "stop"),
]  # fmt: skip
LIMITS = RequestLimits({"strict": hla.as_policy("strict"), "svip": hla.as_policy("svip")}, 64, 256)


def read(tokenizer, body, base=None):
    return read_request(body, tokenizer, "demo", LIMITS, chat="messages" in (base or body))


@pytest.fixture(scope="module")
def tokenizer():
    return demo.load().tokenizer


def test_neutral_values_change_no_text(tokenizer):
    """Seeds do not in greedy decoding, and a prediction is a hint about speed."""
    cases = [(base, more) for base in (CHAT, COMPLETION) for more in NEUTRAL]
    cases += [(CHAT, more) for more in CHATS] + [(COMPLETION, more) for more in COMPLETIONS]
    for base, more in cases:
        texts = [read(tokenizer, body).texts for body in (base, base | more)]
        for plain, text in zip(*texts, strict=True):
            assert (plain.ids, plain.policy, plain.sampling) == (text.ids, text.policy, text.sampling), more
            assert plain.arguments == {n: v for n, v in text.arguments.items() if n != "seed"}, more
            assert not text.stops.texts and not text.stream and text.grammar is None and text.tools is None, more


def test_what_is_refused_by_name(tokenizer):
    many = {"tools": [{"type": "function", "function": {f"x{n}": 1 for n in range(1000)}}]}
    for base, more, name in [*REFUSED, (CHAT, many, "the body has 1001 errors")]:
        with pytest.raises(RequestError, match=f"^{re.escape(name)}") as refused:
            read(tokenizer, base | more, base)
        assert "\n" not in str(refused.value) and refused.value.status == 400, more


@pytest.fixture(scope="module")
def ask():
    """Send a body to its address; return the objects of the answer as the openai client reads them."""
    models = demo.load()
    with serving((models.target, models.draft, models.tokenizer), ("strict", "svip"), rows=4, waiting=124) as running:

        def send(body):
            chat = "messages" in body
            address = f"{running.url}/{'chat/' if chat else ''}completions"
            request = urllib.request.Request(address, json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as reply:  # raises for any other status
                data = reply.read().decode()
            if not body["stream"]:
                return (ChatCompletion if chat else Completion).model_validate_json(data)
            *events, done = data.strip().split("\n\n")
            assert done == "data: [DONE]" and all(event.startswith("data: ") for event in events)
            if chat:
                return [ChatCompletionChunk.model_validate_json(event[6:]) for event in events]
            # Completion knows no null as finish_reason, which OpenAI's streams have: the client does not look.
            return [Completion.model_validate(unfinished(json.loads(event[6:]))) for event in events]

        yield send
        assert running.free() and running.worker.error is None


def unfinished(event):
    event["choices"] = [choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]]
    return event


def texts(answer):
    """The texts of an answer with why they ended, by their places, streamed or not."""
    out = {}
    for part in answer if isinstance(answer, list) else [answer]:
        for choice in part.choices:
            message = getattr(choice, "message", None) or getattr(choice, "delta", None)
            text, end = out.get(choice.index, ("", None))
            out[choice.index] = (
                text + ((message.content if message else choice.text) or ""),
                choice.finish_reason or end,
            )
    return out


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.full), True])
def test_what_is_served(ask, stream):
    for base, more in MORE:
        answer = ask({**base, **more, "stream": stream})
        prompt = more.get("prompt")
        prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
        assert sorted(texts(answer)) == list(range(prompts * more.get("n", 1))), more
        assert all(end in ("stop", "length") for _, end in texts(answer).values()), more


WRONG = [
    None, True, False, -1, 0, 3, 97, 10**30, -0.5, 0.3, 1e30, "", "x", "strict", "a\nb", "\x1b[31m", [], {}, [1], [[1, 2]], {"name": "svip"}, ["strict"],
    {"a": {"b": [None]}}, [None] * 500, "x" * 20_000,
]  # fmt: skip


@pytest.mark.parametrize("sent", [False, pytest.param(True, marks=pytest.mark.full)])
def test_any_value_of_any_field_is_refused_in_one_line_or_served(tokenizer, request, sent):
    served, fields = [], sorted((SUPPORTED | IGNORED | set(NEUTRAL_VALUES)) - {"model"})
    for base, name, value in itertools.product((CHAT, COMPLETION), fields, WRONG):
        body = copy.deepcopy(base | {name: value})
        try:
            read(tokenizer, body, base)
        except RequestError as error:
            assert "\n" not in str(error) and len(str(error)) <= 600, (name, value)
        else:
            served.append({"stream": False} | base | {name: value})
    assert len(served) > 100
    for body in served[:: len(served) // 60] if sent else []:
        try:
            request.getfixturevalue("ask")(body)
        except urllib.error.HTTPError as refused:  # by `generate`
            assert refused.code == 400, body


def test_every_field_of_the_openai_client_is_known():
    for params in (of_chats.CompletionCreateParamsBase, of_completions.CompletionCreateParamsBase):
        assert set(params.__annotations__) <= SUPPORTED | IGNORED | set(NEUTRAL_VALUES)
    assert not SUPPORTED & IGNORED and not (SUPPORTED | IGNORED) & set(NEUTRAL_VALUES)
