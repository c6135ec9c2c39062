"""The blocks of the README and of the site's pages run, and every example runs with the arguments its docstring names."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


ROOT = Path(__file__).parent.parent
EXAMPLES = {
    "generate.py": [],
    "autojudge.py": ["--problems", "4"],
    "sprinter.py": ["--problems", "2"],
    "batches.py": [],
    "calibrate_svip.py": ["--problems", "8"],
}
TOOLS = {"fuzz.py": ["--cases", "20"], "first_mistakes.py": [], "wrong_uses.py": [], "wrong_policies.py": []}
# Of several processes: the command, with {out} for what it writes and {run} for `torchrun` of two.
IN_PROCESSES = {
    "generate_dataset.py": "{run} {script} --limit 6 --max-new-tokens 24 --out {out}",
    "train_head.py": "{run} {script} --epochs 3 --out {out}",
    "tensor_parallel.py": "{run} {script} --max-new-tokens 12",
    "mine.sh": "{script} {out} {out}.head --limit 24 --max-new-tokens 80",
    "compare.sh": "{script} {out} --limit 4 --max-new-tokens 16 --no-static --policies svip",
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
            assert info == "text" or re.fullmatch(r'(python|bash) title="needs .+"', info), (page, info)
    return found


@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
@pytest.mark.filterwarnings("ignore:the profile's seconds were taken on another machine:UserWarning")
@pytest.mark.filterwarnings("ignore:the head's .* may differ:UserWarning")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page)], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_blocks_run(page, hf_lossy, tmp_path, monkeypatch, capsys):
    """A page's blocks one after the other, in an empty folder: Python in one namespace, commands as a shell reads them."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": page.stem}
    printed = ""
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, page.name, "exec"), names)
            printed += capsys.readouterr().out
            continue
        for line in text.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line, comments=True) or [None]
            assert program in (None, "hf-lossy"), line
            if program:
                done = hf_lossy(*arguments)
                assert done.code == 0, (line, done)
    if page.stem in ("README", "index"):
        assert "The answer is" in printed and "mean acceptance length" in printed


def test_the_pages_have_blocks_that_run():
    guides = {page.stem for page in PAGES if page.parent.name == "how-to"}
    assert guides and guides <= {page.stem for page in PAGES if blocks(page)}


@pytest.mark.filterwarnings("default")  # examples are for people, who see warnings; `make test` makes them errors
@pytest.mark.filterwarnings(
    "ignore:.*this policy is lossy:UserWarning"
)  # which the wrong uses of some policies come to say
@pytest.mark.parametrize(
    ("folder", "script"),
    [*(("examples", name) for name in sorted(EXAMPLES)), *(("tools", name) for name in sorted(TOOLS))],
)
def test_example_runs(folder, script, tmp_path, monkeypatch, capsys):
    """In this process, as `python examples/…` runs it: an import of torch for each would take longer than the examples."""
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in (EXAMPLES | TOOLS)[script]]
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / folder))  # they import each other
    try:
        runpy.run_path(str(ROOT / folder / script), run_name="__main__")
    except SystemExit as end:
        assert not end.code, capsys.readouterr().err[-2000:]
    assert capsys.readouterr().out.strip()


MINING = pytest.param(
    "mine.sh", marks=pytest.mark.thorough
)  # which tests/training/test_processes.py does in two processes, too


@pytest.mark.parametrize("script", [MINING if name == "mine.sh" else name for name in sorted(IN_PROCESSES)])
def test_example_runs_in_two_processes(script, tmp_path):
    run = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    path, out = ROOT / "examples" / "multi_gpu" / script, tmp_path / "out"
    words = IN_PROCESSES[script].format(run=run, script=path, out=out).split()
    bin_ = Path(sys.executable).parent
    paths = {"PATH": os.pathsep.join([str(bin_), os.environ["PATH"]]), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(words, env=os.environ | paths, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0 and ran.stdout.strip(), ran.stderr[-3000:]
    assert out.exists() or script == "tensor_parallel.py"


def test_no_example_is_forgotten():
    of_processes = {path.name for path in (ROOT / "examples" / "multi_gpu").glob("*.*")}
    assert of_processes == set(IN_PROCESSES) | {"job.slurm"}
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == set(EXAMPLES) | {"train_demo_models.py"}  # by test_demo.py


def test_the_readme_is_short_and_names_every_method():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    for name in ("SVIP", "SPRINTER", "SpecDec++", "AutoJudge", "SV"):
        assert f"[{name}]" in readme, name
    for link in re.findall(r"\]\(([^)#]+)", readme):
        assert link.startswith("https://") or (ROOT / link).exists(), link
