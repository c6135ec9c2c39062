"""Run by `torchrun`: each rank imports once, and forks for each job, so that a job finds a fresh process and the start is paid once."""

import json
import os
import runpy
import signal
import sys
from pathlib import Path

import accelerate  # noqa: F401
import datasets  # noqa: F401
import torch.distributed  # noqa: F401
import transformers  # noqa: F401

import hf_lossy_assist  # noqa: F401
from support import small, tiny  # noqa: F401


def run(job: dict) -> None:
    """The job's script in this process, with what it prints in files of its folder."""
    folder, rank = Path(job["folder"]), os.environ["RANK"]
    signal.alarm(100)  # where one rank ended and the other waits for it
    # torchrun's store would still have the last job's keys: the first rank makes one for this job.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT=str(job["port"]))
    os.chdir(folder)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{name}{rank}", os.O_CREAT | os.O_WRONLY), descriptor)
    sys.argv = [job["script"], *job["arguments"]]
    sys.path.insert(0, str(Path(job["script"]).parent))
    runpy.run_path(job["script"], run_name="__main__")


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        child = os.fork()
        if child == 0:
            return run(job)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(job["folder"], f"code{os.environ['RANK']}").write_text(str(code))


if __name__ == "__main__":
    main()
