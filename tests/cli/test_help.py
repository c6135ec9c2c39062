"""The command line as one tool: every command explains itself by examples that it takes, and calls the same thing by the same name."""

import re
import shlex
import subprocess
import sys

import pytest
import typer

from hf_lossy_assist.cli import COMMANDS as IN_ORDER
from hf_lossy_assist.cli import app


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
    assert re.findall(r"^[│|]? (\w+)  ", hf_lossy("-h").out, flags=re.M) == list(IN_ORDER)


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
