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
from support import small
from support.serving import serving

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.server import bodies
from hf_lossy_assist.server.bodies import IGNORED, SUPPORTED, ChatBody, RequestError, RequestLimits, read_body
from hf_lossy_assist.server.messages import make_turn, read_end, render_chat
from hf_lossy_assist.server.requests import read_request
from hf_lossy_assist.server.routes import read_policies


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


@pytest.mark.full
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
    served, fields = [], sorted((SUPPORTED | IGNORED | set(bodies.NEUTRAL)) - {"model"})
    for base, name, value in itertools.product((CHAT, COMPLETION), fields, WRONG):
        body = copy.deepcopy(base | {name: value})
        try:
            read(tokenizer, body, base)
        except RequestError as error:
            assert "\n" not in str(error) and len(str(error)) <= 600, (name, value)
        else:
            served.append({"stream": False} | base | {name: value})
    assert len(served) > 100
    for body in served[:: len(served) // 24] if sent else []:
        try:
            request.getfixturevalue("ask")(body)
        except urllib.error.HTTPError as refused:  # by `generate`
            assert refused.code == 400, body


def test_every_field_of_the_openai_client_is_known():
    for params in (of_chats.CompletionCreateParamsBase, of_completions.CompletionCreateParamsBase):
        assert set(params.__annotations__) <= SUPPORTED | IGNORED | set(bodies.NEUTRAL)
    assert not SUPPORTED & IGNORED and not (SUPPORTED | IGNORED) & set(bodies.NEUTRAL)


# -- messages -----------------------------------------------------------------------------------------------------------
CALLED = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def turns_of(*messages):
    return [make_turn(message) for message in read_body(ChatBody, {"messages": [*messages]}).messages]


def test_a_message_is_read_whole_or_refused():
    parts = [{"type": "text", "text": "one "}, {"text": "two"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": []}
    turn = {"role": "user", "content": "one two"}
    assert turns_of(message, message | {"name": "Ann"}) == [turn, turn | {"name": "Ann"}]  # the template's
    for message, says in (
        ({"role": "assistant", "content": "a", "refusal": "no"}, "'refusal' of a message"),
        ({"role": "user", "content": "a", "tool_calls": [CALLED]}, "'tool_calls' of a message"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "'tool_call_id' of a message"),
        ({"role": "tool", "content": "a"}, "needs the tool_call_id"),
        ({"role": "user", "content": None}, "expected a text"),
    ):
        with pytest.raises(RequestError, match=says) as refused:
            turns_of(message)
        assert "\n" not in str(refused.value)


USER = {"role": "user", "content": "a"}


def calling(arguments):
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}


HEAVY = [
        (calling('{"a": "\\ud800"}'), r"arguments: Invalid JSON: unexpected end of hex escape"),
        (calling('{"a": ' + "[" * 600 + "]" * 600 + "}"), "arguments: Invalid JSON: recursion limit exceeded"),
        (calling("["), "arguments: Invalid JSON"), (calling("[]"), "arguments: Input should be a valid dictionary"),
        ({"chat_template_kwargs": {"style": "a" * 2**15}, "messages": [USER] * 600}, "chat_template_kwargs: 19668600 characters in 600 messages are more than 1048576"),
        ({"chat_template_kwargs": {"style": "a" * 2**14}}, "messages: 16385 characters are more than 256 tokens"),
        ({"stop": ["a" * 200] * 6}, "stop: 1200 characters in all, and 1024 are the most"),
]  # fmt: skip


def test_what_would_take_work_or_is_no_text_is_refused_before_it_is_read():
    tokenizer = small.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ style }}{{ m.content }}{% endfor %}"
    limits = RequestLimits({"strict": hla.as_policy("strict")}, 8, 256)
    nothing = ({"messages": [{"role": "user", "content": ""}]}, "the chat template makes nothing of them")
    for more, says in [*HEAVY, nothing]:
        with pytest.raises(RequestError, match=says) as refused:
            read_request({"messages": [USER]} | more, tokenizer, "m", limits, chat=True)
        assert "\n" not in str(refused.value) and refused.value.status == 400


