"""`--set`: what the target's generation_config.json says, otherwise for one run."""

import json

import pytest

from hf_lossy_assist import demo


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo's pair, whose target's file has beams and Gemma's name of a cache."""
    folder, models = tmp_path_factory.mktemp("beams"), demo.load()
    for name in ("target", "draft"):
        getattr(models, name).save_pretrained(folder / name)
        models.tokenizer.save_pretrained(folder / name)
    file = folder / "target" / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_beams": 4, "cache_implementation": "hybrid"}))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("command", [
    ("generate", "--prompt", "1 + 1", "--policy", "strict"),
    ("compare", "--policies", "strict", "--limit", 2, "--no-static", "--batch-size", 1, "--prompts"),
])  # fmt: skip
def test_a_setting_that_a_command_refuses_is_set_otherwise(hf_lossy, folder, tmp_path, command):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{n} + 1"}) + "\n" for n in range(4)))
    files = [prompts, "--out"] if command[0] != "generate" else []
    models = ("--model", folder / "target", "--assistant", folder / "draft", "--max-new-tokens", 4)
    refused = hf_lossy(*command, *files, *[tmp_path / "one"] * bool(files), *models)
    assert refused.code == 2 and "--set num_beams=1" in refused.err
    done = hf_lossy(*command, *files, *[tmp_path / "two"] * bool(files), *models, "--set", "num_beams=1")
    assert done.code == 0, done.err


@pytest.mark.parametrize(("draft", "warns"), [("target", 1), ("draft", 0)])
def test_a_target_as_its_own_draft_is_said(hf_lossy, folder, draft, warns):
    models = ("--model", folder / "target", "--assistant", folder / "." / draft, "--set", "num_beams=1")
    done = hf_lossy("generate", *models, "--prompt", "1 + 1", "--max-new-tokens", 4)
    assert done.code == 0 and done.err.count("--assistant is --model") == warns


@pytest.mark.parametrize(("given", "says"), [
    ("num_beam=1", "there is no setting 'num_beam': did you mean num_beams?"),
    ("num_beams", "--set: expected NAME=VALUE such as num_beams=1, got 'num_beams'"),
    ("do_sample=true", "--set do_sample: the command decides it: pass --do-sample"),
    ("cache_implementation=fast", "--set 'cache_implementation=fast': Invalid `cache_implementation` (fast)"),
    ("_commit_hash=1", "there is no setting '_commit_hash': see"),
])  # fmt: skip
def test_what_cannot_be_set_is_one_line(hf_lossy, given, says):
    done = hf_lossy("generate", "--set", given)
    assert done.code == 2 and says in [line for line in done.err.splitlines() if line.startswith("hf-lossy:")][0]
