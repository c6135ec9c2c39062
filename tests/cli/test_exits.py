"""What a user mistypes is one line on stderr and exit code 2, whoever found it: typer, this package, or the operating system."""

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
