"""What a client asks for: what is not read of a message is refused by its name."""

import pytest
from support import small

import hf_lossy_assist as hla
from hf_lossy_assist.cli.serve_command import _find_longest, _read_policies
from hf_lossy_assist.server.requests import RequestError, RequestLimits, read_request, read_turn


def test_a_message_of_texts_alone():
    parts = [{"type": "text", "text": "one "}, {"text": "two"}]
    message = {"role": "user", "content": parts, "name": None, "tool_calls": []}
    assert read_turn(message) == {"role": "user", "content": "one two"}


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": "a", "name": "Ann"}, "'name' of a message is not read here"),
        ({"role": "assistant", "content": "a", "tool_calls": [{"id": "1"}]}, "'tool_calls' of a message"),
        ({"role": "tool", "content": "a", "tool_call_id": "1"}, "'tool_call_id' of a message"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}, "text": "a"}]}, "text alone"),
        ({"role": "user", "content": None}, "expected a text"),
        ({"content": "a"}, "expected objects with role and content"),
    ],
)
def test_what_is_not_read_of_a_message_is_refused(message, says):
    with pytest.raises(RequestError, match=says) as refused:
        read_turn(message)
    assert "\n" not in str(refused.value)


def test_a_chat_template_that_makes_nothing():
    class Silent:
        chat_template = "x"

        def apply_chat_template(self, turns, **_):
            return ""

        def __call__(self, text, **_):
            return {"input_ids": []}

    limits = RequestLimits({"strict": hla.as_policy("strict")}, 8, 64)
    with pytest.raises(RequestError, match="the chat template makes nothing of them"):
        read_request({"messages": [{"role": "user", "content": ""}]}, Silent(), "m", limits, chat=True)


def test_policies_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder / "policy").mkdir(parents=True)
        (tmp_path / folder / "policy" / "policy.json").write_text('{"stop": {"name": "constant", "gamma": 3}}')
    first, second = (str(tmp_path / folder / "policy") for folder in ("a", "b"))
    assert list(_read_policies([first, "svip"])) == ["policy", "svip"]
    longer = '{"stop": {"name": "constant",' + " " * 5000 + '"gamma": 3}}'
    assert list(_read_policies([longer])) == [longer]
    for given in ([first, second], ["svip", "svip"]):
        with pytest.raises(ValueError, match="--policies: two of them are called"):
            _read_policies(given)


def test_an_empty_key_in_the_environment_is_refused(hf_lossy, monkeypatch):
    monkeypatch.setenv("HF_LOSSY_API_KEY", "")
    done = hf_lossy("serve", "--port", 0)
    assert done.code == 2 and "--api-key, or HF_LOSSY_API_KEY, is empty" in done.line


@pytest.mark.parametrize("key", ["schlüssel", "tab\tin it", "line\n", " secret"])
def test_a_key_that_no_client_could_present_is_refused(hf_lossy, key):
    done = hf_lossy("serve", "--port", 0, "--api-key", key)
    assert done.code == 2 and "expected ASCII characters" in done.line and key.strip() not in done.line


def test_the_longest_text_of_a_nested_config():
    model, inner = small.llama(), small.llama(max_position_embeddings=64)

    class Nested:
        config = type("Config", (), {"get_text_config": lambda self, decoder: inner.config})()

    assert _find_longest(Nested(), model, None) == 64
    assert _find_longest(model, object(), None) == 256
