"""Damaged, hostile and careless JSON gets one line, by this package at every place where a user's file or the Hub's is read."""

import gzip
import json
import re
from pathlib import Path

import pytest
import refused
from support.profiles import profile

from hf_lossy_assist import LossyPolicy, as_policy, demo
from hf_lossy_assist.artifacts.head import CONFIG, WEIGHTS, Head
from hf_lossy_assist.artifacts.json_io import DEEPEST, parse_json
from hf_lossy_assist.artifacts.sv_profile import PROFILE, Profile
from hf_lossy_assist.tasks.load import ExactTask
from hf_lossy_assist.tasks.prompts import read_prompts


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


def prompts(folder, data):
    (folder / "p.jsonl").write_bytes(b'{"prompt": "a"}\n' + data.replace(b"\n", b" ") + b"\n")
    read_prompts(folder / "p.jsonl")


def task_rows(folder, data):
    (folder / "p.jsonl").write_bytes(data.replace(b"\n", b" "))
    ExactTask(folder / "p.jsonl").problems()


def packed_rows(folder, data):
    (folder / "p.jsonl.gz").write_bytes(gzip.compress(data.replace(b"\n", b" ")))
    ExactTask(folder / "p.jsonl.gz").problems()


PLACES = [policy_folder, policy_text, head_config, profile_facts, prompts, task_rows, packed_rows]
DEEP = 1000
BAD = {
    "lists": (b'{"stop": ' + b"[" * DEEP + b"]" * DEEP + b"}", "inside one another"),
    "objects": (b'{"stop": ' * DEEP + b"1" + b"}" * DEEP, "inside one another"),
    "a hundred thousand": (b'{"stop": ' + b"[" * 10**5, "inside one another"),
    "behind a text": (b'{"stop": "\\"[[", "a": ' + b"[" * DEEP + b"]" * DEEP + b"}", "inside one another"),
    "a key twice": (b'{"stop": "svip", "prompt": "a", "stop": "constant"}', "'stop' twice"),
    "a key twice, further in": (b'{"prompt": "a", "stop": {"name": "svip", "h": 0.1, "h": 0.9}}', "'h' twice"),
    "NaN": (b'{"prompt": "a", "stop": {"name": "svip", "h": NaN}}', "NaN is no number"),
    "too large for a float": (b'{"prompt": "a", "stop": {"name": "svip", "h": 1e400}}', "1e400.* too large"),
    "400 digits": (b'{"prompt": "a", "gamma": 1' + b"0" * 400 + b"}", "401 digits"),
    "5000 digits": (b'{"prompt": "a", "gamma": 1' + b"0" * 5000 + b"}", "5001 digits"),
    "half a pair": (b'{"prompt": "a\\ud83d", "stop": "svip"}', "half of a surrogate pair"),
    "cut off": (b'{"prompt": "a', "not JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', "not UTF-8"),
    "too long": (b'{"prompt": "' + b"a" * 2**24 + b'"}', "has more than [0-9]+ bytes"),
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
    if place is policy_text and name in ("no UTF-8", "too long"):
        return  # a text is no file
    line = refusal(place, tmp_path, data)
    assert re.search(words, line) and len(line) < 500, line[:500]


def test_infinity_stands_in_policies_alone(tmp_path):
    """Their own JSON form has it: a threshold that is never reached."""
    assert as_policy('{"stop": {"name": "svip", "h": Infinity}}').stop.h == float("inf")
    for place in (head_config, profile_facts, prompts, task_rows):
        assert "Infinity" in refusal(place, tmp_path, b'{"prompt": "a", "h": Infinity}')


def test_a_policy_given_as_a_dict_may_not_be_bottomless():
    spec = {"name": "svip"}
    for _ in range(DEEP):
        spec = {"name": "any_of", "stops": [spec]}
    assert "inside one another" in refusal(as_policy, {"stop": spec})
    around = {"name": "any_of"}
    around["stops"] = [around, around]
    assert "inside one another" in refusal(as_policy, {"stop": around})


def test_what_is_right_is_read():
    text = '{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00 [[{{"], "b": {"c": "' + "[" * 500 + '"}}'
    assert parse_json(text, "here") == json.loads(text)
    assert parse_json("[" * DEEPEST + "]" * DEEPEST, "here") == json.loads("[" * DEEPEST + "]" * DEEPEST)
    assert parse_json("1" * 308, "here") == int("1" * 308)


def test_a_file_without_an_end_is_not_read_to_it():
    assert "has more than" in refusal(Head.read, Path("/dev/zero"), Path("/dev/null"))
