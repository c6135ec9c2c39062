"""Runs that are killed and gone on with: one process at a time, the same facts, and nothing done twice; a user's files stay."""

import copy
import json
import os
import shutil
from functools import cache
from pathlib import Path

import pytest
import refused as refusals
import torch
from datasets import load_from_disk
from support import small
from support.commands import held, prompts_file
from support.refusals import refused

from hf_lossy_assist.methods.autojudge import mine as mining
from hf_lossy_assist.methods.autojudge.mine import MineSettings
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
    part = tmp_path / "out.partial"
    part.mkdir()
    (part / "notes.txt").write_text("a user's")
    refused(lambda: begin(tmp_path, resume=True), "out.partial is to hold the unfinished run, and holds files of none")
    (part / "notes.txt").unlink()
    begin(tmp_path)
    (part / "notes.txt").write_text("a user's")
    with RunFolder.opened(tmp_path / "out", RECORD, FACTS, resume=True) as run, run.result():
        pass
    assert os.listdir(part) == ["notes.txt"]
    refused(lambda: RunFolder(tmp_path / "x.partial", RECORD, FACTS), "expected the name of a new folder")


@pytest.mark.full(every=3)
@pytest.mark.parametrize(
    "words",
    [
        ("collect", "--limit", 2, "--max-new-tokens", 4),
        ("collect", "--for", "eagle3", "--limit", 2, "--max-new-tokens", 4),
        ("mine", "--limit", 2),
        ("profile", "--limit", 2, "--max-new-tokens", 16),
        ("compare", "--prompts", "{prompts}", "--no-static", "--max-new-tokens", 4),
        ("tune", "--limit", 10, "--max-new-tokens", 4),
    ],
    ids=lambda words: "-".join(map(str, words[:3])),
)
def test_each_command_says_that_another_process_is_there(hf_lossy, tmp_path, words):
    part = tmp_path / "out.partial"
    words = [prompts_file(tmp_path) if word == "{prompts}" else word for word in words]
    with held(part):
        assert BUSY.format(part) in hf_lossy(*words, "--out", tmp_path / "out", "--resume").line
    assert not part.exists() and not (tmp_path / "out").exists()


# -- real jobs ----------------------------------------------------------------------------------------------------------


@cache
def models():
    target = small.llama()
    return {"target": target, "draft": small.near(target, 0.3), "companion": small.near(target, 0.1)}


class Job:
    """One of three runs, on tiny models; `stop` ends it after all units."""

    def __init__(self, name, where, monkeypatch):
        self.name, self.out, self.part, self.monkeypatch = name, where / "out", where / "out.partial", monkeypatch
        self.record = {"collect": "collect.json", "mine": "mine.json", "profile": "started.json"}[name]
        self.roles = ("target", "draft", "companion")[: 3 if name == "profile" else 2]

    def __call__(self, resume=False, stop=False, **others):
        target, draft, companion = (models() | others).values()
        words, prompts = small.tokenizer(), [f"w{n} w{n + 7} w{n + 11}" for n in range(4)]
        with self.monkeypatch.context() as patch:
            steps = ((collecting, "assemble"), (mining, "assemble"), (profiling, "split_samples"))
            for module, last in steps if stop else ():
                patch.setattr(module, last, interrupted)
            patch.setattr(profiling, "FEWEST", 1)
            if self.name == "collect":
                texts, settings = list(map(PromptText, prompts)), CollectSettings(new_tokens=2, batch_size=1)
                return collecting.collect(target, draft, words, texts, self.out, settings, resume=resume)
            if self.name == "mine":
                file = self.out.parent / "p"
                file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
                task, settings = ExactTask(file), MineSettings(6)
                return mining.mine(target, draft, words, task, task.problems(), self.out, settings, resume=resume)
            settings = ProfileSettings((2,), 6, batch_size=2, batches=(1,), rounds=3)
            return profiling.profile(target, draft, companion, words, prompts, self.out, settings, resume=resume)

    def units(self):
        return {file.name: (file.stat().st_ino, file.read_bytes()) for file in self.part.glob("[0-9]*.*")}


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(params=["collect", "mine", "profile"])
def job(request, tmp_path, monkeypatch):
    job = Job(request.param, tmp_path, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        job(stop=True)
    return job


def test_other_weights_of_the_same_name_and_sizes_are_refused(job):
    for role in job.roles:
        other = copy.deepcopy(models()[role])
        with torch.no_grad():
            other.lm_head.weight.add_(0.1)
        refused(lambda: job(resume=True, **{role: other}), f"out.partial was made with {role}_weights")  # noqa: B023
    assert not job.out.exists()


def test_what_is_missing_alone_is_made_again(job):
    before = job.units()
    removed = min(before)
    (job.part / removed).unlink()
    (job.part / f".{removed}.part").write_bytes(b"half a uni")  # as when it was killed while it wrote
    (job.part / "0-result").mkdir()
    (job.part / "0-result" / "stale").write_text("")
    with pytest.raises(KeyboardInterrupt):
        job(resume=True, stop=True)
    after = job.units()
    assert after.keys() == before.keys() and len(before) > 1
    for name, (inode, data) in after.items():
        assert data == before[name][1] and (name == removed or inode == before[name][0])
    job(resume=True)
    assert job.out.is_dir() and not job.part.exists() and not (job.out / "stale").exists()


@pytest.mark.parametrize("name", ["state.json", "collect.json"])
def test_a_damaged_dataset_is_refused_in_one_line(tmp_path, monkeypatch, name):
    whole = Job("collect", tmp_path, monkeypatch)()
    facts = json.loads((whole / "collect.json").read_text())
    settings = facts["settings"]
    changes = [b"", b"[]", b"{}", b"\xff"]
    if name == "collect.json":
        changes += [
            json.dumps(facts | change).encode()
            for change in (
                {"settings": {}}, {"draft": {"id": "x"}}, {"settings": settings | {"lam": -1}},
                {"settings": settings | {"do_sample": "x"}}, {"settings": settings | {"features": {"model": "x"}}},
            )
        ]  # fmt: skip
    for number, content in enumerate(changes):
        folder = Path(shutil.copytree(whole, tmp_path / f"data{number}"))
        assert len(read_dataset(folder)) == len(load_from_disk(str(folder)))
        (folder / name).write_bytes(content)
        error = refusals.refusal(lambda: read_dataset(folder))  # noqa: B023
        assert refusals.fault(error) is None and str(folder) in str(error), repr(error)
