"""collect, fit, push, pull and generate with a head, from the command line as a user types them: what comes out, and that
what users can mend is one line and exit code 2."""

import dataclasses
import importlib
import importlib.util
import json
import re
import sys

import pytest
import typer
from huggingface_hub import constants
from support.commands import DEMO, ROOT, prompts_file
from support.hub_server import card_problems

import hf_lossy_assist
from hf_lossy_assist import Head, HeadConfig, LinearHead, Sprinter, demo
from hf_lossy_assist.cli import _runs
from hf_lossy_assist.training.verifier_dataset import read_dataset
from hf_lossy_assist.validation import EXTRAS


pytestmark = [
    pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning"),
    pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning"),
    pytest.mark.filterwarnings("ignore:the profile's .* may differ:UserWarning"),
]

SHIPPED = demo.FOLDER / "sprinter_head"
QUICK = ("--limit", "1", "--max-new-tokens", "3")
SMALL = ("--limit", "10", "--max-new-tokens", "6", "--batch-size", "5")


# -- end to end -------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_collect_fit_generate_push_pull(hf_lossy, hub, tmp_path):
    data, head = tmp_path / "data", tmp_path / "head"
    collected = hf_lossy("collect", "--out", data, *SMALL)
    assert collected.code == 0 and collected.out.count("\n") == 1
    assert f"{data}: {10 * 4 * 6} tokens of 10 prompts" in collected.out
    assert len(read_dataset(data)) == 240

    fitted = hf_lossy(
        "fit", "sprinter", data, "--out", head, "--lambda", 1.2, "--lambda", 3, "--head", "mlp", "--width", 8
    )
    assert fitted.code == 0, fitted.err
    assert "AUROC" in fitted.out
    assert "the head for λ = 1.2, the one of `collect` or else the first, with its card" in fitted.out
    assert card_problems((head / "README.md").read_text()) == ([], [])
    assert Head.from_pretrained(head).config.width == 8

    options = ("--max-new-tokens", 12, "--json", "--seed", 3, "--policy")
    local = hf_lossy("generate", *options, f"sprinter:head={head},threshold=0.2").json
    assert local["speculation"]["lossless"] is False and local["speculation"]["num_unchecked_tokens"] >= 0
    stop = local["policy"]["stop"]
    assert (local["policy"]["rule"]["name"], stop["name"], stop["head"], stop["threshold"]) == (
        "all_but_last", "head", str(head), 0.2,
    )  # fmt: skip
    shipped = hf_lossy("generate", *options, "sprinter").json
    assert shipped["policy"]["stop"]["threshold"] == 0.5
    never = hf_lossy("generate", *options, "sprinter:threshold=1").json
    alone = hf_lossy("generate", *options, "target").json
    assert [o["token_ids"] for o in never["outputs"]] == [o["token_ids"] for o in alone["outputs"]]
    assert never["speculation"]["num_unchecked_tokens"] == 0 < shipped["speculation"]["num_unchecked_tokens"]

    url = hf_lossy("push", head, "org/head", "--message", "a head")
    assert url.code == 0 and url.out.strip().splitlines()[-1].startswith(f"{hub.url}/org/head/commit/")
    pulled = hf_lossy("pull", "org/head", "--out", tmp_path / "copy")
    assert pulled.code == 0 and pulled.out.strip() == str(tmp_path / "copy")
    assert (tmp_path / "copy" / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    for policy in ("sprinter:head=org/head", "org/head"):
        hers = hf_lossy("generate", *options, policy).json
        assert hers["policy"]["stop"]["head"] == "org/head"
    Sprinter(Head.from_pretrained(head), 0.2).push_to_hub("org/policy")
    remote = hf_lossy("generate", *options, "org/policy").json
    assert [o["token_ids"] for o in remote["outputs"]] == [o["token_ids"] for o in local["outputs"]]
    assert remote["policy"]["stop"]["threshold"] == 0.2


@pytest.mark.nightly
def test_greedy_data_fits_and_says_what_lambdas_mean(hf_lossy, tmp_path):
    data, head = tmp_path / "data", tmp_path / "head"
    assert hf_lossy("collect", "--out", data, "--greedy", "--limit", 12, "--max-new-tokens", 40).code == 0
    assert set(read_dataset(data).q.tolist()) == {1.0}
    fitted = hf_lossy("fit", "sprinter", data, "--out", head, "--lambda", 1.2, "--lambda", 2)
    assert fitted.code == 0 and "every λ ≥ 1 gives the same labels" in fitted.out
    one = hf_lossy("fit", "sprinter", data, "--out", tmp_path / "one")
    assert one.code == 0 and "same labels" not in one.out


# -- refused in one line ------------------------------------------------------------------------------------------------


def test_one_line(hf_lossy, tmp_path):
    (tmp_path / "there").mkdir()
    prompts_file(tmp_path)
    for arguments, says in (
        (["generate", "--policy", "sprinter", *DEMO, "--prompt", "a"], "missing a required argument: 'head'"),
        (["generate", "--policy", "svip:head=x"], "svip"), (["generate", "--policy", "SVIP"], "Did you mean 'svip'?"),
        (["collect", "--out", "{tmp}/x", "--temperature", "0"], "--greedy"),
        (["collect", "--out", "{tmp}/x", "--top-p", "1.5"], "--top-p: expected a number from 0 to 1"),
        (["tune", "--do-sample", "--top-p", "0"], "top_p: expected a number above 0"),
        (["collect", "--out", "{tmp}/x", "--mix", "0.3"], "--mix is for --for specdec"),
        (["collect", "--out", "{tmp}/x", "--greedy", "--temperature", "0.7"], "are for --do-sample: pass it"),
        (["collect", "--out", "", *QUICK], "--out: expected the name of a new folder"),
        (["collect", "--out", "{tmp}/there"], "exists"),
        (["collect", "--out", "{tmp}/x", *DEMO[:2], "--prompts", "{tmp}/prompts.jsonl"], "expected both"),
        (["fit", "sprinter", "{tmp}/there", "--out", "{tmp}/x"], "no collect.json"),
        (["fit", "sprinter", "{tmp}/there", "--out", "{tmp}/there"], "exists"),
        (["fit", "sprinter", "{tmp}/there", "--out", "{tmp}/x", "--head", "tree"], "linear"),
        (["push", "{tmp}/there", "org/x"], "there is no folder of a head"),
        (["push", "{tmp}/nowhere", "org/x"], "no folder"), (["push", str(SHIPPED), "org/x"], "HF_HUB_OFFLINE"),
        (["pull", "no/good/name"], "org/name"), (["pull", "org/nothing", "--local-files-only"], "cache"),
    ):  # fmt: skip
        done = hf_lossy(*(a.replace("{tmp}", str(tmp_path)) for a in arguments))
        assert says in done.line and not done.out, arguments
        assert {p.name for p in tmp_path.iterdir()} <= {"there", "prompts.jsonl", "x.partial"}
    assert hf_lossy("--version") == (0, f"hf-lossy {hf_lossy_assist.__version__}\n", "")


def test_another_tokenizer_than_a_head_or_profile_was_made_with_is_refused(hf_lossy, tmp_path):
    """`generate` compares them, as Python's `check` does: the sizes of the models may well agree."""
    config = HeadConfig.from_dict(demo.head("sprinter").config.to_dict() | {"tokenizer_hash": "0" * 64})
    LinearHead(dataclasses.replace(config, kind="linear", width=None)).eval().save_pretrained(tmp_path / "head")
    dataclasses.replace(demo.profile(), tokenizer_hash="0" * 64).save_pretrained(tmp_path / "profile")
    for method, what in (("sprinter", "head"), ("sv", "profile")):
        done = hf_lossy("generate", "--policy", f"{method}:{what}={tmp_path / what}", "--max-new-tokens", 4)
        assert "token ids mean other words" in done.line and not done.out


def test_each_prompt_has_limits(hf_lossy, tmp_path):
    """Also where texts share rounds."""
    file, problem = tmp_path / "prompts.jsonl", demo.problems(1)[0].prompt
    rows = [
        {"prompt": problem},
        {"prompt": problem, "max_new_tokens": 3},
        {"question": problem, "max_new_tokens": 5, "seed": 2},
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    command = ("generate", "--prompts", file, "--max-new-tokens", 7, "--json")
    drafted = hf_lossy(*command, "--batch-size", 2).json["outputs"]
    alone = hf_lossy(*command, "--policy", "svip").json["outputs"]
    assert [each["text"] for each in drafted] == [each["text"] for each in alone]
    assert [len(each["token_ids"]) for each in drafted] == [7, 3, 5]
    line = hf_lossy(*command, "--policy", "target").line
    assert "limits of its own" in line
    file.write_text(json.dumps({"prompt": problem, "max_new_token": 3}), encoding="utf-8")
    assert "Did you mean 'max_new_tokens'?" in hf_lossy(*command).line


@pytest.mark.full
def test_an_answer_that_was_cut_off_is_no_wrong_one(hf_lossy):
    short, long = (hf_lossy("generate", *more).out for more in (("--max-new-tokens", 8), ()))
    assert "solved 0 of 3 problems (3 cut off before the end: a larger --max-new-tokens writes on)" in short
    assert "solved 3 of 3 problems\n" in long


def test_a_missing_extra_is_named_with_the_way_out(hf_lossy, tmp_path, monkeypatch, capsys):
    real = importlib.util.find_spec
    for command, module in (
        (["collect", "--out", "{tmp}/x"], "datasets"), (["collect", "--out", "{tmp}/x"], "accelerate"),
        (["fit", "sprinter", "{tmp}/data", "--out", "{tmp}/x"], "sklearn"),
        (["fit", "sprinter", "{tmp}/data", "--out", "{tmp}/x"], "matplotlib"),
        (["fit", "sprinter", "{tmp}/data", "--out", "{tmp}/x"], "datasets"), (["tune", "--out", "{tmp}/x"], "jinja2"),
        (["profile", "--out", "{tmp}/x"], "sklearn"),
        (["generate", "--prompts", "{tmp}/x.jsonl", "--out", "{tmp}/x"], "pyarrow"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            hidden = lambda name, *a, module=module: None if name == module else real(name, *a)  # noqa: E731
            patch.setattr(importlib.util, "find_spec", hidden)
            for name in [name for name in sys.modules if name.split(".")[0] == module]:
                patch.setitem(sys.modules, name, None)
            line = hf_lossy(*(a.replace("{tmp}", str(tmp_path)) for a in command)).line
        assert module in line and "pip install 'hf_lossy_assist[train]'" in line
        assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["hf-lossy"])
    for module, extra in (("starlette", "serve"), ("pyarrow", "train"), ("xgrammar", "structured")):
        app = typer.Typer()
        app.command()(lambda: importlib.import_module(f"{module}.parts"))  # noqa: B023
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            assert _runs.run(app) == 2
        line = f"hf-lossy: this command needs {module}: pip install 'hf_lossy_assist[{extra}]'\n"
        assert capsys.readouterr().err == line


def test_the_extras_of_errors_are_the_package_s():
    read = pytest.importorskip("tomllib").loads
    project = read((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        names = [re.split(r"[\[>]", line)[0] for line in project[extra]]
        alias = {"sklearn": "scikit-learn", "pyarrow": "datasets"}  # the second brings the first
        assert {alias.get(module, module.replace("_", "-")) for module in modules.split()} == {*names}


def test_generate_needs_no_extra(monkeypatch, hf_lossy):
    for module in ("datasets", "sklearn", "matplotlib"):
        for name in [name for name in sys.modules if name.split(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
    assert hf_lossy("generate", "--policy", "sprinter", "--max-new-tokens", 4, "--json").code == 0
    assert not {"datasets", "sklearn", "matplotlib"} & set(sys.modules)


# -- the Hub ----------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_what_the_hub_refuses_and_no_network_are_one_line(hf_lossy, hub, tmp_path, monkeypatch):
    assert hf_lossy("push", SHIPPED, "org/private", "--private").code == 0
    assert hf_lossy("push", SHIPPED, "org/gated").code == 0
    hub.gate("org/gated")
    for repo in ("org/private", "org/gated", "org/nothing"):
        assert repo in hf_lossy("pull", repo, "--token", hub.other_token).line
        monkeypatch.setenv("HF_TOKEN", hub.other_token)
        assert repo in hf_lossy("generate", "--policy", repo).line
        monkeypatch.setenv("HF_TOKEN", hub.token)
    assert "403" in hf_lossy("push", SHIPPED, "other/x").line
    short = ("--max-new-tokens", 4, "--json")
    assert hf_lossy("generate", "--policy", "org/private", *short).code == 0
    hub.__exit__()  # no network: what is in the cache is used
    assert hf_lossy("generate", "--policy", "sprinter:head=org/private", *short).code == 0
    assert hf_lossy("pull", "org/else").line and hf_lossy("push", SHIPPED, "org/head").line
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hf_lossy("generate", "--policy", "org/private", *short).code == 0
    assert "snapshot" in hf_lossy("pull", "org/private").line  # only what a policy reads is in the cache
