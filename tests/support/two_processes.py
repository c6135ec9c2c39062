"""All jobs of two processes in one `torchrun`, whichever test asks first: a start costs more than most of the jobs."""

import json
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from support import commands
from support.commands import Done


SUPPORT = Path(__file__).parent
MULTI_GPU = commands.ROOT / "examples" / "multi_gpu"


def save_pairs(folder: Path, *names: str) -> None:
    from support import tiny

    for name in names:
        target = tiny.build(name)
        target.save_pretrained(folder / name)
        tiny.noisy(target, 0.05).save_pretrained(folder / f"{name}-draft")


@dataclass(frozen=True)
class Job:
    """A script with its arguments, in a folder of its own."""

    script: Path
    arguments: str
    prepare: Callable[[Path], None] = lambda folder: None


SPREAD, SHARDED = ("llama", "qwen2", "qwen3"), ("llama", "qwen3")
JOBS = {
    "spread": Job(SUPPORT / "spread_calls.py", f". {','.join(SPREAD)}", lambda folder: save_pairs(folder, *SPREAD)),
    "sharded": Job(SUPPORT / "sharded_calls.py", f". {','.join(SHARDED)}", lambda folder: save_pairs(folder, *SHARDED)),
    "generate_dataset.py": Job(MULTI_GPU / "generate_dataset.py", "--limit 6 --max-new-tokens 24 --out out"),
    "train_head.py": Job(MULTI_GPU / "train_head.py", "--epochs 3 --out out"),
    "tensor_parallel.py": Job(MULTI_GPU / "tensor_parallel.py", "--max-new-tokens 12"),
}  # fmt: skip


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]


def launch(folder: Path) -> None:
    jobs = []
    for (name, job), port in zip(JOBS.items(), free_ports(len(JOBS)), strict=True):
        (folder / name).mkdir(parents=True)
        job.prepare(folder / name)
        words = {"script": str(job.script), "arguments": job.arguments.split()}
        jobs.append({"folder": str(folder / name), "port": port, **words})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ran = commands.ended(commands.torchrun(2, SUPPORT / "two_ranks.py", str(folder / "jobs.json")))
    (folder / "launched").write_text(f"torchrun ended with {ran.code}\n{ran.out[-1000:]}\n{ran.err[-3000:]}")


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory):
    """A function that returns what a job of `JOBS` printed on rank 0, and its folder; once for all of pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two_processes"
    with FileLock(f"{folder}.lock"):
        if not (folder / "launched").exists():
            launch(folder)

    def of(name: str) -> tuple[Done, Path]:
        codes = [folder / name / f"code{rank}" for rank in range(2)]
        assert all(code.exists() for code in codes), (folder / "launched").read_text()
        out, err = ((folder / name / f"{what}0").read_text() for what in ("out", "err"))
        err += (folder / name / "err1").read_text()
        assert [code.read_text() for code in codes] == ["0", "0"], err[-3000:]
        return Done(0, out, err), folder / name

    return of
