"""Commands of `hf-lossy`: in this process, in several, as torchrun starts them, and beside one that holds a run's folder."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hf_lossy_assist import cli, demo


DEMO = ("--model", str(demo.FOLDER / "target"), "--assistant", str(demo.FOLDER / "draft"))


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line of a refusal."""
        lines = [line for line in self.err.splitlines() if line.startswith("hf-lossy:")]
        assert self.code == 2 and len(lines) == 1 and "Traceback" not in self.err, self
        return lines[0]

    @property
    def json(self) -> Any:
        assert self.code == 0, self
        return json.loads(self.out)


@pytest.fixture
def hf_lossy(monkeypatch, capsys):
    """The real `main` with these arguments, in this process."""

    def run(*arguments: Any) -> Done:
        monkeypatch.setattr(sys, "argv", ["hf-lossy", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(end.value.code or 0), out, err)

    return run


def prompts_file(folder: Path, count: int = 2) -> Path:
    file = folder / "prompts.jsonl"
    lines = [{"prompt": p.prompt, "continuation": p.solution} for p in demo.problems(count, 5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from hf_lossy_assist.cli import _runs
from hf_lossy_assist.cli import app

for command in json.loads(sys.argv[1]):
    sys.argv = ["hf-lossy", *command]
    code = _runs.run(app)
    if code:
        sys.exit(code)
    print("", flush=True)
"""


def torchrun(processes: int, script: Path, *words: str, folder: Path | None = None) -> subprocess.Popen:
    """A script in `processes` processes with a thread each."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*launch, str(script), *words], cwd=folder, env=os.environ | paths, **output)


def start(folder: Path, processes: int, *commands: Sequence[Any]) -> subprocess.Popen:
    """The commands, one behind the other, in `processes` processes. `folder`: for the script."""
    script = folder / "commands.py"
    script.write_text(SCRIPT)
    words = json.dumps([[str(word) for word in command] for command in commands])
    return torchrun(processes, script, words, folder=folder)


def ended(job: subprocess.Popen) -> Done:
    out, err = job.communicate(timeout=300)
    return Done(job.returncode, out, err)


HOLDS = """
import sys
from filelock import FileLock

lock = FileLock(sys.argv[1])
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(part: Path) -> Iterator[subprocess.Popen]:
    """A process that holds `part` until the block ends, or until it is killed."""
    command = [sys.executable, "-c", HOLDS, str(part.with_name(f".{part.name}.lock"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        try:
            yield other
        finally:
            other.kill()
