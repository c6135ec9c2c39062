"""Names, files and replies that no right use has, each found by `tools/fuzz.py`: one line of this package."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import fuzz
import pytest
import safetensors.torch
import torch
from fuzzing.verdicts import ELSE, REFUSED, RIGHT
from refused import fault

from hf_lossy_assist import Head, HeadConfig, LinearHead, ModelIdentity, as_policy, demo
from hf_lossy_assist.artifacts.head import CONFIG, WEIGHTS
from hf_lossy_assist.policy.sharing import detect_kind
from hf_lossy_assist.validation import shown


def refused(call, says):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    text = str(error.value)
    assert fault(error.value) is None and says in text and len(text) <= 700 and text.isprintable(), text


LONG = "x" * 5000


@pytest.mark.parametrize("given", [LONG, LONG + ".json", Path(LONG), "org/" + LONG, "\x1b[31mred"])
def test_a_policy_whose_name_is_no_name(given):
    refused(lambda: as_policy(given), "lossy_policy:")


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--policy", "POLICY"),
        ("generate", "--policy", LONG * 20),
        ("generate", "--policy", f"sprinter:head={LONG * 20}"),
        ("generate", "--model", LONG * 20, "--assistant", "x", "--prompt", "x"),
        ("generate", "--prompts", LONG * 20),
        ("generate", "--drafter", LONG * 20),
        ("report", LONG * 20),
        ("collect", "--out", LONG * 20),
        ("serve", "--policies", LONG * 20),
        ("generate", "--" + LONG * 20),
    ],
    ids=lambda words: "-".join(words)[:30],
)
def test_a_line_of_a_command_has_at_most_300_characters(hf_lossy, tmp_path, words):
    (tmp_path / "policy.json").write_text(json.dumps({"stop": {"name": "sprinter", "head": LONG * 20}}))
    line = hf_lossy(*(tmp_path if word == "POLICY" else word for word in words)).line
    assert len(line) <= 300 and line.isprintable()


def test_a_head_in_a_policys_folder_whose_name_is_no_name(tmp_path):
    (tmp_path / "policy.json").write_text(json.dumps({"stop": {"name": "sprinter", "head": LONG * 20}}))
    refused(lambda: as_policy(tmp_path), "names as its head one of its own sub-folders or a repository on the Hub")


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_head_with_weights_that_are_no_numbers(tmp_path, wrong):
    head = LinearHead(HeadConfig(4))
    with torch.no_grad():
        head.linear.weight[0, 2] = wrong
    refused(lambda: head.save_pretrained(tmp_path / "head"), "NaN, infinite")
    assert not (tmp_path / "head").exists()
    LinearHead(HeadConfig(4)).save_pretrained(tmp_path / "head")
    data = safetensors.torch.save(head.tensors())
    (tmp_path / "head" / WEIGHTS).write_bytes(data)
    config = json.loads((tmp_path / "head" / CONFIG).read_text())
    (tmp_path / "head" / CONFIG).write_text(json.dumps(config | {"weights_sha256": hashlib.sha256(data).hexdigest()}))
    refused(lambda: Head.from_pretrained(tmp_path / "head"), "NaN, infinite")


def test_models_are_looked_for_where_they_may_lie_alone(tmp_path):
    """A search of everything below would go through a whole disk, if someone pushes its root."""
    deep = tmp_path / "a" / "b" / "model.safetensors"
    deep.parent.mkdir(parents=True)
    deep.write_bytes(b"")
    refused(lambda: detect_kind(tmp_path), "is no folder of a head")


def test_anything_can_be_shown():
    class Loud:
        def __repr__(self):
            return "a\nb\x1b[31m"

    nested: list = []
    for _ in range(10_000):
        nested = [nested]
    for value in (10**5000, nested, Loud(), "x" * 10**6, torch.zeros(40, 40)):
        line = shown(value)
        assert len(line) <= 81 and line.isprintable()


def test_policies_with_a_profile_equal_what_their_json_form_builds(tmp_path):
    demo.profile().save_pretrained(tmp_path / "profile")
    companion = str(demo.FOLDER / "companion")
    policy = as_policy({"filter": {"name": "sv", "profile": str(tmp_path / "profile"), "companion": companion}})
    again = as_policy(json.dumps(policy.to_dict()))
    assert policy == again and hash(policy) == hash(again)
    other = replace(policy.filter.profile, pays=policy.filter.profile.pays + 1)
    assert (
        policy != replace(policy, filter=replace(policy.filter, profile=other)) and policy.filter.profile != "profile"
    )


@pytest.mark.parametrize("table", ["accept", "accept_by_s"])
def test_an_acceptance_that_is_no_probability(table):
    bins = demo.profile().bins
    refused(lambda: replace(bins, **{table: getattr(bins, table) + 1}), "out of order")


def test_entries_of_a_model_with_a_name_that_a_terminal_acts_on():
    with pytest.raises(TypeError, match="unexpected keyword"):
        ModelIdentity.from_dict({"\x1b[31mred": 1})


@pytest.mark.full(every=6)
@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("area", fuzz.AREAS)
def test_a_short_run(area, capsys):
    fuzz.quiet()
    counts = fuzz.fuzz(0, range(12), area)
    assert not counts[area, ELSE], capsys.readouterr().out
    assert counts[area, REFUSED] + counts[area, RIGHT] == 12 and counts[area, REFUSED]
