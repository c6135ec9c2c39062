"""The command line as one tool: every command explains itself by examples that it takes, and calls the same thing by the same name."""

import re
import shlex
import subprocess
import sys

import pytest
import typer

from hf_lossy_assist.cli import COMMANDS as IN_ORDER
from hf_lossy_assist.cli import app
from hf_lossy_assist.cli.without_models import _TABLE, DFLASH, DSPARK, EAGLE, MODEL, PARALLEL, PICKLE, find_published


TOP = typer.main.get_command(app)
COMMANDS = {(): TOP} | {(name,): entry for name, entry in TOP.commands.items()}
COMMANDS |= {("fit", name): entry for name, entry in TOP.commands["fit"].commands.items()}
RUNNING = {words: command for words, command in COMMANDS.items() if not hasattr(command, "commands")}


def test_help_and_refusals_wait_for_no_model_library():
    """Importing torch and Transformers takes ten seconds on a slow machine."""
    code = "import sys, hf_lossy_assist.cli; print(*{'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules), 'end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "end\n"


def options(command):
    """Its options, by the first name of each."""
    return {option.opts[0]: option for option in command.params if option.param_type_name == "option"}


def examples(command):
    lines = [line.strip() for line in command.help.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("hf-lossy ")]


def test_help_has_examples_that_the_command_takes(hf_lossy):
    for words, command in COMMANDS.items():
        done = hf_lossy(*words, "-h")
        assert done.code == 0 and done.err == "" and "Example" in done.out and "hf-lossy" in done.out, words
        assert examples(command), words
        for given in examples(command):
            if given[0] == "COMMAND":
                continue
            path = tuple(given[:2]) if tuple(given[:2]) in RUNNING else tuple(given[:1])
            assert path[: len(words)] == words
            RUNNING[path].make_context(
                " ".join(path), given[len(path) :]
            )  # refuses what it does not know, runs nothing
    with pytest.raises(Exception, match="--new-tokens"):  # it would be found
        RUNNING["collect",].make_context("collect", ["--out", "data", "--new-tokens", "3"])


def test_commands_stand_in_the_order_of_the_work(hf_lossy):
    assert set(IN_ORDER) == set(TOP.commands) and len(IN_ORDER) == len(TOP.commands)
    assert re.findall(r"^[│|]? (\w[\w-]*)  ", hf_lossy("-h").out, flags=re.M) == list(IN_ORDER)


def test_the_same_thing_has_the_same_name():
    """No command calls `--new-tokens` what another calls `--max-new-tokens`; one that runs models on prompts takes what the others take."""
    for words, command in RUNNING.items():
        given = options(command)
        assert not {"--new-tokens", "--batch", "--greedy", "--n", "--count"} & given.keys(), words
        if "--temperature" in given:
            assert given["--do-sample"].secondary_opts == ["--greedy"], words
        if "--assistant" in given:
            assert {"--model", "--dtype", "--device"} <= given.keys(), words
        if "--max-new-tokens" in given and {"--prompts", "--task", "--tasks", "--data"} & given.keys():
            assert {"--assistant", "--limit", "--chat"} <= given.keys(), words


# -- suggest ------------------------------------------------------------------------------------------------------------
PUBLISHED = [
    ("models/qwen2.5-7b-instruct/", ["Qwen/Qwen2.5-0.5B-instruct", "amd/PARD-Qwen2.5-0.5B"]),  # the Hub redirects other letter case
    ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", ["Qwen/Qwen2.5-Coder-0.5B-Instruct"]),
    ("Qwen/Qwen3-14B", ["Qwen/Qwen3-0.6B", "RedHatAI/Qwen3-14B-speculator.eagle3", "deepseek-ai/dspark_qwen3_14b_block7"]),
    ("Qwen/Qwen3.6-35B-A3B", ["z-lab/Qwen3.6-35B-A3B-DFlash"]), ("facebook/opt-6.7b", ["facebook/opt-125m"]),
    *((name, []) for name in ("Qwen/Qwen3.6-4B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct", "org/a", "")),
    *((name, []) for name in ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B-Base", "org/my-copt-6.7b", "Qwen/Qwen2.5-7B.1")),
]  # fmt: skip


def test_a_targets_name():
    for target, drafts in PUBLISHED:
        assert [found["draft"] for found in find_published(target)] == drafts, target
    assert all(source == "" or re.fullmatch(r"https://\S+", source) for *_, source in _TABLE)
    for found in find_published("meta-llama/Meta-Llama-3.1-8B-Instruct"):
        ways = {EAGLE: "--drafter ", PICKLE: "assistant_model=hla.load_drafter("}
        way = ways.get(found["kind"], "--assistant ")
        assert found["line"].startswith(way) and found["draft"] in found["line"]
        assert found["source"].startswith("https://")
    assert {kind for _, _, kind, _ in _TABLE} == {MODEL, EAGLE, PICKLE, DSPARK, PARALLEL, DFLASH}


def test_the_command(hf_lossy):
    found = hf_lossy("suggest", "Qwen/Qwen3-8B")
    assert found.code == 0 and "--assistant Qwen/Qwen3-0.6B" in found.out
    assert "hf-lossy compare --model Qwen/Qwen3-8B" in found.out
    assert hf_lossy("suggest", "Qwen/Qwen3-8B", "--json").json[0]["draft"] == "Qwen/Qwen3-0.6B"
    none = hf_lossy("suggest", "org/model")
    assert none.code == 0 and "no draft for org/model" in none.out and "--drafter suffix" in none.out
    assert hf_lossy("suggest", " ").line == "hf-lossy: MODEL: expected a Hub id or a folder, got an empty text"
