"""Damaged and careless JSON gets one line, at every place where a file of anybody's is read."""

import json
import re

import pytest
import refused
from support.profiles import profile

from hf_lossy_assist import LossyPolicy, as_policy, demo
from hf_lossy_assist.artifacts.files import parse_json, read_json
from hf_lossy_assist.artifacts.head import CONFIG, WEIGHTS, Head
from hf_lossy_assist.artifacts.sv_profile import PROFILE, Profile


def policy_folder(folder, data):
    (folder / "policy.json").write_bytes(data)
    LossyPolicy.from_pretrained(folder)


def policy_text(folder, data):
    as_policy("{" + data.decode("utf-8", "surrogateescape").removeprefix("{"))


def head_config(folder, data):
    (folder / CONFIG).write_bytes(data)
    (folder / WEIGHTS).write_bytes((demo.FOLDER / "sprinter_head" / WEIGHTS).read_bytes())
    Head.from_pretrained(folder)


def profile_facts(folder, data):
    profile().save_pretrained(folder)
    (folder / PROFILE).write_bytes(data)
    Profile.from_pretrained(folder)


PLACES = [policy_folder, policy_text, head_config, profile_facts]
BAD = {
    "a hundred thousand": (b'{"stop": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "inside one another"),
    "a key twice, further in": (b'{"prompt": "a", "stop": {"name": "svip", "h": 0.1, "h": 0.9}}', "'h' twice"),
    "NaN": (b'{"prompt": "a", "stop": {"name": "svip", "h": NaN}}', "NaN is no number"),
    "too large for a float": (b'{"prompt": "a", "stop": {"name": "svip", "h": 1e400}}', "1e400 is no number"),
    "5000 digits": (b'{"prompt": "a", "gamma": 1' + b"0" * 5000 + b"}", "limit .*for integer string conversion"),
    "cut off": (b'{"prompt": "a', "not JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not JSON: 'utf-8' codec"),
}


def refusal(call, *given):
    error = refused.refusal(lambda: call(*given))
    assert refused.fault(error) is None, f"{refused.fault(error)}: {str(error)[:200]!r}"
    return str(error)


@pytest.mark.full(every=2)
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("name", BAD)
def test_bad_json_is_refused_in_one_line(tmp_path, place, name):
    data, words = BAD[name]
    if place is policy_text and name == "no UTF-8":
        return  # a text is no file
    line = refusal(place, tmp_path, data)
    assert re.search(words, line) and len(line) < 500, line[:500]


def test_a_file_that_is_too_long_is_not_read(tmp_path):
    with open(tmp_path / "a.json", "wb") as file:
        file.truncate(2**24 + 1)
    assert "has more than 16777216 bytes" in refusal(read_json, tmp_path / "a.json")


def test_infinity_stands_in_policies_alone(tmp_path):
    """Their own JSON form has it: a threshold that is never reached."""
    assert as_policy('{"stop": {"name": "svip", "h": Infinity}}').stop.h == float("inf")
    for place in (head_config, profile_facts):
        assert "Infinity" in refusal(place, tmp_path, b'{"prompt": "a", "h": Infinity}')


def test_a_policy_given_as_a_dict_may_not_be_bottomless():
    spec = {"name": "svip"}
    for _ in range(1000):
        spec = {"name": "any_of", "stops": [spec]}
    assert "inside one another" in refusal(as_policy, {"stop": spec})
    around = {"name": "any_of"}
    around["stops"] = [around, around]
    assert "inside one another" in refusal(as_policy, {"stop": around})


def test_what_is_right_is_read():
    text = '{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00 [[{{"], "b": {"c": "' + "[" * 500 + '"}}'
    assert parse_json(text, "here") == json.loads(text)
    assert parse_json("1" * 308, "here") == int("1" * 308)


def test_devices_are_not_read():
    with pytest.raises(ValueError, match="^/dev/zero is a device or a pipe"):
        read_json("/dev/zero")
