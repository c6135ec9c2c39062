"""Models are remembered in the folder that was made with them, on the machine where it was, and taken from no other record."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from support.commands import DEMO, prompts_file

from hf_lossy_assist import Head, HeadConfig, LinearHead, as_policy, demo, sv
from hf_lossy_assist.artifacts.files import MADE_WITH
from hf_lossy_assist.cli._options import ModelOptions
from hf_lossy_assist.cli._provenance import (
    ModelNames,
    copy_names,
    models_from,
    recall,
    remember,
    warn_of_unused_companion,
)
from hf_lossy_assist.models import loading
from hf_lossy_assist.policy.sharing import pull, push


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
]
TARGET, DRAFT = str(demo.FOLDER / "target"), str(demo.FOLDER / "draft")
MADE = ModelNames(TARGET, DRAFT, dtype="bfloat16", chat=True)


@pytest.fixture
def head(tmp_path):
    """The demo's head as one that was made here with models of one's own."""
    folder = Path(shutil.copytree(demo.FOLDER / "sprinter_head", tmp_path / "head"))
    remember(folder, ModelNames(TARGET, DRAFT))
    return folder


def test_what_is_remembered_comes_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DRAFT, "near")
    for made in (MADE, ModelNames("org/target", "org/draft", "int8"), ModelNames(None, "org/draft")):
        remember(tmp_path, made)
        assert recall(tmp_path) == made
    remember(tmp_path, ModelNames("near", DRAFT))
    assert recall(".") == ModelNames(str(tmp_path / "near"), DRAFT)
    (tmp_path / "near").rename("far")
    with pytest.raises(ValueError, match=r"^[^\n]*was made with [^\n]*near[^\n]*not there any more: pass --model"):
        recall(tmp_path)


def test_a_drafter_that_moved(tmp_path, hf_lossy, monkeypatch):
    """It is asked for by its own option, and what was made with it is no policy of commands that know draft models alone."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo.FOLDER / "eagle3_drafter", "drafter")
    head = Path(shutil.copytree(demo.FOLDER / "sprinter_head", "head"))
    for made, said in (
        (ModelNames(drafter="drafter"), "pass --drafter"),
        (ModelNames(TARGET, drafter="drafter"), "pass --model and --drafter"),
    ):
        remember(head, made)
        Path("drafter").rename("moved")
        with pytest.raises(ValueError, match=f"not there any more: {said}$"):
            recall(head)
        Path("moved").rename("drafter")


def test_the_demo_is_not_remembered_nor_twice_by_several_processes(tmp_path, monkeypatch):
    remember(tmp_path, ModelNames())
    monkeypatch.setenv("RANK", "1")
    remember(tmp_path, MADE)
    assert recall(tmp_path) is None and not list(tmp_path.iterdir())


def test_a_head_takes_over_from_its_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "head").mkdir()
    copy_names(tmp_path / "data", tmp_path / "head")
    assert recall(tmp_path / "head") is None
    remember(tmp_path / "data", MADE)
    copy_names(tmp_path / "data", tmp_path / "head")
    assert recall(tmp_path / "head") == MADE


def test_a_note_from_elsewhere_does_not_count(tmp_path):
    """A copy of a folder, and a link as in the Hub's cache: others may have written them."""
    (tmp_path / "here").mkdir()
    remember(tmp_path / "here", MADE)
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    assert recall(tmp_path / "copy") is None
    (tmp_path / "linked").mkdir()
    facts = json.loads((tmp_path / "here" / MADE_WITH).read_text()) | {"folder": str(tmp_path / "linked")}
    (tmp_path / "blob").write_text(json.dumps(facts))
    (tmp_path / "linked" / MADE_WITH).symlink_to(tmp_path / "blob")
    assert recall(tmp_path / "linked") is None


@pytest.mark.parametrize("change", [{"model": 3}, {"chat": "yes"}, {"dtype": None}, {"more": 1}])
def test_a_damaged_note_is_one_line(tmp_path, change):
    remember(tmp_path, MADE)
    file = tmp_path / MADE_WITH
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=rf"^[^\n]*{MADE_WITH}: expected the names of models, [^\n]*delete it"):
        recall(tmp_path)


def test_options_count_first(capsys, tmp_path):
    assert (
        models_from(ModelOptions(model="a", assistant="b"), []) == ModelNames("a", "b")
        and models_from(ModelOptions(), []) == ModelNames()
    )
    assert capsys.readouterr().err == ""


