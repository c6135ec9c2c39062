"""Runs that are gone on with: other weights, damaged parts, parts of another run and records that are none are refused in one line, by the
name of what is wrong; and what is deleted then is made again."""

import json
import shutil
import tracemalloc
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import refused
import torch
from datasets import load_from_disk
from support import small
from typer.testing import CliRunner

from hf_lossy_assist.artifacts.identity import ModelIdentity, weights_hash
from hf_lossy_assist.cli import app
from hf_lossy_assist.methods.autojudge import mine as mining
from hf_lossy_assist.methods.autojudge.dataset import read_mined
from hf_lossy_assist.methods.autojudge.fit import check_models
from hf_lossy_assist.methods.autojudge.mining_loop import MineSettings
from hf_lossy_assist.methods.sprinter import collect as collecting
from hf_lossy_assist.methods.sprinter.collect_runner import CollectSettings
from hf_lossy_assist.methods.sv import profiling
from hf_lossy_assist.methods.sv.profiled_runner import ProfileSettings
from hf_lossy_assist.tasks.load import ExactTask
from hf_lossy_assist.tasks.prompts import PromptText
from hf_lossy_assist.training.resumable import prepare, read_part, write_part
from hf_lossy_assist.training.verifier_dataset import read_dataset


@cache
def models():
    target = small.llama()
    return {
        "target": target,
        "draft": small.near(target, 0.3),
        "companion": small.near(target, 0.1),
        "other": small.llama(seed=1),
    }


@cache
def words():
    return small.tokenizer()


class Job:
    """One of the three runs, on tiny models; `stop` ends it when all of its parts are there."""

    def __init__(self, name, where, monkeypatch):
        self.name, self.out, self.part, self.monkeypatch = name, where / "out", where / "out.partial", monkeypatch
        self.record = {"collect": "collect.json", "mine": "mine.json", "profile": "started.json"}[name]
        self.roles = ("target", "draft", "companion")[: 3 if name == "profile" else 2]
        self.seed = 0

    def __call__(self, resume=False, stop=False, **others):
        given = models() | others
        target, draft, companion = (given[role] for role in ("target", "draft", "companion"))
        with self.monkeypatch.context() as patch:
            for module, last in (
                ((collecting, "assemble"), (mining, "assemble"), (profiling, "split_samples")) if stop else ()
            ):
                patch.setattr(module, last, interrupted)
            patch.setattr(profiling, "FEWEST", 1)
            prompts = [f"w{n} w{n + 7} w{n + 11}" for n in range(4)]
            if self.name == "collect":
                settings = CollectSettings(new_tokens=2, batch_size=1, seed=self.seed)
                return collecting.collect(
                    target, draft, words(), list(map(PromptText, prompts)), self.out, settings, resume=resume
                )
            if self.name == "mine":
                (self.out.parent / "p").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
                task = ExactTask(self.out.parent / "p")
                settings = MineSettings(6, seed=self.seed)
                return mining.mine(target, draft, words(), task, task.problems(), self.out, settings, resume=resume)
            settings = ProfileSettings((2,), 6, batch_size=2, batches=(1,), rounds=3, seed=self.seed)
            return profiling.profile(target, draft, companion, words(), prompts, self.out, settings, resume=resume)

    def left(self, **others):
        """An interrupted run."""
        with pytest.raises(KeyboardInterrupt):
            self(stop=True, **others)
        return self

    def parts(self):
        return sorted(p for p in self.part.iterdir() if p.suffix in (".parquet", ".jsonl", ".safetensors"))

    def refused(self, *names, **given):
        error = refused.refusal(lambda: self(resume=True, **given))
        assert refused.fault(error) is None, f"{refused.fault(error)}: {error!r}"
        for name in names:
            assert name in str(error), str(error)
        assert not self.out.exists()


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.fixture(params=["collect", "mine", "profile"])
def job(request, tmp_path, monkeypatch):
    return Job(request.param, tmp_path, monkeypatch)


def flip(file, place=-40):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


# -- which models -------------------------------------------------------------------------------------------------------


def test_other_weights_of_the_same_name_and_sizes_are_refused(job):
    job.left()
    for role in job.roles:
        assert ModelIdentity.of(models()["other"]) == ModelIdentity.of(models()[role])
        job.refused("other weights", role, **{role: models()["other"]})


def test_a_run_of_an_older_version_did_not_record_weights(job):
    job.left()
    record = job.part / job.record
    facts = json.loads(record.read_text())
    assert sorted(name for name in facts if name.endswith("_weights")) == sorted(
        f"{role}_weights" for role in job.roles
    )
    record.write_text(json.dumps({name: value for name, value in facts.items() if not name.endswith("_weights")}))
    for file in job.part.iterdir():
        if file != record:
            file.unlink()
    with pytest.raises(KeyboardInterrupt):
        job(resume=True, stop=True)


