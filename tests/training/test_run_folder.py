"""Runs that are killed and gone on with: one process at a time, the same facts, and nothing done twice; a user's files stay."""

import copy
import csv
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from support import commands, small
from support.commands import held, prompts_file
from support.refusals import refused

from hf_lossy_assist.artifacts.profile_tables import Latency
from hf_lossy_assist.artifacts.sv_profile import PROFILE, Profile
from hf_lossy_assist.methods.autojudge import mine as mining
from hf_lossy_assist.methods.autojudge.mine import MineSettings
from hf_lossy_assist.methods.eagle3.collect import TextSettings, collect_texts
from hf_lossy_assist.methods.sprinter import collect as collecting
from hf_lossy_assist.methods.sprinter.collect import CollectSettings
from hf_lossy_assist.methods.sv import profiling
from hf_lossy_assist.methods.sv.collect_samples import ProfileSettings
from hf_lossy_assist.tasks.load import ExactTask
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.run_folder import RunFolder
from hf_lossy_assist.training.verifier_dataset import read_dataset


FACTS, RECORD = {"settings": {"seed": 0}, "of": (1, 2)}, "run.json"
BUSY = "another process is at {}: wait for it, or choose another --out"


def begin(where, facts=FACTS, resume=False):
    """Leave a folder unfinished, with one unit."""
    with RunFolder.opened(where / "out", RECORD, facts, resume=resume) as run:
        (run.part / "00000.parquet").write_bytes(b"")


def test_one_process_at_a_time_and_a_killed_one_is_in_nobodys_way(tmp_path):
    part = tmp_path / "out.partial"
    with held(part) as other:
        for resume in (False, True):
            refused(lambda: begin(tmp_path, resume=resume), BUSY.format(part))  # noqa: B023
        assert not part.exists()
        other.kill()
        other.wait()
        begin(tmp_path)
    with RunFolder.opened(tmp_path / "out", RECORD, FACTS, resume=True):
        refused(lambda: begin(tmp_path, resume=True), BUSY.format(part))
    begin(tmp_path, resume=True)


def test_an_error_releases_the_folder_and_a_finished_run_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunFolder.opened(tmp_path / "out", RECORD, FACTS):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out.partial"]
    begin(tmp_path, resume=True)
    for failing in (True, False):  # an error while the result is written leaves it unfinished
        with RunFolder.opened(tmp_path / "out", RECORD, FACTS, resume=True) as run:
            assert run.list_missing(["00000.parquet", "00001.parquet"]) == [1]
            try:
                with run.result() as folder:
                    (folder / "rows").write_text(str(failing))
                    assert not failing
            except AssertionError:
                continue
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out" / "rows").read_text() == "False"
    refused(lambda: begin(tmp_path), "out exists")


def test_a_run_goes_on_with_the_same_facts_alone(tmp_path):
    begin(tmp_path)
    begin(tmp_path, FACTS | {"source": "elsewhere"}, resume=True)
    refused(lambda: begin(tmp_path), "out.partial holds an unfinished run: pass --resume to go on")
    for facts, says in (
        ({"settings": {"seed": 1}, "of": (1, 2)}, "was made with seed 0, this run has 1: use the same, or delete it"),
        ({"settings": {"seed": 0}, "of": (1, 3)}, r"was made with of \[1, 2\], this run has \[1, 3\]"),
    ):
        refused(lambda: begin(tmp_path, facts, resume=True), says)  # noqa: B023
    for text in ("", "[]", '{"a": 1', '{"settings": {}}', "[" * 5000):
        (tmp_path / "out.partial" / RECORD).write_text(text)
        refused(lambda: begin(tmp_path, resume=True), "out.partial")


def test_a_users_files_are_neither_taken_nor_removed(tmp_path):
    part, neighbour = tmp_path / "out.partial", tmp_path / ".out.backup"
    part.mkdir()
    for file in (part / "notes.txt", neighbour):
        file.write_text("a user's")
    refused(lambda: begin(tmp_path, resume=True), "out.partial is to hold the unfinished run, and holds files of none")
    (part / "notes.txt").unlink()
    begin(tmp_path)
    (part / "notes.txt").write_text("a user's")
    with RunFolder.opened(tmp_path / "out", RECORD, FACTS, resume=True) as run, run.result():
        pass
    assert os.listdir(part) == ["notes.txt"] and neighbour.exists()
    refused(lambda: RunFolder(tmp_path / "x.partial", RECORD, FACTS), "expected the name of a new folder")


