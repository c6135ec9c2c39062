"""`tools`: a chat template's form of calls is found, calls are held to their schemas and read of the text, streamed or not, in any pieces."""

import json
import random

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.scripted import scripted, write_script
from support.serving import serving
from support.tokenizers_by_kind import build_tokenizer

from hf_lossy_assist.server.bodies import ChatBody, RequestError, read_body
from hf_lossy_assist.server.messages import make_turn, read_end, render_chat
from hf_lossy_assist.server.tool_calls import CallForm, CallReader, find_form


pytest.importorskip("xgrammar", reason="xgrammar is not installed: make install brings it")

# As Qwen's templates have them: tools and calls as JSON between marks, answers of tools as a user's.
TEMPLATE = (
    "{% if tools %}# Tools {% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif %}{% for m in messages %}{% if m.role == 'tool' %}"
    "user:<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.role }}:{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}<tool_call>\n"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
    "\n</tool_call>{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
FORM = CallForm("<tool_call>", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather", "parameters": SCHEMA, "strict": True},
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TURN = {"role": "user", "content": "is"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


def make_tokenizer(template=TEMPLATE):
    tokenizer = build_tokenizer("byte_level")
    tokenizer.chat_template = template
    return tokenizer


def test_the_form_is_that_of_the_template_or_not_known():
    tokenizer = make_tokenizer()
    assert find_form(tokenizer, TEMPLATE) == FORM
    thinks = TEMPLATE.replace("{{ m.role }}:{{ m.content }}", "{{ m.role }}:<think>\n\n</think>\n\n{{ m.content }}")
    assert find_form(make_tokenizer(thinks), thinks) == FORM
    close = TEMPLATE.replace("{% if not loop.first or m.content %}{{ '\n' }}{% endif %}", "")
    assert find_form(make_tokenizer(close), close) == CallForm(*[*vars(FORM).values()][:4], "")
    for old, new, says in UNKNOWN:
        template = TEMPLATE.replace(old, new)
        with pytest.raises(Exception, match=says):
            find_form(make_tokenizer(template), template)


UNKNOWN = [
    ("{{ tool | tojson }}", "", "does not write calls as"),  # the model does not see them
    ('"arguments": {{ call.function.arguments | tojson }}', "<x>", "does not write calls as"),
    ("</tool_call>", "", "no text marks"),
    ("<tool_call>", "<|im_end|>", "special token"),
    ("{% for call in m.tool_calls or [] %}", "{{ raise_exception('no calls') }}{% for call in [] %}", "no calls"),
    ("{% for call in m.tool_calls or [] %}", "{% for call in [] %}", "does not write calls as"),
]


def read(text, pieces):
    """The content, the calls, whether one is open, and what streamed deltas come to."""
    reader, content, calls = CallReader(FORM, ["weather", "clock"]), "", []
    for k, piece in enumerate(pieces):
        for delta in reader.more(piece, last=k == len(pieces) - 1):
            content += delta.get("content", "")
            for part in delta.get("tool_calls", []):
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": part["type"], "function": dict(part["function"])})
                else:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert (content, calls) == (reader.content, reader.calls) and len({call["id"] for call in calls}) == len(calls)
    return content, [(call["function"]["name"], call["function"]["arguments"]) for call in calls], reader.open


PARIS, NOW = ("weather", '{"city": "Paris", "days": 2}'), ("clock", "{}")
ODD = '{"city": "}\\"{\\\\", "a": [{"b": "]"}]}'
READ = [
    ("hello", "hello", [], False), (" hello \n", " hello \n", [], False), ("", "", [], False), ("a <tool_ <tool_call", "a <tool_ <tool_call", [], False),
    (CALL, "", [PARIS], False), (f"{CALL}\n{TIME}", "", [PARIS, NOW], False), (f"I look.\n\n{TIME}\n", "I look.", [NOW], False), (f"{TIME} so", " so", [NOW], False),
    (CALL.replace(PARIS[1], ODD), "", [("weather", ODD)], False), (CALL[:-5], "", [PARIS], True), (CALL[:60], "", [("weather", PARIS[1][: 60 - CALL.index(PARIS[1])])], True),
    (f"ok{CALL[:20]}", "ok", [], True), ("ok<tool_call>", "ok", [], True),
]  # fmt: skip


def test_calls_are_read_in_any_pieces():
    for text, *expected in READ:
        draw = random.Random(text)
        for count in (0, 1, 3, 9, len(text)):
            cuts = sorted(draw.choices(range(len(text) + 1), k=count))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            assert read(text, pieces) == tuple(expected), pieces


class Written:
    """A server whose model writes a given text, as far as it may."""

    def __init__(self, running):
        self.running, self.tokenizer = running, running.worker.tokenizer

    def ask(self, text, stream=False, **more):
        """The answer's message and why it ended, in one piece or put together of a stream's."""
        body = (
            {"model": "demo", "messages": [TURN], "temperature": 0, "max_tokens": 200}
            | {"tools": [WEATHER, CLOCK]}
            | more
        )
        tools = None if body.get("tool_choice") == "none" else show(body["tools"])
        prompt = render(self.tokenizer, body["messages"], tools=tools)
        write_script(self.running.worker.target, self.tokenizer, self.tokenizer(prompt + text)["input_ids"])
        answer = self.running.client().chat.completions.create(**body, stream=stream)
        return joined(answer) if stream else read_choice(answer)


def render(tokenizer, messages, tools=None, **more):
    chat = read_body(ChatBody, {"messages": messages} | more)
    return render_chat([make_turn(message) for message in chat.messages], tokenizer, read_end(chat), tools)


def show(tools):
    """As a template is given them."""
    empty = {"type": "object", "properties": {}}
    return [
        {"type": "function", "function": {"name": f["name"], "description": f.get("description", ""), "parameters": f.get("parameters", empty)}}
        for f in (tool["function"] for tool in tools)
    ]  # fmt: skip


def read_choice(answer):
    assert isinstance(answer, ChatCompletion)
    choice = answer.choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    assert all(call.id.startswith("call_") and call.type == "function" for call in choice.message.tool_calls or [])
    return choice.message.content, calls, choice.finish_reason


def joined(stream):
    content, calls, end = "", [], None
    for chunk in stream:
        assert isinstance(chunk, ChatCompletionChunk)
        delta, end = chunk.choices[0].delta, chunk.choices[0].finish_reason or end
        content += delta.content or ""
        for part in delta.tool_calls or []:
            if part.index == len(calls):
                calls.append([part.function.name, ""])
                assert part.id.startswith("call_") and part.type == "function"
            calls[part.index][1] += part.function.arguments
    return content or (None if calls else ""), [tuple(call) for call in calls], end


@pytest.fixture(scope="module")
def served():
    tokenizer = make_tokenizer()
    model = scripted(tokenizer, [5] * 40, width=700)
    with serving((model, model, tokenizer), ("strict",), most=200, longest=700) as running:
        yield running


@pytest.fixture
def model(served):
    return Written(served)


ANY_ARGUMENTS = {"type": "function", "function": {"name": "free", "parameters": {}}}
FREE = '<tool_call>\n{"name": "free", "arguments": {"a": 1}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
def test_answers(model, stream):
    for text, more, expected in (
        ("The Paris", {}, ("The Paris", [], "stop")), (f"I look.\n{CALL}", {}, ("I look.", [PARIS], "tool_calls")),
        (f"{CALL}\n{TIME}", {}, (None, [PARIS, NOW], "tool_calls")),
        (f"{CALL}\n{TIME}", {"parallel_tool_calls": False}, (None, [PARIS], "tool_calls")),
        (CALL, {"max_tokens": 30}, ("", [], "length")),
        (CALL, {"max_tokens": 60}, (None, [("weather", PARIS[1][:19])], "length")),
        (CALL, {"tool_choice": "none"}, (CALL, [], "stop")),
        (CALL, {"tool_choice": "required"}, (None, [PARIS], "tool_calls")),
        (TIME, {"tool_choice": NAMED}, (None, [NOW], "tool_calls")),
        (FREE, {"tools": [ANY_ARGUMENTS]}, (None, [("free", '{"a": 1}')], "tool_calls")),
        (CALL, {"response_format": {"type": "json_object"}}, (None, [PARIS], "tool_calls")),
        ('{"a": 1}', {"response_format": {"type": "json_object"}}, ('{"a": 1}', [], "stop")),
    ):  # fmt: skip
        assert model.ask(text, stream, **more) == expected, (text, more)


def test_a_conversation_with_calls_and_answers():
    """The template is given what it is made for; what it leaves out is refused."""
    call = {
        "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "a": null}'},
    }  # fmt: skip
    turns = [TURN, {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}]
    turns.append({"role": "tool", "tool_call_id": "c1", "content": "cold"})
    text = render(make_tokenizer(), turns)
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "a": null}}\n</tool_call>' in text
    assert text.endswith("user:<tool_response>cold</tool_response>\nassistant:")
    deaf = TEMPLATE.replace("{% for call in m.tool_calls or [] %}", "{% for call in [] %}")
    with pytest.raises(RequestError, match="leaves out a call of a tool"):
        render(make_tokenizer(deaf), turns[:2], add_generation_prompt=True)
    tools = show([WEATHER, CLOCK])
    with pytest.raises(RequestError, match="tools: the chat template does not show them all"):
        render(make_tokenizer(TEMPLATE.replace("in tools %}", "in tools[:1] %}")), [TURN], tools)


def function(**more):
    return {"tools": [{"type": "function", "function": {"name": "f"} | more}]}


REFUSED = [
        ({"tools": [CLOCK] * 129}, "tools: List should have at most 128"), ({"tools": [CLOCK] * 2}, "tools: two functions have one name"),
        ({"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools.0.type: Input should be 'function'"), (function(x=1), "tools.0.function.x: Extra inputs are not permitted"),
        (function(name="a b"), "tools.0.function.name: String should match"), (function(parameters={"type": "array"}), "tools: f: parameters: expected a JSON schema"),
        (function(parameters={"not": {}}), 'tools: f: parameters: "not" is not held'), (function(parameters={"properties": {"a": {"const": "x" * 2**17}}}), "tools: f: parameters: it has"),
        (function(parameters={"properties": {"a": {"type": "strin"}}}), "tools: it is no schema"), ({"tools": None, "tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice: 'g' is none of the tools"), ({"logprobs": True}, "logprobs: not supported with tools"),
        ({"messages": [TURN, {"role": "assistant", "content": "a"}]}, "tools: not supported while the last message is continued"),
]  # fmt: skip


def test_what_is_refused_by_name(served, monkeypatch):
    for more, says in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            served.client().chat.completions.create(**{"model": "demo", "messages": [TURN], "tools": [WEATHER]} | more)
        line = refused.value.body["message"]
        assert line.startswith(says) and "\n" not in line and refused.value.type == "invalid_request_error"
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(served.worker.tokenizer, "chat_template", plain)
    create, body = served.client().chat.completions.create, {"model": "demo", "messages": [TURN], "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="tools: this model's chat template has none that can be read"):
        create(**body, tools=[WEATHER])
    assert create(**body, tools=[WEATHER], tool_choice="none").choices[0].message.tool_calls is None
    with pytest.raises(openai.BadRequestError, match="tools are only supported by"):
        served.client().completions.create(model="demo", prompt="is", extra_body={"tools": [WEATHER]})


@pytest.mark.full
def test_arguments_are_of_their_schema_whatever_the_model_would_write(model):
    """A city that the schema does not have; and a text where a call is asked for."""
    for choice in ("auto", "required", {"type": "function", "function": {"name": "weather"}}):
        _, [(name, arguments)], _ = model.ask(CALL.replace("Paris", "Berlin"), tool_choice=choice)
        assert name == "weather" and json.loads(arguments)["city"] in ("Paris", "Rome")
    content, calls, end = model.ask("The Paris", tool_choice=NAMED)
    assert (content, calls[0][0], json.loads(calls[0][1]), end) == (None, "clock", {}, "tool_calls")
