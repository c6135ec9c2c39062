"""Shared by several tests."""

import json
import sys
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
