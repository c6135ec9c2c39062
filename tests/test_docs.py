"""README's Python blocks run one after the other, and every example runs with the arguments its docstring names."""

import re
import runpy
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "generate.py": [],
    "autojudge.py": ["--problems", "4"],
    "sprinter.py": ["--problems", "2"],
    "sprinter_figures.py": ["--out", "{tmp}"],
    "batches.py": [],
    "calibrate_svip.py": ["--problems", "8"],
    "fuzz.py": ["--cases", "20"],
    "first_mistakes.py": [],
    "wrong_uses.py": [],
    "wrong_policies.py": [],
}


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")  # one block shows SPRINTER
@pytest.mark.filterwarnings("ignore:the profile's seconds were taken on another machine:UserWarning")  # and one SV
def test_readme_blocks_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.S)
    assert len(blocks) >= 2
    names: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "The answer is" in printed
    assert "mean acceptance length" in printed


@pytest.mark.filterwarnings("default")  # examples are for people, who see warnings; `make test` makes them errors
@pytest.mark.parametrize("script", sorted(EXAMPLES))
def test_example_runs(script, tmp_path, monkeypatch, capsys):
    """In this process, as `python examples/…` runs it: an import of torch for each would take longer than the examples."""
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in EXAMPLES[script]]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # they import each other
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err[-2000:]
    assert capsys.readouterr().out.strip()


def test_no_example_is_forgotten():
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    of_models = {
        "supported_models.py",
        "model_table.py",
        "model_processes.py",
        "tiny_models.py",
        "tiny_sizes.py",
    }  # tried by test_supported_models.py
    assert scripts == set(EXAMPLES) | of_models | {"train_demo_models.py"}  # the last by test_demo.py


def test_every_policy_rule_and_stop_is_in_the_readme():
    from hf_lossy_assist.policy.methods import METHODS, POLICIES
    from hf_lossy_assist.rules import RULES
    from hf_lossy_assist.stops import STOPS

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in [*POLICIES, *METHODS, *RULES, *STOPS]:
        assert re.search(rf"\b{name}\b", readme), name
