"""Another process that holds a run's folder."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


HOLDS = """
import sys
from pathlib import Path
from hf_lossy_assist.training.processes import Lock

lock = Lock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(part: Path) -> Iterator[subprocess.Popen]:
    """A process that holds `part` until the block ends, or until it is killed."""
    command = [sys.executable, "-c", HOLDS, str(part)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        try:
            yield other
        finally:
            other.kill()


def names_holder(line: str, part: Path, pid: int) -> bool:
    """Whether a refusal says which process is at the folder, where and since when."""
    facts = json.loads((part.parent / f".{part.name}.lock.json").read_text())
    says = f"another process is at {part} (pid {pid} on {facts['host']}, since {facts['since']}): wait for it"
    return facts["pid"] == pid and says in line
