"""Requests that ask for much work, and bodies at random: others are answered beside them, memory is given back, and no status is 500."""

import copy
import http.client
import json
import random

import pytest
from support import small
from support.serving import serving
from support.tokenizers_by_kind import build_tokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.server.bodies import IGNORED, NEUTRAL, SUPPORTED


TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }} {% endfor %}{% endif %}{% for m in messages %}{{ style }}{{ m.role }}:{{ m.content }}"
    """{% for call in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
    "\n</tool_call>{% endfor %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": ["Paris"], "days": 2}'}}
COMMON = {
    "model": "demo", "max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 1, "stop": ["is", "<|im_end|>"], "n": 2, "stream": False,
    "lossy_policy": "strict", "user": "u", "metadata": {"a": "b"}, "logit_bias": {}, "stream_options": {"include_usage": True},
}  # fmt: skip
TURNS = [
    {"role": "system", "content": "The", "name": "a"}, {"role": "user", "content": [{"type": "text", "text": "capital"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "of", "tool_call_id": "1"}, {"role": "user", "content": "is"},
]  # fmt: skip
CHAT = COMMON | {
    "messages": TURNS,
    "chat_template_kwargs": {"style": "plain"},
    "prediction": {"type": "content", "content": "is"},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
BODIES = [
    ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2, "add_generation_prompt": True, "continue_final_message": False}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    ("/v1/chat/completions", CHAT | {"response_format": FORMAT}),
    ("/v1/completions", COMMON | {"prompt": ["The capital", "is"], "logprobs": 2}),
    ("/v1/completions", COMMON | {"prompt": [[5, 6], [7]], "response_format": FORMAT, "stream": True}),
]  # fmt: skip
FIELDS = sorted(SUPPORTED | IGNORED | set(NEUTRAL))
# Texts of JSON, so that they also stand within other texts: bad arguments of a tool's call.
RAW = {"@levels": "[" * 600 + "0" + "]" * 600, "@keys": '{"a":' * 120 + "0" + "}" * 120, "@half": '{"\\ud800": 1}', "@4MB": f'"{"ab " * 2**18}"'}  # fmt: skip
LITERALS = {
    "@deep": "[" * 3000 + "]" * 3000, "@long": "1" + "0" * 5000, "@infinite": "1e999", "@nan": "NaN", "@twice": '{"name": "svip", "name": "strict"}',
    "@open": "[1,", "@bare": "name", "@control": '"\x1b[31m"', "@surrogate": '"\\ud800"',
}  # fmt: skip
WRONG = [
    None, True, False, -1, 0, 3, 97, 10**30, -0.5, 0.3, 1e30, "", "x", "strict", "a\nb", [], {}, [1], [[1, 2]], {"name": "svip"}, ["strict"],
    [None] * 500, "x" * 20_000, *LITERALS,
]  # fmt: skip


@pytest.fixture(scope="module")
def models():
    tokenizer = build_tokenizer("byte_level")
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|special {n:02}|>" for n in range(14)]})
    tokenizer.chat_template = TEMPLATE
    target = small.llama(vocab=len(tokenizer), max_position_embeddings=1024).float()
    hla.enable(target)
    return target, small.near(target, 0.1), tokenizer


def post(port, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", path, body)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def entries(holder):
    """Each object or list within a value with each of its keys."""
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ():
        yield holder, key
        yield from entries(holder[key])


def mutated(rng, value):
    """A copy with one to three entries replaced, left out, in a list or twice."""
    out = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice([*entries(out), (None, None)])
        if holder is None:
            return rng.choice(WRONG)
        how = rng.random()
        if how < 0.65:
            holder[key] = copy.deepcopy(rng.choice(WRONG))
        elif how < 0.8:
            del holder[key]
        elif how < 0.9:
            holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.randint(1, 3))]
        elif isinstance(holder, dict):
            holder[rng.choice(["name", "x", "_", f"{key}s", "\x1b]0;"])] = copy.deepcopy(holder[key])
        else:
            holder.append(copy.deepcopy(holder[key]))
    return out


def drawn_body(rng):
    """A body with some of all fields; most have wrong values, nested ones and long ones among them."""
    path, body = rng.choice(BODIES)
    body = {name: value for name, value in body.items() if name in ("messages", "prompt") or rng.random() < 0.8}
    kind = rng.choice(["right", "mutated", "mutated", "field", "call", "variable"])
    if kind == "mutated":
        body = mutated(rng, body)
    elif kind == "field":
        body[rng.choice(FIELDS)] = rng.choice([*RAW, [*RAW], {"a": "@levels"}, {"a": "@half"}, *RAW.values()])
    elif kind == "call" and "messages" in body:
        arguments = rng.choice([*RAW.values(), '{"a": "\\udc00"}', f'{{"a": {RAW["@levels"]}}}'])
        call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call], rng.choice(["x", "name", "y"]): "@levels"}
        message.pop(rng.choice(["x", "name", "content"]), None)
        body["messages"] = [message]
    elif kind == "variable" and "messages" in body:
        body["chat_template_kwargs"] = {
            rng.choice(["style", "style", "x"]): rng.choice([*RAW, "a" * 10**5, {"b": ["c"]}])
        }
    text = json.dumps(body)
    for name, raw in (RAW | LITERALS).items():
        text = text.replace(f'"{name}"', raw)
    return path, text.encode()


@pytest.mark.parametrize(
    "count", [16, pytest.param(60, marks=pytest.mark.full), pytest.param(2000, marks=pytest.mark.nightly)]
)
def test_no_body_is_answered_with_500(models, count):
    found = dict.fromkeys((200, 400), 0)
    with serving(models, ("strict",), longest=1024) as running:
        for seed in range(count):
            path, text = drawn_body(random.Random(seed))
            status, reply = post(running.port, path, text)
            found[status] = found.get(status, 0) + 1
            assert status < 500 and b'data: {"error"' not in reply, (seed, status, reply, path, text[:2000])
            error = json.loads(reply)["error"]["message"] if status != 200 else ""
            assert "\n" not in error and len(error) <= 600, (seed, error)
        assert running.free() and running.worker.error is None
    print(found)
    assert min(found[200], found[400]) >= count // 10, found