def test_the_hash_tells_checkpoints_apart():
    model = small.llama(seed=5)
    first = weights_hash(model)
    assert weights_hash(small.llama(seed=5)) == first == weights_hash(small.llama(seed=5)) and len(first) == 64
    assert weights_hash(small.llama(seed=6)) != first != weights_hash(small.llama(seed=5).bfloat16())
    for weight in list(model.parameters()):  # one tensor alone, as an adapter that was merged changes few
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(0.01)
        assert weights_hash(model) != first
        with torch.no_grad():
            weight.copy_(before)
    with torch.device("meta"):
        assert weights_hash(type(model)(model.config)) == weights_hash(type(model)(model.config))


def test_a_damaged_part_is_named_and_made_again(job):
    whole = job.left().parts()[0].read_bytes()
    for damage in (flip, lambda file: file.write_bytes(b""), lambda file: file.write_bytes(whole[:-20] + b"\n")):
        file = job.parts()[0]
        damage(file)
        if job.name == "mine" and not file.read_bytes():
            continue  # no line is none to find fault with: its problems are mined again
        job.refused(str(file), "delete it and resume")
        file.unlink()
        with pytest.raises(KeyboardInterrupt):
            job(resume=True, stop=True)
        assert [p.name for p in job.parts()][0] == file.name


def test_a_seal_of_any_size_is_refused_for_little_memory(tmp_path):
    """Somebody else's sparse file: a gigabyte that costs the disk nothing would cost as much memory."""
    part, seal = tmp_path / "0.safetensors", tmp_path / "0.safetensors.sha256"
    write_part(part, b"data", "key")
    whole = seal.read_bytes()
    with open(seal, "ab") as file:
        file.truncate(2**30)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^[^\n]*delete it and resume$"):
            read_part(part, "key")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    seal.write_bytes(whole.strip() + b"\r\n")  # an editor's line end is no damage
    assert read_part(part, "key") == b"data"


def test_parts_that_changed_places_are_found(job):
    job.left()
    if job.name == "mine":  # a line says itself what it is of
        file = job.parts()[0]
        file.write_bytes(b"\n".join(file.read_bytes().split(b"\n")[:-1][::-1]) + b"\n")
        assert job(resume=True) == job.out
        return
    one, other = job.parts()[:2]
    for suffix in ("", ".sha256"):  # with or without what belongs to them
        data = Path(f"{one}{suffix}").read_bytes()
        Path(f"{one}{suffix}").write_bytes(Path(f"{other}{suffix}").read_bytes())
        Path(f"{other}{suffix}").write_bytes(data)
        job.refused(str(one), "delete it and resume")


def test_parts_of_another_run_are_found(job):
    job.left()
    files = {p.name: p.read_bytes() for p in job.part.iterdir()}
    shutil.rmtree(job.part)
    job.seed = 1
    job.left()
    for name, data in files.items():
        if name != job.record:
            (job.part / name).write_bytes(data)
    job.refused(str(job.parts()[0]), "of another run")


