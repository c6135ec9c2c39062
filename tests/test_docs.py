"""The blocks of the README and of the site's pages run, and every example runs with the arguments its docstring names."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.two_processes import JOBS


ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "generate.py": [], "autojudge.py": ["--problems", "4"], "pard.py": ["--steps", "25", "--out", "{tmp}"],
    "sprinter.py": ["--problems", "2"], "batches.py": [], "grpo.py": ["--steps", "2", "--compare"],
}  # fmt: skip
ELSEWHERE = {"train_demo_models.py", "lighteval_task.py"}  # by test_demo.py and test_harness.py
# Of several processes: by support/two_processes.py, and these, which call torchrun themselves.
SHELL = {
    "mine.sh": "{out} {out}.head --limit 24 --max-new-tokens 80",
    "compare.sh": "{out} --limit 4 --max-new-tokens 16 --no-static --policies svip",
}


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", flags=re.M | re.S)


def blocks(page):
    """The fenced blocks of a page that run, in order: (language, text). What others need stands in their title."""
    found = []
    for info, text in FENCE.findall(page.read_text(encoding="utf-8")):
        if info in ("python", "bash"):
            found.append((info, text))
        else:
            assert info == "text" or re.fullmatch(r'(python|bash|yaml) title="needs .+"', info), (page, info)
    return found


@pytest.mark.full
@pytest.mark.nightly(every=18)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.filterwarnings("ignore:the profile's seconds were taken on another machine:UserWarning")
@pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_blocks_run(page, hf_lossy, tmp_path, monkeypatch, capsys):
    """A page's blocks one after the other, in an empty folder: Python in one namespace, commands as a shell reads them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))  # models in int8 are kept there
    names: dict = {"__name__": page.stem}
    printed = ""
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
            printed += capsys.readouterr().out
            continue
        for line in text.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line, comments=True) or [None]
            # No nightly test: docs/how-to/measure.md, which is one, has these commands at full length.
            if page.stem == "README":
                arguments = [{"4": "1", "6": "2", "2": "1"}.get(argument, argument) for argument in arguments]
            assert program in (None, "hf-lossy"), line
            if program:
                done = hf_lossy(*arguments)
                assert done.code == 0, (line, done)
    if page.stem in ("README", "index"):
        assert "The answer is" in printed and "mean acceptance length" in printed


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
def test_the_notebook_runs(capsys):
    """Its cells one after the other; what only a notebook's shell knows, the line that installs the package, is not reached."""
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    magics = [line for cell in cells for line in cell.splitlines() if line.lstrip().startswith("%")]
    assert len(magics) == 1 and "pip install" in magics[0]
    assert not any(cell["outputs"] for cell in notebook["cells"] if cell["cell_type"] == "code")
    names: dict = {"__name__": "notebook"}
    for cell in cells:
        exec(compile(cell.replace(magics[0].lstrip(), "pass"), "first_steps.ipynb", "exec"), names)
    assert "The answer is" in capsys.readouterr().out and names["out"].speculation._repr_html_()


@pytest.mark.nightly(every=6)
@pytest.mark.full
@pytest.mark.filterwarnings("default")  # examples are for people, who see warnings; `make test` makes them errors
@pytest.mark.parametrize("script", sorted(EXAMPLES))
def test_example_runs(script, tmp_path, monkeypatch, capsys):
    """In this process, as `python examples/…` runs it: an import of torch for each would take longer than the examples."""
    if script == "grpo.py":
        pytest.importorskip("trl")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in EXAMPLES[script]]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))  # they import each other
    try:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err[-2000:]
    assert capsys.readouterr().out.strip()


@pytest.mark.nightly
@pytest.mark.parametrize("script", sorted(name for name in JOBS if "." in name))
def test_example_runs_in_two_processes(script, two_processes):
    done, folder = two_processes(script)
    assert done.out.strip()
    assert (folder / "out").exists() or script == "tensor_parallel.py"


@pytest.mark.nightly  # tests/training/test_run_folder.py does the same in two processes
@pytest.mark.parametrize("script", sorted(SHELL))
def test_shell_script_runs_in_two_processes(script, tmp_path):
    path, out = ROOT / "examples" / "multi_gpu" / script, tmp_path / "out"
    bin_ = Path(sys.executable).parent
    paths = {"PATH": os.pathsep.join([str(bin_), os.environ["PATH"]]), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [path, *SHELL[script].format(out=out).split()]
    ran = subprocess.run(words, env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and ran.stdout.strip() and out.exists(), ran.stderr[-3000:]


def test_no_example_is_forgotten_and_the_readme_is_short():
    of_processes = {path.name for path in (ROOT / "examples" / "multi_gpu").glob("*.*")}
    assert of_processes == {name for name in JOBS if "." in name} | set(SHELL) | {"job.slurm"}
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == set(EXAMPLES) | ELSEWHERE
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    for name in ("SVIP", "SPRINTER", "SpecDec++", "AutoJudge", "SV"):
        assert f"[{name}]" in readme, name
    for link in re.findall(r"\]\(([^)#]+)", readme):
        assert link.startswith("https://") or (ROOT / link).exists(), link
    guides = {page.stem for page in PAGES if page.parent.name == "how-to"}
    assert guides and guides <= {page.stem for page in PAGES if blocks(page)}