COMMANDS = (
    ("collect", "--limit", 2, "--max-new-tokens", 4), ("collect", "--for", "eagle3", "--limit", 2, "--max-new-tokens", 4),
    ("mine", "--limit", 2), ("profile", "--limit", 2, "--max-new-tokens", 16),
    ("compare", "--limit", 2, "--no-static", "--max-new-tokens", 4), ("tune", "--limit", 10, "--max-new-tokens", 4),
)  # fmt: skip


@pytest.mark.full
def test_each_command_says_that_another_process_is_there(hf_lossy, tmp_path):
    part = tmp_path / "out.partial"
    with held(part):
        for words in COMMANDS:
            assert BUSY.format(part) in hf_lossy(*words, "--out", tmp_path / "out", "--resume").line, words
    assert not part.exists() and not (tmp_path / "out").exists()


# -- real jobs: each one with each way in which it may have been killed -----------------------------------------------------


@cache
def models():
    target = small.llama()
    return {"target": target, "draft": small.near(target, 0.3), "companion": small.near(target, 0.1)}


PROMPTS = [f"w{n} w{n + 7} w{n + 11}" for n in range(4)]
LAST = {
    "collect": (collecting, "assemble"), "mine": (mining, "assemble"), "profile": (profiling, "split_samples"),
    "texts": (Path, "rename"),
}  # fmt: skip
SECONDS = Latency(np.array([1]), np.array([[0, 2]]), np.ones((1, 2)), *np.ones((3, 1)))


class Job:
    """One of four runs, on tiny models; `stop` ends it after all units."""

    def __init__(self, name, where, monkeypatch):
        self.name, self.out, self.part, self.monkeypatch = name, where / "out", where / "out.partial", monkeypatch
        self.roles = {"profile": ("target", "draft", "companion"), "texts": ("target",)}.get(name, ("target", "draft"))

    def __call__(self, resume=False, stop=False, prompts=PROMPTS, new=6, out=None, **others):
        target, draft, companion = (models() | others).values()
        words, out = small.tokenizer(), out or self.out
        with self.monkeypatch.context() as patch:
            if stop:
                patch.setattr(*LAST[self.name], interrupted)
            patch.setattr(profiling, "FEWEST", 1)
            if resume:  # which takes most of its time
                patch.setattr(profiling, "measure_latency", lambda *_: SECONDS)
            if self.name == "collect":
                texts, settings = list(map(PromptText, prompts)), CollectSettings(new_tokens=new, batch_size=1)
                return collecting.collect(target, draft, words, texts, out, settings, resume=resume)
            if self.name == "texts":
                settings = TextSettings(new_tokens=new, layers=(0, 1), batch_size=1)
                return collect_texts(target, words, prompts, out, settings, resume=resume)
            if self.name == "mine":
                file = self.out.parent / "p"
                file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
                task, settings = ExactTask(file), MineSettings(new)
                return mining.mine(target, draft, words, task, task.problems(), out, settings, resume=resume)
            settings = ProfileSettings((2,), new, batch_size=2, batches=(1,), rounds=3)
            return profiling.profile(target, draft, companion, words, prompts, out, settings, resume=resume)

    def units(self):
        return {file.name: (file.stat().st_ino, file.read_bytes()) for file in self.part.glob("[0-9]*.*")}


def interrupted(*_, **__):
    raise KeyboardInterrupt


def read_result(folder):
    """Return the contents of a result that do not depend on the clock."""
    if (folder / PROFILE).exists():
        return {name: value.tolist() for name, value in vars(Profile.from_pretrained(folder).bins).items()}
    fingerprints = {file.name for file in folder.glob("*.arrow")} | {"state.json", "dataset_info.json"}
    files = {file.name: file.read_bytes() for file in folder.glob("[!.]*") if file.name not in fingerprints}
    return files, load_from_disk(str(folder)).to_list() if (folder / "state.json").exists() else None


