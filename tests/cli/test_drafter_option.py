"""`--drafter` and `--assistant` of the commands, as a user types them."""

import json

import pytest
from support.commands import DEMO, prompts_file

from hf_lossy_assist import Profile, SuffixDrafter, demo
from hf_lossy_assist.server.named_drafters import load_served


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
    pytest.mark.filterwarnings("ignore:this profile was made with other sampling settings:UserWarning"),
    pytest.mark.filterwarnings("ignore:generate_many writes one text at a time:UserWarning"),
    pytest.mark.filterwarnings("ignore:the profile's .* may differ:UserWarning"),
]

WITH = ("--drafter", "demo")
IDENTITY = demo.drafter().identity


@pytest.mark.nightly
def test_profile_and_tune(hf_lossy, tmp_path):
    out = tmp_path / "profile"
    quick = ("--limit", 64, "--max-new-tokens", 24, "--gamma", 3, "--batch-size", 1, "--rounds", 3)
    done = hf_lossy("profile", *WITH, "--out", out, *quick)
    assert done.code == 0, done.err
    made = Profile.from_pretrained(out)
    assert made.draft == IDENTITY and made.gamma == 3
    options = ("--policy", f"sv:profile={out},companion=demo", "--limit", 1, "--max-new-tokens", 8)
    assert hf_lossy("generate", *WITH, *options, "--json").json["drafter"] == "demo"
    options = ("--first", 2, "--policies", "svip,strict", "--max-loss", 0.5, "--out", tmp_path / "tuned", "--json")
    assert hf_lossy("tune", *WITH, *options, "--limit", 6, "--max-new-tokens", 64).code == 0


def test_refusals(hf_lossy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given, message in (
        (("generate", "--drafter", "demo", *DEMO, "--prompt", "a"), "leave assistant out"),
        (("generate", "--drafter", "demo", "--model", demo.FOLDER / "draft", "--prompt", "a"), "another target's"),
        (("compare", "--drafter", "composite", "--no-static"), "drafts beside a draft model: it is for hf-lossy generate and serve"),
        (("collect", "--for", "eagle3", "--drafter", "demo", "--out", "x"), "--for eagle3: the target alone answers"),
        (("mine", "--drafter", "demo", "--out", "x"), "needs a draft model"),
        (("collect", "--drafter", "demo", "--out", "x"), "needs a draft model"),
        (("profile", "--drafter", "demo", "--companion", "int8", "--out", "x", "--limit", "2"), "is the draft model in int8"),
    ):  # fmt: skip
        assert message in hf_lossy(*given).line
    for command in ("generate", "serve", "compare", "tune", "collect"):  # no draft, whichever is asked
        out = ("--out", "out") if command == "collect" else ()
        for name, says in {"exit:x": "expected exit:N with a number of layers", "D": "expected both"}.items():
            assert says in hf_lossy(command, "--assistant", name, *out).line
    assert "computes nothing to learn from" in hf_lossy("collect", "--assistant", "suffix", "--out", "out").line
    folder = demo.FOLDER / "eagle3_drafter"
    head = f"specdec:head={demo.FOLDER / 'specdec_head'}"
    wrong = hf_lossy("generate", "--policy", head, "--drafter", folder, "--limit", 1)
    assert "made for the draft" in wrong.line
    target = ("--model", demo.FOLDER / "draft", "--prompts", prompts_file(tmp_path))
    assert "another target's" in hf_lossy("compare", *target, "--drafter", folder, "--no-static").line


SHORT = ("--limit", 1, "--max-new-tokens", 6, "--json")


@pytest.mark.full
def test_generate_takes_what_compare_takes_as_assistant(hf_lossy):
    plain = hf_lossy("generate", "--policy", "target", *SHORT).json
    for name in ("suffix", "exit:2", "demo"):
        done = hf_lossy("generate", "--assistant", name, *SHORT).json
        assert done["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"] and done["assistant"] == name
        assert ("draft" in done["speculation"]["forwards"]) == (name != "suffix")
    for name in ("suffix", "composite", '{"name": "suffix", "min_match": 3}'):
        done = hf_lossy("generate", "--drafter", name, *SHORT).json
        assert done["outputs"][0]["token_ids"] == plain["outputs"][0]["token_ids"] and done["drafter"] == name
        assert ("draft" in done["speculation"]["forwards"]) == (name == "composite")


def test_a_server_takes_them_too():
    for name, kind in (("suffix", SuffixDrafter), ("exit:2", None)):
        (target, draft, _), drafter = load_served(None, name, None, "float32", "cpu")
        assert (drafter is None) == (kind is None) or isinstance(drafter, kind)
        assert (draft is None) == (kind is not None) and target.config.num_hidden_layers == 12
    with pytest.raises(ValueError, match="CompositeDrafter: expected first without a model"):
        load_served(None, "suffix", "composite", "float32", "cpu")


def test_hints_in_a_row_are_drafted_from_or_refused(hf_lossy, tmp_path):
    [problem], file = demo.problems(1, seed=3), tmp_path / "prompts.jsonl"
    short, rounds = ("--max-new-tokens", 24, "--json", "--prompts", file), []
    for hints in ({}, {"hints": [problem.solution]}):
        file.write_text(json.dumps({"prompt": problem.prompt, **hints}))
        rounds.append(hf_lossy("generate", "--assistant", "suffix", *short).json["speculation"]["num_spec_steps"])
    assert rounds[1] < rounds[0]
    assert "hints are for a drafter that searches texts" in hf_lossy("generate", *short).line