def test_commands_take_them_and_say_so(hf_lossy, tmp_path, head):
    said = f"models of {head}: --model {TARGET} --assistant {DRAFT}"
    short = ("--max-new-tokens", 2, "--json")
    for policy in (("sprinter", "--head", head), (f"sprinter:head={head}",), (f"./{head.name}",)):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            done = hf_lossy("generate", "--policy", *policy, "--prompt", "1 + 1", *short)
        assert done.json["model"] == TARGET and done.json["assistant"] == DRAFT
        assert [line for line in done.err.splitlines() if line.startswith("models of ")][0].endswith(
            said.split(": ")[1]
        )
    assert "--prompt" in hf_lossy("generate", "--policy", "sprinter", "--head", head).line  # no demo problems for them
    file = prompts_file(tmp_path, 3)
    for command in ("tune", "compare"):
        done = hf_lossy(command, "--policies", f"svip,sprinter:head={head}", "--task", "demo")
        assert said in done.err and "--task demo is for the demo models" in done.line
    assert said not in hf_lossy("tune", "--policies", f"svip,sprinter:head={head}", *DEMO, "--task", file).err


def test_a_policy_that_was_tuned_here(hf_lossy, tmp_path):
    as_policy("svip").save_pretrained(tmp_path / "policy")
    remember(tmp_path / "policy", ModelNames(TARGET, DRAFT))
    done = hf_lossy("generate", "--policy", tmp_path / "policy", "--prompt", "1 + 1", "--max-new-tokens", 2, "--json")
    assert done.json["model"] == TARGET and f"models of {tmp_path / 'policy'}: " in done.err


def test_fit_autojudge_asks_the_dataset(hf_lossy, tmp_path):
    (tmp_path / "mined").mkdir()
    (tmp_path / "mined" / "mine.json").write_text('{"target": {"id": "org/target"}, "draft": {"id": "org/draft"}}')
    fit = ("fit", "autojudge", tmp_path / "mined", "--out", tmp_path / "judge")
    assert (
        "mined was made for the models org/target and org/draft: pass --model and --assistant" in hf_lossy(*fit).line
    )
    remember(tmp_path / "mined", ModelNames("/nowhere/model", DRAFT))
    facts = json.loads((tmp_path / "mined" / MADE_WITH).read_text())
    assert facts["model"] == "/nowhere/model"
    assert "not there any more" in hf_lossy(*fit).line


def foreign():
    """A head whose record names models on the Hub."""
    config = Head.from_pretrained(demo.FOLDER / "sprinter_head").config
    names = {role: dataclasses.replace(getattr(config, role), id=f"org/{role}") for role in ("target", "draft")}
    torch.manual_seed(0)
    made = LinearHead(HeadConfig.from_dict(config.to_dict() | {"kind": "linear", "width": None}))
    made.config = dataclasses.replace(made.config, **names)
    return made.eval()


def test_a_head_from_the_hub_loads_no_model(hf_lossy, hub, tmp_path, monkeypatch):
    """Its record, and a note that somebody put beside it, name models: neither is followed."""
    foreign().save_pretrained(tmp_path / "head")
    remember(tmp_path / "head", MADE)
    push(tmp_path / "head", "org/head")
    assert MADE_WITH not in HfApi().list_repo_files("org/head")
    facts = {"folder": str(tmp_path / "pulled")} | dataclasses.asdict(ModelNames("org/evil", "org/evil"))
    HfApi().upload_file(path_or_fileobj=json.dumps(facts).encode(), path_in_repo=MADE_WITH, repo_id="org/head")
    pull("org/head", tmp_path / "pulled")
    assert (tmp_path / "pulled" / "config.json").is_file() and not (tmp_path / "pulled" / MADE_WITH).exists()
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(demo, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for name in ("org/head", tmp_path / "pulled"):
        for command in (
            ("generate", "--policy", "sprinter", "--head", name),
            ("generate", "--policy", str(name)),
            ("compare", "--policies", f"sprinter:head={name}"),
            ("tune", "--policies", f"svip,sprinter:head={name}"),
        ):
            line = hf_lossy(*command).line
            assert f"{name} was made for the models org/target and org/draft: pass --model and --assistant" in line


def test_a_head_for_another_kind_of_decoding_is_remarked_on(hf_lossy):
    """The demo's was trained on samples."""
    short = ("generate", "--policy", "sprinter", "--prompt", "1 + 1", "--max-new-tokens", 2)
    greedy, sampled = (hf_lossy(*short, option) for option in ("--greedy", "--do-sample"))
    [line] = [line for line in greedy.err.splitlines() if line.startswith("remark: ")]
    assert "was trained for sampling, and this is greedy decoding" in line and "hf-lossy collect --greedy" in line
    assert "remark: " not in sampled.err
    judged = hf_lossy("generate", "--policy", "autojudge", "--prompt", "1 + 1", "--max-new-tokens", 2, "--do-sample")
    assert "hf-lossy mine --do-sample" in judged.err


def test_sv_that_is_strict_says_so(capsys):
    made = demo.profile()
    policy = sv(made, demo.load().companion)
    for rows in (1, 64):
        warn_of_unused_companion(policy, rows)
        assert ("sv is strict acceptance here" in capsys.readouterr().err) == (not made.worthwhile(rows))
