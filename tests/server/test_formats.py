"""`response_format`: texts of a schema through the server, as `generate` writes them; and schemas that nobody should have to wait for."""

import json
import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pydantic
import pytest
import torch
from support import schemas, small
from support.serving import serving
from tokenizers import decoders

import hf_lossy_assist as hla
from hf_lossy_assist.server import grammar_process, grammars
from hf_lossy_assist.server.grammar_process import MOST_SPACES, TooMuch


xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is not installed: make install brings it")

SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["id", "ok"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
TURN = {"role": "user", "content": "ab 12"}


@pytest.fixture(scope="module")
def running():
    tokenizer, target = schemas.tokenizer(), hla.enable(schemas.target())
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()  # no spaces between tokens
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with serving((target, small.near(target, 0.2), tokenizer), ("strict",), rows=4) as running:
        yield running


def complete(running, prompt="ab 12", given=FORMAT, **more):
    body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 60} | more
    return running.client().completions.create(**body, extra_body={"response_format": given})


def collect(stream):
    """The text of a streamed answer, and why it ended."""
    pieces = [chunk.choices[0] for chunk in stream]
    texts = [piece.text if hasattr(piece, "text") else piece.delta.content or "" for piece in pieces]
    return "".join(texts), pieces[-1].finish_reason


def test_the_text_is_that_of_generate(running):
    """Several prompts at a time, greedy and sampled, streamed and not; beside a text that is free."""
    worker, prompts = running.worker, ["ab 12", "id", "true"]
    compiler = xgrammar.GrammarCompiler(grammars.make_tokenizer_info(worker.tokenizer, None))
    compiled = compiler.compile_json_schema(json.dumps(SCHEMA), max_whitespace_cnt=MOST_SPACES)
    with ThreadPoolExecutor(4) as pool:
        free = pool.submit(lambda: running.client().completions.create(model="demo", prompt="ab", max_tokens=40))
        found = [*pool.map(lambda prompt: complete(running, prompt), prompts)]
    assert free.result().choices[0].text
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([worker.tokenizer(prompt)["input_ids"]])
        out = worker.target.generate(
            ids, max_new_tokens=60, do_sample=False, logits_processor=[hla.structured(compiled, worker.tokenizer)]
        )
        text = worker.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        end = "stop" if out[0, -1] == small.EOS else "length"
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, end), prompt
    ended = found[0].choices[0]
    assert ended.finish_reason == "stop" and set(json.loads(ended.text)) == {"id", "ok"}
    assert collect(complete(running, stream=True)) == (ended.text, "stop")
    sampled = complete(running, temperature=1, seed=3, n=3, logprobs=2).choices
    assert len({choice.text for choice in sampled}) == 3 and any(c.finish_reason == "stop" for c in sampled)
    for choice in sampled:
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert set(json.loads(choice.text)) == {"id", "ok"}


class Answer(pydantic.BaseModel):
    kind: Literal["one", "two"]
    ok: bool


def test_the_openai_client_parses_a_model(running):
    """With the schema that the client makes of it, in one piece and from a stream."""
    chats, body = running.client().chat.completions, {"model": "demo", "messages": [TURN], "max_tokens": 200}
    answer = chats.parse(**body, response_format=Answer, seed=1)
    with chats.stream(**body, response_format=Answer, seed=1) as stream:
        final = stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Answer)
    assert answer.choices[0].message.parsed == final.choices[0].message.parsed


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


REFUSED = [
        ({"type": "xml"}, "response_format.type: Input should be 'text'"), ({"type": "json_schema"}, "json_schema is for type json_schema, and needed there"),
        ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema is for type json_schema"), ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema: Field required"),
        (schema_format({"not": {"type": "null"}}), '"not" is not held'), (schema_format({"type": "strin"}), "no schema that can be held to"),
        (schema_format({"const": "x" * 2**17}), "characters, and 131072 are the most"), (schema_format({"enum": [[[[]]] * 2] * 9} | {"a": eval("[" * 70 + "]" * 70)}), "64 levels deep"),
        (schema_format({"type": "string", "pattern": "(?=a)b"}), "looks around"), (schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "response_format: "),
        (schema_format({"const": {"a": "é"}}), "cannot write"),
]  # fmt: skip


def test_what_cannot_be_held_is_refused_by_name(running):
    for given, says in REFUSED:
        with pytest.raises(openai.BadRequestError) as refused:
            complete(running, given=given)
        assert refused.value.type == "invalid_request_error"
        line = refused.value.body["message"]
        assert line.startswith("response_format") and says in line and "\n" not in line and len(line) < 1000
    turns = [TURN, {"role": "assistant", "content": '{"id"'}]
    with pytest.raises(openai.BadRequestError, match="not supported while the last message is continued"):
        running.client().chat.completions.create(model="demo", messages=turns, response_format=FORMAT)


def waiting(compiler):
    return sum(not future.done() for future in compiler.compiled.values())


@pytest.mark.full
def test_a_hard_schema_delays_no_other_request(running, monkeypatch):
    """While it is compiled, other texts are written, and a schema that is known is used."""
    complete(running)
    compiler = running.server.grammars
    before = compiler.process.process
    os.kill(before.pid, signal.SIGSTOP)  # a schema that takes for ever, whatever xgrammar learns to compile
    with ThreadPoolExecutor(2) as pool:
        hard = pool.submit(complete, running, given=schema_format({"type": "string", "maxLength": 5}))
        while not waiting(compiler) and not hard.done():
            time.sleep(0.01)
        assert complete(running).choices[0].finish_reason == "stop"
        assert running.client().completions.create(model="demo", prompt="ab", max_tokens=4).choices[0].text
        assert not hard.done() and waiting(compiler)
        monkeypatch.setattr(grammars, "MOST_WAITING", 1)
        with pytest.raises(openai.InternalServerError, match="too many schemas are being compiled"):
            complete(running, given=schema_format({"type": "null"}))
        before.kill()  # in place of its clock
        with pytest.raises(openai.BadRequestError, match="response_format: .*takes more than 30 seconds or too much"):
            hard.result()
    assert running.free() and not waiting(compiler)


