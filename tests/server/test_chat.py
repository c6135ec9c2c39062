"""Conversations through chat templates: no message is dropped in silence, and an assistant's last one is continued."""

import pytest
from support import small

from hf_lossy_assist.server.requests import RequestError, render_chat


ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
KNOWN = "{{% for m in messages %}}{{% if m.role in ({}) %}}<{{{{ m.role }}}}>{{{{ m.content | trim }}}}</>{{% endif %}}{{% endfor %}}"
SYSTEM, DEVELOPER = KNOWN.format("'system', 'user', 'assistant'"), KNOWN.format('"developer", "user"')
NO_SYSTEM = KNOWN.format("'user', 'assistant'")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + ANY


def prompt(template, *turns):
    tokenizer = small.tokenizer()
    tokenizer.chat_template = template
    return render_chat([{"role": role, "content": content} for role, content in turns], tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ANY, "<system>brief</><user>hi</><assistant>"),  # it would print any role, and its model knows the system's
        (SYSTEM, "<system>brief</><user>hi</>"),
        (DEVELOPER, "<developer>brief</><user>hi</>"),
        ({"default": DEVELOPER, "tool_use": ANY}, "<developer>brief</><user>hi</>"),
    ],
)
def test_a_developers_message_is_the_systems_where_there_is_no_such_role(template, expected):
    assert prompt(template, ("developer", "brief"), ("user", "hi")) == expected


@pytest.mark.parametrize(
    ("template", "role", "says"),
    [
        (NO_SYSTEM, "developer", "leaves out a message of role 'developer'"),
        (NO_SYSTEM, "system", "leaves out a message of role 'system'"),
        (SYSTEM, "critic", "leaves out a message of role 'critic'"),
        (DEVELOPER, "system", "leaves out a message of role 'system'"),
        (STRICT, "developer", "the chat template refuses them: no system"),
    ],
)
def test_a_message_that_would_be_left_out_is_refused(template, role, says):
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


def test_templates_without_a_default_are_refused_in_one_line():
    with pytest.raises(RequestError, match=r"^messages: [^\n]*$"):
        prompt({"one": ANY, "two": ANY}, ("developer", "brief"), ("user", "hi"))
