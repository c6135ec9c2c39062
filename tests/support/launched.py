"""Commands of `hf-lossy` in several processes, as torchrun starts them, and `accelerate launch` on GPUs."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.commands import Done


ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from hf_lossy_assist.cli import _runs
from hf_lossy_assist.cli.app import app

for command in json.loads(sys.argv[1]):
    sys.argv = ["hf-lossy", *command]
    code = _runs.run(app)
    if code:
        sys.exit(code)
    print("", flush=True)
"""


def start(folder: Path, processes: int, *commands: Sequence[Any]) -> subprocess.Popen:
    """The commands, one behind the other, in `processes` processes with a thread each. `folder`: for the script."""
    script = folder / "commands.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = json.dumps([[str(word) for word in command] for command in commands])
    return subprocess.Popen(
        [*launch, str(script), words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def script(path: Path, processes: int, *arguments: str, **environment: str) -> Done:
    """A script of tests/support in `processes` processes with a thread each."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*launch, str(path), *arguments],
        env=os.environ | paths | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return Done(ran.returncode, ran.stdout, ran.stderr)


def run(folder: Path, processes: int, *commands: Sequence[Any]) -> Done:
    """`start`, to the end."""
    its = start(folder, processes, *commands)
    out, err = its.communicate(timeout=300)
    return Done(its.returncode, out, err)
