"""The real client against the Hub of `hub_server`: push, pull, cache, pin, and be refused, each with the client's own exception."""

import hashlib
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from huggingface_hub import (
    HfApi,
    PyTorchModelHubMixin,
    constants,
    create_repo,
    file_exists,
    hf_hub_download,
    list_repo_files,
    model_info,
    repo_exists,
    snapshot_download,
    upload_file,
    upload_folder,
    whoami,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from support.hub_server import HubServer, card_problems


CARD = "---\nlicense: apache-2.0\nlibrary_name: transformers\ntags:\n- test\n---\n\n# A card\n"
REPO = "org/things"


@pytest.fixture
def folder(tmp_path):
    """Small text, an empty file, a binary file, and a file in a subfolder."""
    its = tmp_path / "things"
    (its / "deep" / "er").mkdir(parents=True)
    (its / "README.md").write_text(CARD)
    (its / "empty.txt").write_bytes(b"")
    (its / "deep" / "er" / "config.json").write_text("{}")
    (its / "weights.safetensors").write_bytes(bytes(range(256)) * 40)
    return its


def pushed(folder, **settings):
    create_repo(REPO, exist_ok=True, **settings)
    return upload_folder(repo_id=REPO, folder_path=folder, commit_message="push").oid


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- push --------------------------------------------------------------------------------------------------------------


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
    by_name = {its.rfilename: its for its in info.siblings}
    weights = (folder / "weights.safetensors").read_bytes()
    assert by_name["weights.safetensors"].lfs.sha256 == hashlib.sha256(weights).hexdigest()
    assert by_name["README.md"].lfs is None and by_name["README.md"].size == len(CARD)
    assert set(list_repo_files(REPO)) == set(held) == contents(folder).keys() | {".gitattributes"}
    copy = snapshot_download(REPO, local_dir=tmp_path / "copy", ignore_patterns=".gitattributes")
    assert {path: data for path, data in contents(Path(copy)).items() if ".cache/" not in path} == contents(folder)


def test_lfs_files_are_put_once_and_the_same_folder_makes_no_commit(hub, folder):
    oid = pushed(folder)
    assert sum(line.startswith("PUT /lfs/") for line in hub.requests) == 1
    before = len(hub.requests)
    assert pushed(folder) == oid
    again = hub.requests[before:]
    assert not [line for line in again if line.startswith("PUT") or "/commit/" in line]


def test_deleting_by_pattern(hub, folder):
    pushed(folder)
    (folder / "deep" / "er" / "config.json").unlink()
    upload_folder(repo_id=REPO, folder_path=folder, delete_patterns="deep/*")
    assert "deep/er/config.json" not in hub.files(REPO) and "README.md" in hub.files(REPO)


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


def test_datasets_have_their_own_namespace(hub):
    create_repo(REPO, repo_type="dataset")
    assert not repo_exists(REPO)
    upload_file(repo_id=REPO, repo_type="dataset", path_or_fileobj=b"[1]", path_in_repo="rows.json")
    with open(hf_hub_download(REPO, "rows.json", repo_type="dataset")) as file:
        assert file.read() == "[1]"


# -- pull --------------------------------------------------------------------------------------------------------------


def test_a_download_is_cached_and_found_without_a_network(hub, folder, monkeypatch):
    pushed(folder)
    path = hf_hub_download(REPO, "weights.safetensors")
    before = sum(line.startswith("GET") for line in hub.requests)
    assert hf_hub_download(REPO, "weights.safetensors") == path
    assert sum(line.startswith("GET") for line in hub.requests) == before  # HEAD only
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    before = len(hub.requests)
    assert hf_hub_download(REPO, "weights.safetensors", local_files_only=True) == path
    assert hf_hub_download(REPO, "weights.safetensors") == path
    for settings in ({}, {"local_files_only": True}):
        with pytest.raises(LocalEntryNotFoundError):
            hf_hub_download(REPO, "README.md", **settings)
    with pytest.raises(OfflineModeIsEnabled):
        model_info(REPO)
    assert len(hub.requests) == before


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


def test_what_is_missing_has_the_right_name(hub, folder):
    pushed(folder)
    assert file_exists(REPO, "README.md") and not file_exists(REPO, "nothing.txt")
    with pytest.raises(EntryNotFoundError):
        hf_hub_download(REPO, "nothing.txt")
    with pytest.raises(RevisionNotFoundError):
        hf_hub_download(REPO, "README.md", revision="v9")
    with pytest.raises(RevisionNotFoundError):
        snapshot_download(REPO, revision="0" * 40)
    assert not file_exists("org/none", "README.md")
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("org/none", "README.md")
    with pytest.raises(RepositoryNotFoundError):
        upload_file(repo_id="org/none", path_or_fileobj=b"", path_in_repo="x")


# -- rights ------------------------------------------------------------------------------------------------------------


def test_a_private_repository_is_not_there_for_others(hub, folder):
    pushed(folder, private=True)
    assert model_info(REPO).private and file_exists(REPO, "README.md")
    for token in (hub.other_token, False):
        for call in (model_info, list_repo_files, snapshot_download):
            with pytest.raises(RepositoryNotFoundError) as error:
                call(REPO, token=token)
            assert error.value.response.status_code == (404 if token else 401)
        with pytest.raises(RepositoryNotFoundError):
            hf_hub_download(REPO, "README.md", token=token)


def test_a_gated_repository_shows_itself_but_gives_no_files(hub, folder):
    pushed(folder)
    hub.gate(REPO)
    assert hf_hub_download(REPO, "README.md")
    for token in (hub.other_token, False):
        assert model_info(REPO, token=token).gated == "manual"
        with pytest.raises(GatedRepoError) as error:
            hf_hub_download(REPO, "weights.safetensors", token=token)
        assert error.value.response.status_code == (403 if token else 401)
    hub.gate(REPO, allow=[hub.other_token])
    assert hf_hub_download(REPO, "weights.safetensors", token=hub.other_token)


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


# -- models and cards --------------------------------------------------------------------------------------------------


class Head(torch.nn.Module, PyTorchModelHubMixin, tags=["head"], license="apache-2.0", library_name="hf_lossy_assist"):
    def __init__(self, size: int = 3):
        super().__init__()
        self.linear = torch.nn.Linear(size, 1)


def test_a_model_goes_up_and_comes_down_again(hub):
    head = Head(size=5)
    head.push_to_hub(REPO)
    back = Head.from_pretrained(REPO)
    assert torch.equal(back.linear.weight, head.linear.weight) and back.linear.in_features == 5
    assert {"README.md", "config.json", "model.safetensors"} <= hub.files(REPO).keys()
    assert "head" in model_info(REPO).tags


def test_a_bad_card_is_refused_before_anything_is_written(hub, folder):
    create_repo(REPO)
    before = hub.files(REPO)
    (folder / "README.md").write_text(CARD.replace("apache-2.0", "apache2"))
    with pytest.raises(ValueError, match="\"license\" must be a licence id, got 'apache2'"):
        upload_folder(repo_id=REPO, folder_path=folder)
    assert hub.files(REPO) == before and not [line for line in hub.requests if line.startswith("PUT")]


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
        ("license: 2", '"license" must be a string'),
        ("- a\n- b", "must be a mapping"),
        ("tags: one", '"tags" must be a list of strings'),
        ("tags: [1]", '"tags" must be a list of strings'),
        ("tags: ['']", '"tags" must be a name'),
        ("language: no", '"language" must be a string'),  # YAML reads Norwegian as False
        ("language: English", '"language" must be an ISO 639 code'),
        ("base_model: llama", '"base_model" must be a repository id'),
        ("base_model: {a: b}", '"base_model" must be a string or a list'),
        ("datasets: gsm8k", '"datasets" must be a list of strings'),
        ("pipeline_tag: writing", '"pipeline_tag" must be a known task'),
        ("library_name: [a]", '"library_name" must be a string'),
        ("license: mit\nlicense: mit", '"license" stands there twice'),
        ("a: [", "bad YAML"),
        (RESULT.replace("value", "values"), '"model-index"'),
        ("model-index: m", '"model-index"'),
    ],
)
def test_bad_metadata(metadata, error):
    errors, _ = card_problems(f"---\n{metadata}\n---\n# Text")
    assert len(errors) == 1 and error in errors[0]


def test_a_card_without_metadata_is_warned_about(hub, folder):
    (folder / "README.md").write_text("# Only text\n")
    create_repo(REPO)
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        upload_folder(repo_id=REPO, folder_path=folder)


# -- the server itself -------------------------------------------------------------------------------------------------


def test_servers_are_apart_and_leave_nothing_running():
    before = threading.active_count()
    with HubServer() as one, HubServer() as two:
        one.repos["models", "a/b"] = None
        assert one.url != two.url and not two.repos
        body = b'{"content": "---\\nlicense: mit\\n---\\n"}'
        with urllib.request.urlopen(one.url + "/api/validate-yaml", data=body, timeout=10) as answer:
            assert answer.status == 200
        assert one.requests == ["POST /api/validate-yaml"] and two.requests == []
    assert threading.active_count() == before
