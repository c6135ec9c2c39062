"""Several processes do what one does: the same texts, figures and data, whoever did which part."""

import csv
import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from datasets import load_from_disk
from support import commands
from support.commands import prompts_file

from hf_lossy_assist.artifacts.sv_profile import Profile


COMPARE = ("compare", "--limit", 3, "--max-new-tokens", 8, "--no-static", "--policies", "svip", "--batch-size", 2)
GENERATE = ("generate", "--policy", "svip", "--do-sample", "--max-new-tokens", 8, "--batch-size", 2, "--json")
COLLECT = ("collect", "--limit", 4, "--max-new-tokens", 8, "--batch-size", 1)
MINE = ("mine", "--limit", 3, "--max-new-tokens", 64, "--batch-size", 1)
TUNE = ("tune", "--limit", 6, "--first", 2, "--max-new-tokens", 72, "--policies", "svip,top_k:k=3+svip")
PROFILE = ("profile", "--limit", 40, "--max-new-tokens", 32, "--gamma", 3, "--batch-size", 2, "--rounds", 3)


def answers(folder: Path):
    """Return each arm's text for each prompt, and the figures that are not seconds."""
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    fields = ("batch_size", "arm", "prompt", "token_ids", "right", "num_accepted_draft_tokens", "target_calls")
    rows = list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))
    names = ("arm", "batch_size", "new_tokens", "equal", "right", "lossy", "acceptance", "tokens_per_target_call")
    return [[line[name] for name in fields] for line in lines], [[row[name] for name in names] for row in rows]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_several_processes_do_what_one_does(hf_lossy, tmp_path, count):
    generate = (*GENERATE, "--prompts", prompts_file(tmp_path, 5))
    jobs = {"compare": COMPARE, "collect": COLLECT}
    if count > 2:
        jobs |= {"mine": MINE, "profile": PROFILE, "tune": TUNE}
    alone, both = ({name: tmp_path / f"{name}{n}" for name in jobs} for n in (1, count))
    for name, command in jobs.items():
        assert hf_lossy(*command, "--out", alone[name]).code == 0
    texts = hf_lossy(*generate).json
    job = commands.start(tmp_path, count, generate, *((*jobs[name], "--out", both[name]) for name in jobs))
    done = commands.ended(job)
    assert done.code == 0, done.err[-3000:]
    written = json.JSONDecoder().raw_decode(done.out[done.out.index("{") :])[0]
    outputs = [[output["token_ids"] for output in found["outputs"]] for found in (written, texts)]
    assert outputs[0] == outputs[1]
    assert written["speculation"]["num_spec_steps"] == texts["speculation"]["num_spec_steps"]
    assert answers(both["compare"]) == answers(alone["compare"])
    assert sorted(os.listdir(both["compare"])) == sorted(os.listdir(alone["compare"]))
    for name in jobs.keys() & {"collect", "mine"}:
        rows = [load_from_disk(str(run[name])).to_list() for run in (alone, both)]
        assert rows[0] == rows[1] and len(rows[0]) > 5, name
    if count > 2:
        lines = (answers(run["tune"])[0] for run in (alone, both))
        texts = [{(arm, number): (ids, right) for _, arm, number, ids, right, *_ in each} for each in lines]
        shared = texts[0].keys() & texts[1].keys()  # which are candidates is for the clock to say
        assert all(texts[0][key] == texts[1][key] for key in shared) and len(shared) >= 2 * 3 + 4 * 2
        bins = (vars(Profile.from_pretrained(run["profile"]).bins) for run in (alone, both))
        np.testing.assert_equal(*bins)
    assert done.out.count("tokens of 4 prompts, with a data card") == 1, "one of them speaks"
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".partial")]


def find_workers(pid):
    """The processes that torchrun has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if b"commands.py" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="/proc as Linux has it")
def test_one_of_three_killed_and_gone_on_with_by_two(hf_lossy, tmp_path):
    """kill -9 of one ends the job at once; the data set is that of one process that nothing disturbed."""
    command, part = (*COLLECT, "--limit", 40), tmp_path / "found.partial"
    job, deadline = commands.start(tmp_path, 3, (*command, "--out", tmp_path / "found")), time.monotonic() + 200
    while len(list(part.glob("*.parquet"))) < 3:
        assert job.poll() is None and time.monotonic() < deadline, job.communicate()
        time.sleep(0.05)
    os.kill(find_workers(job.pid)[1], signal.SIGKILL)
    _, err = job.communicate(timeout=100)
    assert job.returncode != 0 and "Signal 9" in err and not (tmp_path / "found").exists()
    before = {file: file.stat().st_ino for file in part.glob("*.parquet")}
    job, seen = commands.start(tmp_path, 2, (*command, "--out", tmp_path / "found", "--resume")), set()
    while job.poll() is None:
        with suppress(FileNotFoundError):  # in the end they are put together, and taken away
            for file, inode in before.items():
                assert file.stat().st_ino == inode, f"{file.name} is done again"
                seen.add(file)
        time.sleep(0.02)
    _, err = job.communicate()
    assert job.returncode == 0, err[-3000:]
    assert seen == set(before), "nothing is done twice"
    assert hf_lossy(*command, "--out", tmp_path / "whole").code == 0
    rows = [load_from_disk(str(tmp_path / name)).to_list() for name in ("found", "whole")]
    assert rows[0] == rows[1] and rows[0]