@pytest.mark.full
def test_a_server_that_ends_waits_for_no_schema():
    tokenizer, target = schemas.tokenizer(), hla.enable(schemas.target())
    with ThreadPoolExecutor(2) as pool:
        with serving((target, target, tokenizer), ("strict",), grace=0.2) as other:
            complete(other)
            os.kill(other.server.grammars.process.process.pid, signal.SIGSTOP)
            sent = [pool.submit(complete, other, given=schema_format({"const": n})) for n in range(2)]
            while waiting(other.server.grammars) < 2 and not any(each.done() for each in sent):
                time.sleep(0.01)
        assert all(isinstance(each.exception(), openai.OpenAIError) for each in sent)
    other.server.grammars._thread.shutdown(wait=True)
    assert other.server.grammars.process.process is None


@pytest.mark.full
def test_a_process_that_ends_or_takes_too_long_is_begun_again(running, monkeypatch):
    complete(running)
    process = running.server.grammars.process
    with pytest.raises(ValueError, match="strin"):
        process.compile("schema", '{"type": "strin"}')
    process.process.kill()
    process.process.join()
    with pytest.raises(TooMuch, match="too much memory"):
        process.compile("schema", "{}")
    assert complete(running, given=schema_format({"type": "null"})).choices[0].text == "null"
    inner = process.process
    monkeypatch.setattr(process, "seconds", 0.2)
    os.kill(inner.pid, signal.SIGSTOP)
    with pytest.raises(TooMuch, match="takes more than 0.2 seconds"):
        process.compile("schema", "{}")
    assert not inner.is_alive() and process.process is None


def serve_with_less(pipe, info):
    """In the process that compiles: nothing is small enough, and for some grammars there is too little memory."""
    original = xgrammar.Grammar.from_json_schema
    grammar_process.MOST_COMPILED = 8
    xgrammar.Grammar.from_json_schema = lambda text, **more: original(text if "GB" not in text else int("std::bad_alloc"), **more)  # fmt: skip
    SERVE(pipe, info)


SERVE = grammar_process.serve


@pytest.mark.full
def test_a_grammar_that_takes_too_much_memory_is_named_as_such(running, monkeypatch):
    """And not remembered as a wrong schema: where there is more memory, it is compiled."""
    compiler = running.server.grammars
    for says in ("compiled it has 0 MB, and 0 are the most", "takes more than 4 GB of memory to compile: ask"):
        schema = {"const": says}
        with monkeypatch.context() as patch:
            patch.setattr(grammar_process, "serve", serve_with_less)
            if compiler.process is not None:
                compiler.process.close()
            with pytest.raises(openai.BadRequestError, match=says) as refused:
                complete(running, given=schema_format(schema))
            assert refused.value.body["message"].startswith("response_format: ") and "schema" not in str(refused.value)
            assert compiler.process.process is None, "its memory is given back"
        assert complete(running, given=schema_format(schema), max_tokens=2).choices[0].text.startswith('"')


@pytest.mark.full
def test_where_no_process_begins_the_client_may_ask_again(running, monkeypatch):
    if running.server.grammars.process is not None:
        running.server.grammars.process.close()
    monkeypatch.setattr(grammar_process, "SPAWN", multiprocessing.get_context("spawn"))
    with monkeypatch.context() as patch:
        patch.setattr("multiprocessing.spawn._python_exe", b"/bin/false")
        with pytest.raises(openai.InternalServerError, match="did not begin: ask again") as refused:
            complete(running, given=schema_format({"const": "begun"}))
        assert refused.value.status_code == 503
    assert complete(running, given=schema_format({"const": "begun"})).choices[0].text == '"begun"'


def test_grammars_are_bounded_by_their_bytes_and_their_number(running, monkeypatch):
    compiler = running.server.grammars
    for number in range(3):
        assert complete(running, given=schema_format({"const": number})).choices[0].text == str(number)
    sizes = [future.result()[1] for future in compiler.compiled.values()][-2:]
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "MOST_BYTES", sum(sizes))
        complete(running, given=schema_format({"const": 3}), max_tokens=1)
        assert min(sizes) > 0 and len(compiler.compiled) <= 2
    monkeypatch.setattr(grammars, "MOST_GRAMMARS", 1)
    complete(running, given=schema_format({"const": 4}), max_tokens=1)
    assert len(compiler.compiled) == 1


@pytest.mark.full
def test_without_xgrammar_there_is_one_line(monkeypatch):
    def missing():
        raise ImportError("no")

    tokenizer, target = schemas.tokenizer(), hla.enable(schemas.target())
    monkeypatch.setattr("hf_lossy_assist.text.structured.import_xgrammar", missing)
    with serving((target, target, tokenizer), ("strict",)) as other:
        with pytest.raises(openai.BadRequestError, match="response_format: this server needs xgrammar") as refused:
            complete(other)
        assert "\n" not in refused.value.body["message"]
        assert other.client().completions.create(model="demo", prompt="ab", max_tokens=4).choices[0].text