@pytest.mark.parametrize("line", [b"{}", b"[]", b"nonsense", b"\xff", b'{"problem": 999}', b"[" * 5000, b"null"])
def test_a_line_that_was_never_written(tmp_path, monkeypatch, line):
    job = Job("mine", tmp_path, monkeypatch).left()
    [file] = job.parts()
    count = file.read_bytes().count(b"\n")
    file.write_bytes(file.read_bytes() + line + b"\n")
    job.refused(f"{file}, line {count + 1}", "delete it and resume")


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch):
    """The way on that it adds could once not be added to an error of JSON's own."""
    arguments = ["mine", "--out", str(tmp_path / "out"), "--limit", "1", "--max-new-tokens", "4", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(mining, "assemble", interrupted)
        assert "--resume goes on" in CliRunner().invoke(app, arguments).output
    file = tmp_path / "out.partial" / "00000.jsonl"
    file.write_text("nonsense\n")
    error = CliRunner().invoke(app, [*arguments, "--resume"]).exception
    assert refused.fault(error) is None and f"{file}, line 1" in str(error), repr(error)


# -- records ------------------------------------------------------------------------------------------------------------

RECORDS = [
    "",
    "[]",
    "null",
    "3",
    '"a"',
    '{"a": 1',
    "{}",
    '{"settings": []}',
    "[" * 5000,
    '{"a": 1, "a": 2}',
    '{"a": NaN}',
]


@pytest.mark.full(every=15)
@pytest.mark.nightly(every=5)
@pytest.mark.parametrize("text", RECORDS, ids=lambda text: text[:20])
def test_a_record_that_is_none(job, text):
    job.left()
    (job.part / job.record).write_text(text)
    job.refused(str(job.part), "delete")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Whole datasets of both kinds, and how each is read."""
    where = tmp_path_factory.mktemp("finished")
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, read in (("collect", read_dataset), ("mine", read_mined)):
            (where / name).mkdir()
            found[name] = Job(name, where / name, patch)(), read
    return found


@pytest.fixture(params=["collect", "mine"])
def dataset(request, finished, tmp_path):
    out, read = finished[request.param]
    return (
        Path(shutil.copytree(out, tmp_path / "data")),
        read,
        {"collect": "collect.json", "mine": "mine.json"}[request.param],
    )


def test_a_finished_dataset_is_whole(dataset):
    folder, read, record = dataset
    before = len(read(folder))
    facts = json.loads((folder / record).read_text())
    assert set(facts["files"]) == {p.name for p in folder.iterdir()} - {record, "README.md"}
    moved = Path(shutil.copytree(folder, folder.with_name("x.partial")))
    error = refused.refusal(lambda: prepare(folder.with_name("x"), moved, facts, True, record))
    assert refused.fault(error) is None and "x.partial is a finished run" in str(error)
    assert len(load_from_disk(str(folder))) == before
    [file] = folder.glob("*.arrow")
    for place in (len(file.read_bytes()) // 2, 8, -8):
        flip(file, place)
        error = refused.refusal(lambda: read(folder))
        assert refused.fault(error) is None and str(file) in str(error)
        flip(file, place)
    arrow = {name: value for name, value in facts["files"].items() if name.endswith(".arrow")}
    (folder / record).write_text(json.dumps(facts | {"files": arrow}))
    assert len(read(folder)) == before  # version 0.1.0 recorded those alone
    for change in ({"files": {}}, {"files": None}, {"files": 3}):
        (folder / record).write_text(json.dumps(facts | change))
        error = refused.refusal(lambda: read(folder))
        assert refused.fault(error) is None and str(folder) in str(error), repr(error)
    (folder / record).write_text(json.dumps({name: value for name, value in facts.items() if name != "files"}))
    error = refused.refusal(lambda: read(folder))
    assert refused.fault(error) is None and "expected the SHA-256 of each file" in str(error)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_dataset_reads_no_other_folder(dataset, sealed):
    """Its checksums passed, and training read what lay elsewhere."""
    folder, read, record = dataset
    shutil.copytree(folder, folder.with_name("other"))
    state, facts = json.loads((folder / "state.json").read_text()), json.loads((folder / record).read_text())
    [file] = state["_data_files"]
    if not sealed:  # as version 0.1.0 left it
        facts["files"] = {name: value for name, value in facts["files"].items() if name.endswith(".arrow")}
        (folder / record).write_text(json.dumps(facts))
    for name in (
        f"../other/{file['filename']}",
        str(folder.with_name("other") / file["filename"]),
        "data-9.arrow",
        3,
        None,
    ):
        (folder / "state.json").write_text(json.dumps(state | {"_data_files": [{"filename": name}]}))
        error = refused.refusal(lambda: read(folder))
        assert refused.fault(error) is None and str(folder / "state.json") in str(error), repr(error)


# -- whose files --------------------------------------------------------------------------------------------------------


def test_a_users_folder_is_not_taken(job):
    (job.part / "whole").mkdir(parents=True)
    (job.part / "notes.txt").write_text("mine")
    (job.part / "whole" / "more.part").write_text("mine")
    for resume in (False, True):
        error = refused.refusal(lambda: job(resume=resume))  # noqa: B023
        assert refused.fault(error) is None and f"{job.part} is to hold" in str(error) and "notes.txt" in str(error)
    assert (job.part / "whole" / "more.part").read_text() == "mine" == (job.part / "notes.txt").read_text()
    assert not job.out.exists()


@pytest.mark.full(every=4)
def test_a_users_files_beside_a_run_stay(job):
    job.left()
    user_files = {"notes.txt", "mine.part", "data.parquet", ".config.json", f".{job.record}"}
    for name in user_files:
        (job.part / name).write_text("mine")
    with pytest.warns(
        UserWarning, match=r"out.partial stays, for it holds files that the run did not write: .*notes.txt"
    ):
        job(resume=True)
    assert job.out.is_dir() and {file.name for file in job.part.iterdir()} == user_files


@pytest.mark.full(every=4)
def test_a_run_leaves_nothing_behind(job):
    job.left()
    (job.part / f".{job.record}.part").write_text("")  # as when it was killed while it wrote
    (job.part / ".whole.abcd_123").mkdir()
    job(resume=True)
    assert job.out.is_dir() and not job.part.exists()


def test_a_dataset_that_was_not_moved_any_more_is_made_again(tmp_path, monkeypatch):
    job = Job("collect", tmp_path, monkeypatch)
    whole = Path(shutil.copytree(job(), tmp_path / "kept"))
    shutil.rmtree(job.out)
    job.left()
    shutil.copytree(whole, job.part / "whole")
    (job.part / "whole" / "notes.txt").write_text("mine")
    job.refused(str(job.part / "whole"), "no run wrote")
    (job.part / "whole" / "notes.txt").unlink()
    assert job(resume=True) == job.out and not job.part.exists()


@pytest.mark.parametrize(
    "text", [t for t in RECORDS if t not in ("{}", '{"settings": []}')], ids=lambda text: text[:20]
)
def test_a_finished_record_that_is_none(dataset, text):
    folder, read, record = dataset
    (folder / record).write_text(text)
    error = refused.refusal(lambda: read(folder))
    assert refused.fault(error) is None and record in str(error), repr(error)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff"])
@pytest.mark.parametrize("name", ["dataset_info.json", "state.json"])
def test_what_datasets_wrote_beside_it_is_damaged(dataset, name, content):
    folder, read, _ = dataset
    (folder / name).write_bytes(content)
    error = refused.refusal(lambda: read(folder))
    assert refused.fault(error) is None and str(folder) in str(error), repr(error)


def test_a_record_without_what_fitting_reads(finished, tmp_path):
    folder = Path(shutil.copytree(finished["collect"][0], tmp_path / "data"))
    facts = json.loads((folder / "collect.json").read_text())
    changes = [{name: None} for name in ("settings", "target", "draft", "tokenizer_hash", "source", "prompts")]
    changes += [
        {"draft": {"id": "x"}},
        {"target": []},
        {"settings": {}},
        {"settings": {"lam": "x", "features": {}}},
        {"files": []},
    ]
    changes += [
        {"settings": facts["settings"] | {"features": {"model": "x"}}},
        {"draft": facts["draft"] | {"hidden_size": "3"}},
    ]
    settings = (
        {"do_sample": "x"},
        {"temperature": "x"},
        {"temperature": 0},
        {"top_p": -5},
        {"top_k": 0.5},
        {"lam": -1},
        {"mix": 2},
    )
    changes += [{"settings": facts["settings"] | wrong} for wrong in settings]
    changes += [{"settings": facts["settings"] | {"features": facts["settings"]["features"] | {"model": "target"}}}]
    changes += [{"versions": 5}, {"hidden_size": 7}, {"hidden_size": True}, {"prompts": -1}]
    for change in changes:
        (folder / "collect.json").write_text(json.dumps(facts | change))
        error = refused.refusal(lambda: read_dataset(folder))
        assert error is not None and refused.fault(error) is None, f"{change}: {error!r}"
        assert next(iter(change)) in str(error) or "collect.json" in str(error), f"{change}: {error!r}"


def test_a_record_of_mining_that_no_run_wrote(finished, tmp_path):
    folder = Path(shutil.copytree(finished["mine"][0], tmp_path / "data"))
    facts = json.loads((folder / "mine.json").read_text())
    settings = (
        {"do_sample": "x"},
        {"do_sample": True, "temperature": "x"},
        {"do_sample": True, "top_p": -5},
        {"naive": 3},
    )
    changes = [{"settings": facts["settings"] | wrong} for wrong in settings]
    changes += [
        {"versions": 5},
        {"dtypes": "x"},
        {"dtypes": [1, 2]},
        {"problems": 0},
        {"task": 5},
        {"source": []},
        {"draft": {}},
    ]
    for change in changes:
        (folder / "mine.json").write_text(json.dumps(facts | change))
        error = refused.refusal(
            lambda: check_models(read_mined(folder), models()["target"], models()["draft"], words())
        )
        assert error is not None and refused.fault(error) is None, f"{change}: {error!r}"
        assert "mine.json" in str(error), f"{change}: {error!r}"


def test_an_identity_is_of_its_entries_and_types():
    made = ModelIdentity.of(models()["target"])
    assert ModelIdentity.from_dict(json.loads(json.dumps(asdict(made)))) == made
    for change in (
        {"id": 3},
        {"hidden_size": "3"},
        {"vocab_size": True},
        {"revision": []},
        {"more": 1},
        {"num_layers": 10**400},
    ):
        error = refused.refusal(lambda: ModelIdentity.from_dict(asdict(made) | change))  # noqa: B023
        assert refused.fault(error) is None, f"{change}: {error!r}"