def test_policies_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "policy").mkdir(parents=True)
        (tmp_path / folder / "policy" / "policy.json").write_text('{"stop": {"name": "constant", "gamma": 3}}')
    first, second = (str(tmp_path / folder / "policy") for folder in ("a", "b"))
    assert list(read_policies(f"{first},svip")) == ["policy", "svip"]
    longer = '{"stop": {"name": "constant",' + " " * 5000 + '"gamma": 3}}'
    assert list(read_policies(longer)) == [longer]
    for given in (f"{first},{second}", "svip,svip"):
        with pytest.raises(ValueError, match="policies: two of them are called"):
            read_policies(given)


def test_a_key_that_no_client_could_present_is_refused(hf_lossy, monkeypatch):
    for key in ("schlüssel", "tab\tin it", "line\n", " secret"):
        line = hf_lossy("serve", "--port", 0, "--api-key", key).line
        assert "expected ASCII characters" in line and key.strip() not in line
    monkeypatch.setenv("HF_LOSSY_API_KEY", "")
    assert "the API key, or HF_LOSSY_API_KEY: expected" in hf_lossy("serve", "--port", 0).line


def test_the_longest_text_of_a_nested_config():
    model, inner = small.llama(), small.llama(max_position_embeddings=64)

    class Nested:
        config = type("Config", (), {"get_text_config": lambda self, decoder: inner.config})()

    assert bodies.find_longest(Nested(), model, None) == 64
    assert bodies.find_longest(model, object(), None) == 256


ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
KNOWN = "{{% for m in messages %}}{{% if m.role in ({}) %}}<{{{{ m.role }}}}>{{{{ m.content | trim }}}}</>{{% endif %}}{{% endfor %}}"
SYSTEM, DEVELOPER = KNOWN.format("'system', 'user', 'assistant'"), KNOWN.format('"developer", "user"')
NO_SYSTEM = KNOWN.format("'user', 'assistant'")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ANY


def render(template, *turns):
    tokenizer = small.tokenizer()
    tokenizer.chat_template = template
    body = read_body(ChatBody, {"messages": [{"role": role, "content": content} for role, content in turns]})
    return render_chat([make_turn(message) for message in body.messages], tokenizer, read_end(body))


def test_a_developers_message_is_the_systems_where_there_is_no_such_role():
    for template, expected in (
        (ANY, "<system>brief</><user>hi</><assistant>"),  # it would print any role, and its model knows the system's
        (SYSTEM, "<system>brief</><user>hi</>"),
        (DEVELOPER, "<developer>brief</><user>hi</>"),
        ({"default": DEVELOPER, "tool_use": ANY}, "<developer>brief</><user>hi</>"),
    ):
        assert render(template, ("developer", "brief"), ("user", "hi")) == expected
    for template, role, says in (
        (NO_SYSTEM, "developer", "leaves out a message of role 'developer'"),
        (NO_SYSTEM, "system", "leaves out a message of role 'system'"),
        (SYSTEM, "critic", "leaves out a message of role 'critic'"),
        (DEVELOPER, "system", "leaves out a message of role 'system'"),
        (STRICT, "developer", "the chat template refuses them: no system"),
        ({"one": ANY, "two": ANY}, "developer", "^messages: "),  # no default
    ):
        with pytest.raises(RequestError, match=says) as refused:
            render(template, (role, "brief"), ("user", "brief"))
        assert "\n" not in str(refused.value)
    assert render(NO_SYSTEM, ("system", " "), ("user", "hi")) == "<user>hi</>"  # nothing is lost


def test_an_assistants_message_at_the_end_is_continued():
    turns = [("user", "hi"), ("assistant", "I am ")]
    assert render(ANY, *turns) == "<user>hi</><assistant>I am "
    assert render(SYSTEM, *turns) == "<user>hi</><assistant>I am"  # the template trims
    assert render(ANY, ("user", "hi"), ("assistant", "")) == "<user>hi</><assistant>"
    assert render(ANY, *turns, ("user", "who?")) == "<user>hi</><assistant>I am </><user>who?</><assistant>"
    with pytest.raises(RequestError, match="the chat template refuses them: continue_final_message"):
        render(DEVELOPER, *turns)
    turns = [("user", "a"), ("assistant", "b")] * 3_000 + [("user", "c")]
    assert render(ANY, *turns).endswith("<assistant>")
