"""`push` uploads the files that a folder of its kind consists of, and no other, wherever a link leads."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import create_repo, upload_folder
from support.refusals import refused

from hf_lossy_assist import HeadConfig, LinearHead, Sprinter, demo
from hf_lossy_assist.policy.sharing import pull, push


SHIPPED = demo.FOLDER / "sprinter_head"


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "id_rsa"
    file.write_text("SECRET")
    return file


def uploaded(hub, repo: str, repo_type: str = "model") -> set[str]:
    return set(hub.files(repo, repo_type=repo_type)) - {".gitattributes"}


def sprinter(folder: Path) -> Path:
    torch.manual_seed(0)
    Sprinter(LinearHead(HeadConfig(4)).eval()).save_pretrained(folder)
    return folder


def head(folder: Path) -> Path:
    return Path(shutil.copytree(SHIPPED, folder))


def models(folder: Path) -> Path:
    for name in ("draft", "sv_profile", "autojudge_head"):
        shutil.copytree(demo.FOLDER / name, folder / name)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


def dataset(folder: Path) -> Path:
    from datasets import Dataset

    Dataset.from_dict({"a": [1]}).save_to_disk(str(folder))
    (folder / "mine.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    return folder


MAKERS = {"policy": sprinter, "models": models, "dataset": dataset}
OTHERS = ("weights.pickle.gz", "rows.npy", "notes.txt", "env", "sub/deep/model.safetensors", "key.json", "a/b.py")


@pytest.mark.parametrize(
    "kind", ["policy", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("models", "dataset"))]
)
def test_what_does_not_belong_there_stays_here(hub, tmp_path, kind):
    folder = MAKERS[kind](tmp_path / kind)
    expected = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    skipped = [name for name in OTHERS if "pickle" not in name]
    for name in [*skipped, ".env", ".git/config", "__pycache__/x.pyc"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # As a whole file: else it would be refused for another reason.
        data = (SHIPPED / "model.safetensors").read_bytes() if name.endswith("safetensors") else b"SECRET"
        (folder / name).write_bytes(data)
    with pytest.warns(UserWarning, match="not uploaded, for this package has no such files: .* and 1 more") as caught:
        push(folder, "org/it")
    [ours] = [str(warning.message) for warning in caught if str(warning.message).startswith("not uploaded")]
    assert "\n" not in ours
    assert uploaded(hub, "org/it", "dataset" if kind == "dataset" else "model") == expected
    (folder / OTHERS[0]).write_bytes(b"x")
    refused(lambda: push(folder, "org/it"), "weights.pickle.gz, a pickle")


def test_what_a_link_leads_to_is_not_uploaded(hub, tmp_path, secret):
    for name in ("README.md", "roc.png", "config.json"):
        folder = head(tmp_path / name)
        if name != "roc.png":  # as these are read before
            (folder / name).replace(secret)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        refused(lambda: push(folder, "org/it"), f"{name} is a link: only files are uploaded")  # noqa: B023
        assert not hub.requests


def test_a_link_to_a_folder_is_not_gone_into(hub, tmp_path, secret):
    folder = sprinter(tmp_path / "policy")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text(json.dumps({"key": "SECRET"}))
    (folder / "other").symlink_to(tmp_path / "private")
    (folder / "notes.txt").symlink_to(secret)
    with pytest.warns(UserWarning, match="not uploaded.*: notes.txt, other$"):
        push(folder, "org/it")
    assert uploaded(hub, "org/it") == {
        "README.md",
        "policy.json",
        "stop_head/config.json",
        "stop_head/model.safetensors",
    }
    assert not [data for data in hub.files("org/it").values() if b"SECRET" in data]


def test_a_damaged_folder_is_not_pushed_and_not_pulled(hub, tmp_path):
    folder = sprinter(tmp_path / "it")
    (folder / "stop_head" / "model.safetensors").write_bytes(b"")
    refused(lambda: push(folder, "org/it"), "SHA-256 differs")
    assert not hub.requests
    create_repo("org/it")
    upload_folder(repo_id="org/it", folder_path=folder)
    refused(lambda: pull("org/it", tmp_path / "copy"), "SHA-256 differs")
    assert not (tmp_path / "copy").exists()
