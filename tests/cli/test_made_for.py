"""Heads and profiles of other models, or of another kind of decoding: refused, or remarked on; no model that a record names is loaded."""

import dataclasses

import pytest
import torch
from support.commands import DEMO

from hf_lossy_assist import Head, HeadConfig, LinearHead, demo, sv
from hf_lossy_assist.cli._models import check_parts
from hf_lossy_assist.cli._options import ModelOptions
from hf_lossy_assist.cli.generate_command import _remark_on_companion
from hf_lossy_assist.models import loading
from hf_lossy_assist.policy.sharing import pull, push


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
]


def make_foreign_head():
    config = Head.from_pretrained(demo.FOLDER / "sprinter_head").config
    names = {role: dataclasses.replace(getattr(config, role), id=f"org/{role}") for role in ("target", "draft")}
    torch.manual_seed(0)
    made = LinearHead(HeadConfig.from_dict(config.to_dict() | {"kind": "linear", "width": None}))
    made.config = dataclasses.replace(made.config, **names)
    return made.eval()


def test_a_head_of_other_models_loads_none_of_them(hf_lossy, hub, tmp_path, monkeypatch):
    make_foreign_head().save_pretrained(tmp_path / "head")
    push(tmp_path / "head", "org/head")
    pull("org/head", tmp_path / "pulled")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    monkeypatch.setattr(demo, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    for name in ("org/head", tmp_path / "pulled"):
        for command in (
            ("generate", "--policy", "sprinter", "--head", name),
            ("generate", "--policy", str(name)),
            ("compare", "--policies", f"sprinter:head={name}"),
            ("tune", "--policies", f"svip,sprinter:head={name}"),
            ("eval", "--policy", f"sprinter:head={name}"),
            ("serve", "--policies", f"sprinter:head={name}"),
        ):
            line = hf_lossy(*command).line
            assert f"{name} was made for the models org/target and org/draft: pass --model and --assistant" in line


def test_a_dataset_of_other_models_is_refused(hf_lossy, tmp_path):
    (tmp_path / "mined").mkdir()
    (tmp_path / "mined" / "mine.json").write_text('{"target": {"id": "org/target"}, "draft": {"id": "org/draft"}}')
    line = hf_lossy("fit", "autojudge", tmp_path / "mined", "--out", tmp_path / "judge").line
    assert "mined was made for the models org/target and org/draft: pass --model and --assistant" in line


def test_models_that_are_named_count():
    check_parts(
        ModelOptions(model="a", assistant="b"), [make_foreign_head()]
    )  # `generate` compares them with the head
    check_parts(ModelOptions(), [demo.head(), demo.profile()])


def test_a_head_for_another_kind_of_decoding_is_remarked_on(hf_lossy):
    """The demo's was trained on samples."""
    short = ("generate", "--policy", "sprinter", "--prompt", "1 + 1", "--max-new-tokens", 2)
    greedy, sampled = (hf_lossy(*short, option) for option in ("--greedy", "--do-sample"))
    [line] = [line for line in greedy.err.splitlines() if line.startswith("remark: ")]
    assert "was trained for sampling, and this is greedy decoding" in line and "hf-lossy collect --greedy" in line
    assert "remark: " not in sampled.err
    judged = hf_lossy("generate", "--policy", "autojudge", "--prompt", "1 + 1", "--max-new-tokens", 2, "--do-sample")
    assert "hf-lossy mine --do-sample" in judged.err


def test_sv_that_is_strict_is_remarked_on(capsys):
    made = demo.profile()
    policy = sv(made, demo.load().companion)
    for rows in (1, 64):
        _remark_on_companion(policy, rows)
        assert ("sv is strict acceptance here" in capsys.readouterr().err) == (not made.worthwhile(rows))


def test_the_demos_problems_are_not_for_other_models(hf_lossy, tmp_path):
    for command in ("tune", "compare"):
        done = hf_lossy(command, "--policies", "svip", *DEMO, "--task", "demo")
        assert "--task demo is for the demo models" in done.line
    assert "--prompts demo is for the demo models" in hf_lossy("collect", *DEMO, "--out", tmp_path / "x").line
