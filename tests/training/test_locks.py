"""One process at a time at a run's folder: the other one is named at once, and a process that has died is in nobody's way."""

import os
import re

import pytest
from support.collecting import word_prompts
from support.commands import held, names_holder, prompts_file

from hf_lossy_assist.training.processes import Lock
from hf_lossy_assist.training.resumable import start_run


FACTS, RECORD = {"settings": {"seed": 0}}, "run.json"


def run(where, resume=False):
    """A run that leaves its folder unfinished."""
    with start_run(where / "out", where / "out.partial", FACTS, RECORD, resume=resume) as unfinished:
        assert unfinished
        (where / "out.partial" / "00000.parquet").write_bytes(b"")


def test_the_other_process_is_named_with_its_place_and_time(tmp_path):
    part = tmp_path / "out.partial"
    with held(part) as other:
        for resume in (False, True):  # a fresh run beside it is as wrong
            with pytest.raises(ValueError) as error:
                run(tmp_path, resume)
            assert names_holder(str(error.value), part, other.pid)
            assert re.search(r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]", str(error.value))
        assert not part.exists()


def test_a_process_that_was_killed_is_in_nobodys_way(tmp_path):
    with held(tmp_path / "out.partial") as other:
        other.kill()
        other.wait()
        run(tmp_path)
    run(tmp_path, resume=True)


def test_two_runs_of_one_process_are_two(tmp_path):
    with start_run(tmp_path / "out", tmp_path / "out.partial", FACTS, RECORD):
        with pytest.raises(ValueError, match=rf"another process is at .*\(pid {os.getpid()} on "):
            run(tmp_path, resume=True)
    run(tmp_path, resume=True)


def test_an_error_releases_the_folder_and_a_finished_run_leaves_no_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), start_run(tmp_path / "out", tmp_path / "out.partial", FACTS, RECORD):
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["out.partial"]
    with start_run(tmp_path / "out", tmp_path / "out.partial", FACTS, RECORD, resume=True):
        (tmp_path / "out.partial").rename(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    with pytest.raises(ValueError, match="out exists"):
        run(tmp_path)
    assert os.listdir(tmp_path) == ["out"]


def test_a_damaged_note_of_the_holder_is_left_out(tmp_path):
    part = tmp_path / "out.partial"
    with held(part):
        Lock(part).holder.write_text("[")
        with pytest.raises(ValueError, match=r"^another process is at [^\n(]*out\.partial: wait for it"):
            run(tmp_path)


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
def test_each_command_says_who_is_there(hf_lossy, tmp_path, words):
    part = tmp_path / "out.partial"
    words = [prompts_file(tmp_path) if word == "{prompts}" else word for word in words]
    with held(part) as other:
        done = hf_lossy(*words, "--out", tmp_path / "out", "--resume")
        assert names_holder(done.line, part, other.pid) and "wait for it" in done.line
        assert not part.exists() and not (tmp_path / "out").exists()


def test_training_a_drafter_says_who_is_there(tmp_path):
    from support import small

    from hf_lossy_assist.methods.eagle3.collect import TextSettings, collect
    from hf_lossy_assist.methods.eagle3.fit import fit_eagle3
    from hf_lossy_assist.methods.eagle3.initialise import DrafterFitSettings

    target, prompts = small.llama(layers=4), [text.prompt for text in word_prompts(*[5] * 8)]
    data = collect(target, small.tokenizer(), prompts, tmp_path / "texts", TextSettings(new_tokens=4))
    with held(tmp_path / "out.partial") as other, pytest.raises(ValueError) as error:
        fit_eagle3(target, data, tmp_path / "out", DrafterFitSettings(steps=1, epochs=1), resume=True)
    assert names_holder(str(error.value), tmp_path / "out.partial", other.pid)