@pytest.mark.full
@pytest.mark.parametrize("name", LAST)
def test_a_killed_job_goes_on_to_the_result_of_an_undisturbed_one(tmp_path, monkeypatch, name):
    job = Job(name, tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        job(stop=True)
    before = job.units()
    for role in job.roles:
        other = copy.deepcopy(models()[role])
        with torch.no_grad():
            other.lm_head.weight.add_(0.1)
        refused(lambda: job(resume=True, **{role: other}), f"out.partial was made with {role}_weights")  # noqa: B023
    refused(lambda: job(resume=True, new=7), "new_tokens")
    refused(lambda: job(resume=True, prompts=PROMPTS[:-1]), "(prompts|problems) 4, this run has 3")
    refused(lambda: job(resume=True, prompts=PROMPTS[::-1]), "(prompts|problems)_sha256")
    refused(job, "pass --resume")
    removed = min(before)
    (job.part / removed).unlink()
    (job.part / f".{removed}.part").write_bytes(b"half a uni")  # as when it was killed while it wrote
    if name != "texts":  # or while it put them together
        (job.part / "0-result").mkdir()
        (job.part / "0-result" / "stale").write_text("")
    with pytest.raises(KeyboardInterrupt):
        job(resume=True, stop=True)
    after = job.units()
    assert after.keys() == before.keys() and len(before) > 1
    for unit, (inode, data) in after.items():
        assert data == before[unit][1] and (unit == removed or inode == before[unit][0]), "nothing is done twice"
    job(resume=True)
    assert not job.part.exists() and not (job.out / "stale").exists()
    job(out=tmp_path / "whole")
    assert read_result(job.out) == read_result(tmp_path / "whole")
    for resume in (False, True):
        refused(lambda: job(resume=resume), "exists")  # noqa: B023


def test_a_damaged_dataset_is_refused_in_one_line(tmp_path, monkeypatch):
    whole = Job("collect", tmp_path, monkeypatch)()
    facts = json.loads((whole / "collect.json").read_text())
    settings = facts["settings"]
    contents = [b"", b"[]", b"{}", b"\xff"]
    damages = [(name, content) for name in ("state.json", "collect.json") for content in contents]
    for change in (
        {"settings": {}}, {"draft": {"id": "x"}}, {"settings": settings | {"lam": -1}},
        {"settings": settings | {"do_sample": "x"}}, {"settings": settings | {"features": {"model": "x"}}},
    ):  # fmt: skip
        damages.append(("collect.json", json.dumps(facts | change).encode()))
    assert len(read_dataset(whole)) == len(load_from_disk(str(whole)))
    for number, (name, content) in enumerate(damages):
        folder = Path(shutil.copytree(whole, tmp_path / f"data{number}"))
        (folder / name).write_bytes(content)
        refused(lambda: read_dataset(folder), str(folder))  # noqa: B023


# -- several processes do what one does: the same texts, figures and data -----------------------------------------------


TEXTS = ("generate", "--policy", "svip", "--do-sample", "--max-new-tokens", 8, "--batch-size", 2, "--json")
SPLIT = {
    "compare": "--limit 3 --max-new-tokens 8 --no-static --policies svip --batch-size 2",
    "collect": "--limit 4 --max-new-tokens 8 --batch-size 1",
    "mine": "--limit 3 --max-new-tokens 64 --batch-size 1",
    "tune": "--limit 6 --first 2 --max-new-tokens 72 --policies svip,top_k:k=3+svip",
    "profile": "--limit 40 --max-new-tokens 32 --gamma 3 --batch-size 2 --rounds 3",
}


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
    generate, jobs = (*TEXTS, "--prompts", prompts_file(tmp_path, 5)), list(SPLIT)[: 2 if count == 2 else None]
    alone, both = ({name: tmp_path / f"{name}{n}" for name in jobs} for n in (1, count))
    for name in jobs:
        assert hf_lossy(name, *SPLIT[name].split(), "--out", alone[name]).code == 0
    texts = hf_lossy(*generate).json
    job = commands.start(
        tmp_path, count, generate, *((name, *SPLIT[name].split(), "--out", both[name]) for name in jobs)
    )
    done = commands.ended(job)
    assert done.code == 0, done.err[-3000:]
    written = json.JSONDecoder().raw_decode(done.out[done.out.index("{") :])[0]
    outputs = [[output["token_ids"] for output in found["outputs"]] for found in (written, texts)]
    assert outputs[0] == outputs[1]
    assert written["speculation"]["num_spec_steps"] == texts["speculation"]["num_spec_steps"]
    assert answers(both["compare"]) == answers(alone["compare"])
    assert sorted(os.listdir(both["compare"])) == sorted(os.listdir(alone["compare"]))
    for name in {"collect", "mine"} & set(jobs):
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
    command, part = ("collect", *SPLIT["collect"].split(), "--limit", 40), tmp_path / "found.partial"
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
