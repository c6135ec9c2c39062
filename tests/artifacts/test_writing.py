"""Places at which nothing can be written are refused before any work."""

import os
import subprocess
import sys

import pytest
from support.refusals import refused

from hf_lossy_assist.artifacts.files import check_file, check_new, new_folder, write_text


FULL = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")


def test_a_link_that_leads_nowhere_and_a_missing_folder_are_refused_before_the_work(hf_lossy, tmp_path):
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "gone")
    for command in (
        "collect", "collect --for eagle3", "mine", "profile", "compare", "tune", "fit sprinter data",
        "fit specdec data", "fit autojudge data", "fit eagle3 data", "fit dspark data",
        "pull nobody/nothing --local-files-only",
    ):  # fmt: skip
        line = hf_lossy(*command.split(), "--out", out).line
        assert line.startswith(f"hf-lossy: {out} exists: choose another --out, or delete it"), command
        assert os.listdir(tmp_path) == ["out"]
    line = hf_lossy("report", "x", "--out", tmp_path / "none" / "page.html").line
    assert f"{tmp_path / 'none'} is no folder that can be written into: choose another place, or make it" in line


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: check_new(tmp_path / "file" / "deep" / "out"), "file is no folder that can be written into")
    refused(lambda: check_file("--out", tmp_path), "is no regular file: pass the name of a file")
    check_new(tmp_path / "deep" / "out")
    check_file("--out", tmp_path / "file")


def test_what_is_no_file_is_refused_before_the_work(hf_lossy, tmp_path):
    pipe, link, loop = (tmp_path / f"{name}.html" for name in ("pipe", "link", "loop"))
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    for path in (pipe, link, loop):
        line = hf_lossy("report", "x", "--out", path).line
        assert line == f"hf-lossy: {path} is no regular file: pass the name of a file"
    assert pipe.is_fifo() and link.is_symlink() and loop.is_symlink()


def test_a_link_is_followed(tmp_path):
    for name in ("there", "absent"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.txt").symlink_to(tmp_path / name / "file")
    (tmp_path / "there" / "file").write_text("old")
    for name in ("there", "absent"):
        check_file("--out", tmp_path / f"{name}.txt")
        write_text(tmp_path / f"{name}.txt", "new")
        assert (tmp_path / f"{name}.txt").is_symlink() and (tmp_path / name / "file").read_text() == "new"
        assert os.listdir(tmp_path / name) == ["file"]
    os.mkfifo(tmp_path / "pipe")
    refused(lambda: write_text(tmp_path / "pipe", "text"), "pipe is no regular file")


def test_saving_into_a_folder_with_links_and_what_is_no_file(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    (tmp_path / "blob").write_text("old")
    (folder / "a.json").symlink_to(tmp_path / "blob")

    def save(path, *names):
        with new_folder(path) as made:
            for name in names:
                (made / name).write_text("new")

    save(folder, "a.json", "b.json")
    assert (folder / "a.json").is_symlink()
    assert (tmp_path / "blob").read_text() == (folder / "b.json").read_text() == "new"
    os.mkfifo(folder / "d.json")
    refused(lambda: save(folder, "c.json", "d.json"), "d.json is no regular file")
    assert sorted(os.listdir(folder)) == ["a.json", "b.json", "d.json"] and (folder / "d.json").is_fifo()
    refused(lambda: save(folder / "d.json"), "d.json is no folder")
    (tmp_path / "link").symlink_to("gone")
    with pytest.raises(ValueError, match="link is no folder"), new_folder(tmp_path / "link"):
        pytest.fail("the work was begun")


@FULL
def test_standard_output_that_is_full_is_named():
    command = [sys.executable, "-m", "hf_lossy_assist.cli", "--version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "hf-lossy: [Errno 28] No space left on device\n"
