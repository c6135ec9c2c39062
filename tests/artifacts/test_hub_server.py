"""The real client against the Hub of `hub_server`: push, pull, cache, pin, and be refused, each with the client's own exception."""

import hashlib
from pathlib import Path

import pytest
from huggingface_hub import (
    HfApi,
    create_repo,
    hf_hub_download,
    list_repo_files,
    model_info,
    repo_exists,
    snapshot_download,
    upload_file,
    upload_folder,
    whoami,
)
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
from support.hub_server import card_problems


CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\ntags:\n- test\n---\n\n# A card\n"
REPO = "org/things"


@pytest.fixture
def folder(tmp_path):
    """Small text, an empty file, a binary file, and a file in a subfolder."""
    path = tmp_path / "things"
    (path / "deep" / "er").mkdir(parents=True)
    (path / "README.md").write_text(CARD)
    (path / "empty.txt").write_bytes(b"")
    (path / "deep" / "er" / "config.json").write_text("{}")
    (path / "weights.safetensors").write_bytes(bytes(range(256)) * 40)
    return path


def pushed(folder, **settings):
    create_repo(REPO, exist_ok=True, **settings)
    return upload_folder(repo_id=REPO, folder_path=folder, commit_message="push").oid


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- push --------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_folder_goes_up_and_comes_down_again(hub, folder, tmp_path):
    assert whoami()["name"] == "tester"
    oid = pushed(folder)
    held = hub.files(REPO)
    assert {path: held[path] for path in contents(folder)} == contents(folder)
    info = model_info(REPO, files_metadata=True)
    assert (info.sha, info.private, info.gated, info.library_name, info.tags) == (
        oid,
        False,
        False,
        "transformers",
        ["test"],
    )
    assert info.card_data.license == "apache-2.0"
    by_name = {sibling.rfilename: sibling for sibling in info.siblings}
    weights = (folder / "weights.safetensors").read_bytes()
    assert by_name["weights.safetensors"].lfs.sha256 == hashlib.sha256(weights).hexdigest()
    assert by_name["README.md"].lfs is None and by_name["README.md"].size == len(CARD)
    assert set(list_repo_files(REPO)) == set(held) == contents(folder).keys() | {".gitattributes"}
    copy = snapshot_download(REPO, local_dir=tmp_path / "copy", ignore_patterns=".gitattributes")
    assert {path: data for path, data in contents(Path(copy)).items() if ".cache/" not in path} == contents(folder)


@pytest.mark.full
def test_lfs_files_are_put_once_and_the_same_folder_makes_no_commit(hub, folder):
    oid = pushed(folder)
    assert sum(line.startswith("PUT /lfs/") for line in hub.requests) == 1
    before = len(hub.requests)
    assert pushed(folder) == oid
    again = hub.requests[before:]
    assert not [line for line in again if line.startswith("PUT") or "/commit/" in line]


def test_creating_twice_and_deleting(hub):
    assert create_repo(REPO).repo_id == REPO
    with pytest.raises(HfHubHTTPError) as error:
        create_repo(REPO)
    assert error.value.response.status_code == 409
    assert create_repo(REPO, exist_ok=True).repo_id == REPO
    assert repo_exists(REPO)
    HfApi().delete_repo(REPO)
    assert not repo_exists(REPO)
    with pytest.raises(RepositoryNotFoundError):
        HfApi().delete_repo(REPO)


@pytest.mark.full
def test_a_revision_is_pinned(hub, folder):
    old = pushed(folder)
    HfApi().create_tag(REPO, tag="v1")
    HfApi().create_branch(REPO, branch="next/try")
    (folder / "README.md").write_text(CARD + "more\n")
    new = pushed(folder)
    upload_file(repo_id=REPO, path_or_fileobj=b"there", path_in_repo="empty.txt", revision="next/try")
    assert old != new

    def card(revision):
        with open(hf_hub_download(REPO, "README.md", revision=revision)) as file:
            return file.read()

    assert card(None) == card("main") == card(new) == CARD + "more\n"
    assert card("v1") == card(old) == card("next/try") == CARD
    assert hub.files(REPO, "v1")["README.md"].decode() == CARD
    assert (hub.files(REPO, "next/try")["empty.txt"], hub.files(REPO)["empty.txt"]) == (b"there", b"")
    assert (model_info(REPO, revision="v1").sha, model_info(REPO).sha) == (old, new)
    with open(snapshot_download(REPO, revision="v1") + "/README.md") as file:
        assert file.read() == CARD
    with pytest.raises(HfHubHTTPError, match="409"):
        HfApi().create_tag(REPO, tag="v1")


# -- rights ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_writing_needs_the_right_token(hub, folder):
    pushed(folder)
    before = hub.files(REPO)
    for token, status in ((False, 401), (hub.other_token, 403), ("hf_unknown", 401)):
        for call in (
            lambda token: upload_file(repo_id=REPO, path_or_fileobj=b"x", path_in_repo="x", token=token),
            lambda token: create_repo("org/more", token=token),
            lambda token: HfApi().create_tag(REPO, tag="v1", token=token),
        ):
            with pytest.raises(HfHubHTTPError) as error:
                call(token)
            assert error.value.response.status_code == status
    assert hub.files(REPO) == before and not repo_exists("org/more")
    assert create_repo("other/own", token=hub.other_token).repo_id == "other/own"


RESULT = """model-index:
- name: m
  results:
  - task: {type: text-generation}
    dataset: {type: gsm8k, name: GSM8K}
    metrics:
    - {type: accuracy, value: 0.5}
"""


@pytest.mark.parametrize(
    "metadata",
    [
        "license: mit",
        "license: [mit, apache-2.0]\nlanguage: [en, zh-Hans, code]",
        "base_model: Qwen/Qwen2.5-0.5B\npipeline_tag: text-generation\ntags: []",
        "base_model: [a/b, c/d]\ndatasets: [openai/gsm8k]",
        RESULT,
    ],
)
def test_good_metadata(metadata):
    assert card_problems(f"---\n{metadata}\n---\n# Text") == ([], [])


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        ("license: apache", '"license" must be a licence id'),
        ("- a\n- b", "must be a mapping"),
        ("tags: one", '"tags" must be a list of strings'),
        ("tags: ['']", '"tags" must be a name'),
        ("language: no", '"language" must be a string'),  # YAML reads Norwegian as False
        ("base_model: llama", '"base_model" must be a repository id'),
        ("pipeline_tag: writing", '"pipeline_tag" must be a known task'),
        ("library_name: [a]", '"library_name" must be a string'),
        ("license: mit\nlicense: mit", '"license" stands there twice'),
        ("a: [", "bad YAML"),
        (RESULT.replace("value", "values"), '"model-index"'),
    ],
)
def test_bad_metadata(metadata, error):
    errors, _ = card_problems(f"---\n{metadata}\n---\n# Text")
    assert len(errors) == 1 and error in errors[0]
