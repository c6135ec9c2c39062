"""Processes of two machines: one that dies ends the others in one line, and the job can be resumed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from datasets import load_from_disk
from support import commands
from support.two_processes import free_ports
from torch.distributed import HashStore

from hf_lossy_assist.training import heartbeats
from hf_lossy_assist.training.heartbeats import Heartbeats


def test_who_is_silent(monkeypatch):
    store, now = HashStore(), [100.0]
    monkeypatch.setattr(heartbeats.time, "monotonic", lambda: now[0])
    watch, others = Heartbeats(store, 0, 3, 9.0), [Heartbeats(store, rank, 3, 9.0) for rank in (1, 2)]
    for second in range(8):
        now[0] += 1
        store.set(others[0]._key(1), str(second))
        assert watch._find_silent() is None, "rank 2 may not have begun yet"
    now[0] += 2
    store.set(others[0]._key(1), "9")
    assert watch._find_silent() == 2
    others[1].stop()
    assert watch._find_silent() is None and list(watch.last) == [1], "it has ended well"
    others[0].failed = True
    others[0].stop()
    now[0] += 10
    assert watch._find_silent() == 1, "one that ends with an error is missed"


def test_only_several_machines_are_watched(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    heartbeats.start_heartbeats(0, 2)
    assert heartbeats._running == []
    for value in ("0", "soon"):
        monkeypatch.setenv(heartbeats.SECONDS, value)
        with pytest.raises(ValueError, match=f"{heartbeats.SECONDS}: expected a number"):
            heartbeats.start_heartbeats(0, 4)


def start_nodes(folder, *command):
    """Start a job of two launchers, each with a process, as on two machines."""
    address = ("--master-addr", "127.0.0.1", "--master-port", str(free_ports(1)[0]))
    return [
        commands.start(
            folder, 1, command, nodes=("--nnodes", "2", "--node-rank", str(rank), *address), HF_LOSSY_HEARTBEAT_SECONDS="20"
        )
        for rank in range(2)
    ]  # fmt: skip


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="/proc as Linux has it")
def test_one_of_two_machines_loses_its_process(hf_lossy, tmp_path):
    command = ("collect", "--prompts", "demo", "--limit", 24, "--max-new-tokens", 12, "--batch-size", 2, "--out")
    nodes, part = start_nodes(tmp_path, *command, tmp_path / "found"), tmp_path / "found.partial"
    deadline = time.monotonic() + 200
    while len(list(part.glob("*.parquet"))) < 2:
        assert all(node.poll() is None for node in nodes) and time.monotonic() < deadline, nodes[0].communicate()[1][
            -3000:
        ]
        time.sleep(0.05)
    (worker,) = Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    began = time.monotonic()
    errors = [node.communicate(timeout=100)[1] for node in nodes]
    assert all(node.returncode for node in nodes) and time.monotonic() - began < 60
    lines = [line for line in errors[0].splitlines() if line.startswith("hf-lossy:")]
    assert len(lines) == 1 and "rank 0" in lines[0] and "--resume goes on" in lines[0], errors[0][-3000:]
    assert "all_gather" not in errors[0] and 2 <= len(list(part.glob("*.parquet"))) < 12
    nodes = start_nodes(tmp_path, *command, tmp_path / "found", "--resume")
    for _, error in [node.communicate(timeout=200) for node in nodes]:
        assert "hf-lossy:" not in error, error[-3000:]
    assert [node.returncode for node in nodes] == [0, 0]
    assert hf_lossy(*command, tmp_path / "whole").code == 0
    rows = [load_from_disk(str(tmp_path / name)).to_list() for name in ("found", "whole")]
    assert rows[0] == rows[1] and rows[0]
