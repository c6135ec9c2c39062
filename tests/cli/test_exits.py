"""What a user mistypes is one line on stderr and exit code 2, whoever found it: typer, this package, or the operating system."""

import os
import signal

import pytest


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["genrate"], "generate"),
        (["generate", "--max-new-tokens", "x"], "--max-new-tokens"),
        (["generate", "--prompt"], "--prompt"),
        (["generate", "--promt", "x"], "--promt"),
        (["fit", "sprinter", "data"], "--out"),
        (["fit", "sprinter"], "data"),
        (["pull", "org/name", "extra"], "extra"),
        (["policies", "--kind", "x" * 5000], "--kind"),
        (["policies", "--kind", "\x1b[31mred\x07"], "--kind"),
        (["fit", "specdec", "y" * 5000, "--out", "z"], "yyy"),
    ],
)
def test_a_mistyped_command_is_one_line(hf_lossy, arguments, says):
    done = hf_lossy(*arguments)
    (line,) = done.err.splitlines()
    assert done.code == 2 and done.out == "" and line.startswith("hf-lossy: ") and says in line
    assert len(line) <= 620 and line.isprintable()


@pytest.mark.parametrize("arguments", [[], ["fit"]])
def test_a_command_alone_shows_its_help(hf_lossy, arguments):
    done = hf_lossy(*arguments)
    assert done.code == 2 and done.err == "" and "--help" in done.out


@pytest.mark.full
def test_a_job_whose_time_is_over_is_gone_on_with(hf_lossy, tmp_path):
    """`--max-hours` ends it as SIGTERM does, which schedulers send: nothing is lost, and no handler or timer stays."""
    before = signal.getsignal(signal.SIGTERM)
    job = ("collect", "--prompts", "demo", "--limit", 60, "--max-new-tokens", 24, "--batch-size", 2)
    ended = hf_lossy(*job, "--out", tmp_path / "data", "--max-hours", 0.0008)
    assert ended.code == 143 and "--resume goes on" in ended.out
    assert ended.err.splitlines()[-1] == "hf-lossy: ended by SIGTERM, or because its time was over"
    assert os.listdir(tmp_path) == ["data.partial"] and signal.getsignal(signal.SIGTERM) is before
    done = hf_lossy(*job, "--out", tmp_path / "data", "--resume", "--max-hours", 1)
    assert done.code == 0 and os.listdir(tmp_path) == ["data"]
    whole = hf_lossy(*job, "--out", tmp_path / "whole")
    assert whole.code == 0 and whole.out.split()[1] == done.out.split()[1]
    assert "max-hours" in hf_lossy(*job, "--out", tmp_path / "none", "--max-hours", 0).line
