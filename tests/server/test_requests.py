"""Requests of clients: fields and messages that are not read are refused by name, and no message is dropped in silence."""

import pytest
from support import small

import hf_lossy_assist as hla
from hf_lossy_assist.server.bodies import ChatBody, RequestError, RequestLimits, find_longest, read_body
from hf_lossy_assist.server.messages import make_turn, read_end, render_chat
from hf_lossy_assist.server.requests import read_request
from hf_lossy_assist.server.routes import read_policies


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def turns_of(*messages):
    return [make_turn(message) for message in read_body(ChatBody, {"messages": [*messages]}).messages]


def test_a_message_of_texts_alone():
    parts = [{"type": "text", "text": "one "}, {"text": "two"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": []}
    turn = {"role": "user", "content": "one two"}
    assert turns_of(message, message | {"name": "Ann"}) == [turn, turn | {"name": "Ann"}]  # the template's


def test_what_is_not_read_of_a_message_is_refused():
    for message, says in (
        ({"role": "assistant", "content": "a", "refusal": "no"}, "'refusal' of a message"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "'tool_calls' of a message"),
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

    assert find_longest(Nested(), model, None) == 64
    assert find_longest(model, object(), None) == 256


ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
KNOWN = "{{% for m in messages %}}{{% if m.role in ({}) %}}<{{{{ m.role }}}}>{{{{ m.content | trim }}}}</>{{% endif %}}{{% endfor %}}"
SYSTEM, DEVELOPER = KNOWN.format("'system', 'user', 'assistant'"), KNOWN.format('"developer", "user"')
NO_SYSTEM = KNOWN.format("'user', 'assistant'")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ANY


def prompt(template, *turns):
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
        assert prompt(template, ("developer", "brief"), ("user", "hi")) == expected


def test_a_message_that_would_be_left_out_is_refused():
    for template, role, says in (
        (NO_SYSTEM, "developer", "leaves out a message of role 'developer'"),
        (NO_SYSTEM, "system", "leaves out a message of role 'system'"),
        (SYSTEM, "critic", "leaves out a message of role 'critic'"),
        (DEVELOPER, "system", "leaves out a message of role 'system'"),
        (STRICT, "developer", "the chat template refuses them: no system"),
        ({"one": ANY, "two": ANY}, "developer", "^messages: "),  # no default
    ):
        with pytest.raises(RequestError, match=says) as refused:
            prompt(template, (role, "brief"), ("user", "brief"))
        assert "\n" not in str(refused.value)
    assert prompt(NO_SYSTEM, ("system", " "), ("user", "hi")) == "<user>hi</>"  # nothing is lost


def test_an_assistants_message_at_the_end_is_continued():
    turns = [("user", "hi"), ("assistant", "I am ")]
    assert prompt(ANY, *turns) == "<user>hi</><assistant>I am "
    assert prompt(SYSTEM, *turns) == "<user>hi</><assistant>I am"  # the template trims
    assert prompt(ANY, ("user", "hi"), ("assistant", "")) == "<user>hi</><assistant>"
    assert prompt(ANY, *turns, ("user", "who?")) == "<user>hi</><assistant>I am </><user>who?</><assistant>"
    with pytest.raises(RequestError, match="the chat template refuses them: continue_final_message"):
        prompt(DEVELOPER, *turns)


def test_many_messages_take_time_by_their_number_alone():
    """Each mark is looked for behind the last one: a client must not hold the server up with one conversation."""
    turns = [("user", "a"), ("assistant", "b")] * 10_000 + [("user", "c")]
    assert prompt(ANY, *turns).endswith("<assistant>")
