"""Heads and policies to a Hub and back, with the real client: bit by bit, pinned, private, gated, offline, and refused in one line."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import (
    HfApi,
    constants,
    create_repo,
    errors,
    hf_hub_download,
    model_info,
    upload_file,
    upload_folder,
)
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from support.hub_server import card_problems
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import Head, HeadConfig, LinearHead, LossyPolicy, Profile, Sprinter, demo
from hf_lossy_assist.policy.sharing import detect_kind, list_files, pull, push


ROOT = Path(__file__).parent.parent.parent
SHIPPED = demo.FOLDER / "sprinter_head"
REPO = "org/head"
POLICY_FILES = {"README.md", "policy.json", "stop_head/config.json", "stop_head/model.safetensors"}


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def folder(tmp_path):
    """The shipped head, to be spoilt at will."""
    return Path(shutil.copytree(SHIPPED, tmp_path / "head"))


def commits(hub: Any, repo: str = REPO) -> int:
    return len(hub.repos["models", repo].commits)


def linear(seed: int = 0) -> LinearHead:
    torch.manual_seed(seed)
    return LinearHead(HeadConfig(4, lam=1.2, label=f"of seed {seed}")).eval()


# -- heads ------------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_head_goes_up_and_comes_down_bit_by_bit(hub, tmp_path):
    url = push(SHIPPED, REPO)
    assert url.startswith(f"{hub.url}/{REPO}/commit/")
    held = {name: data for name, data in hub.files(REPO).items() if name != ".gitattributes"}
    assert held == contents(SHIPPED)
    assert "sprinter" in model_info(REPO).tags and model_info(REPO).library_name == "hf_lossy_assist"
    assert card_problems(held["README.md"].decode()) == ([], [])
    assert {p.name: p.read_bytes() for p in pull(REPO).iterdir() if p.name != ".gitattributes"} == held

    out = pull(REPO, tmp_path / "deep" / "copy")
    assert out == tmp_path / "deep" / "copy"
    assert {name: data for name, data in contents(out).items() if name != ".gitattributes"} == held
    assert not any(p.is_symlink() for p in out.rglob("*")) and [p.name for p in out.parent.iterdir()] == ["copy"]
    shipped = demo.head()
    for back in (Head.from_pretrained(REPO), Head.from_pretrained(out)):
        assert (back.digest, back.config) == (shipped.digest, shipped.config)
    assert Head.from_pretrained(REPO).source == REPO
    policy = LossyPolicy.from_pretrained(REPO)
    assert policy == Sprinter(shipped) == LossyPolicy.from_dict(policy.to_dict())
    assert policy.to_dict()["stop"]["head"] == REPO


@pytest.mark.full
def test_a_revision_is_pinned_by_either_spelling(hub, tmp_path):
    first, second = linear(0), linear(1)
    for name, head in (("1", first), ("2", second)):
        head.save_pretrained(tmp_path / name)
    oid = push(tmp_path / "1", REPO).rsplit("/", 1)[1]
    HfApi().create_tag(REPO, tag="v1")
    push(tmp_path / "2", REPO, message="better")
    assert Head.from_pretrained(REPO).digest == second.digest
    for revision in ("v1", oid):
        assert Head.from_pretrained(f"{REPO}@{revision}").digest == first.digest
        assert Head.from_pretrained(REPO, revision=revision).digest == first.digest
        assert Head.from_pretrained(pull(f"{REPO}@{revision}")).digest == first.digest
        assert Head.from_pretrained(pull(REPO, revision=revision)).digest == first.digest
        assert LossyPolicy.from_pretrained(f"{REPO}@{revision}").stop.head.digest == first.digest
    assert Head.from_pretrained(f"{REPO}@v1", revision="v1").digest == first.digest
    for load in (Head.from_pretrained, LossyPolicy.from_pretrained, pull):
        refused(lambda load=load: load(f"{REPO}@v1", revision="main"), "v1.*main|main.*v1")
        with pytest.raises(RevisionNotFoundError):
            load(f"{REPO}@v9")
    push(tmp_path / "1", REPO, revision="next")  # a branch
    assert Head.from_pretrained(f"{REPO}@next").digest == first.digest
    assert Head.from_pretrained(REPO, force_download=True).digest == second.digest


# -- policies ---------------------------------------------------------------------------------------------------------
@pytest.mark.full
def test_a_policy_takes_its_head_along(hub, tmp_path):
    head = linear()
    policy = Sprinter(head, threshold=0.7, max_draft=9)
    assert "/commit/" in policy.push_to_hub("org/policy")
    assert POLICY_FILES <= set(hub.files("org/policy"))
    card = hub.files("org/policy")["README.md"].decode()
    assert card_problems(card) == ([], [])
    HfApi().create_tag("org/policy", tag="v1")
    for name, more in (("org/policy", {}), ("org/policy@v1", {}), ("org/policy", {"revision": "v1"})):
        back = LossyPolicy.from_pretrained(name, **more)
        assert back == policy and back.stop.head.digest == head.digest
    assert LossyPolicy.from_pretrained(pull("org/policy", tmp_path / "copy")) == policy
    assert detect_kind(tmp_path / "copy") == "policy"
    push(tmp_path / "copy", "org/again")
    assert LossyPolicy.from_pretrained("org/again") == policy
    assert head.source is None

    LossyPolicy(stop=hla.SVIP(h=0.4)).push_to_hub("org/plain")
    assert LossyPolicy.from_pretrained("org/plain") == LossyPolicy(stop=hla.SVIP(h=0.4))
    assert card_problems(hub.files("org/plain")["README.md"].decode()) == ([], [])


# -- refused before anything is sent ------------------------------------------------------------------------------------
def test_what_should_not_be_shared_is_refused_before_anything_is_sent(hub, tmp_path):
    def write(name: str, data: bytes):
        def spoil(folder: Path) -> None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

        return spoil

    for number, (spoil, says) in enumerate((
        (write("pytorch_model.bin", b"\x80\x04N."), "pytorch_model.bin, a pickle"), (write("deep/x.pt", b""), "a pickle"),
        (write("x.pkl", b""), "a pickle"), (write("OPTIMIZER.PT", b""), "a pickle"),
        (lambda folder: (folder / "README.md").unlink(), "README.md"),
        (write("model.safetensors", b""), "SHA-256"), (write("config.json", b"{"), "not JSON"),
        (lambda folder: (folder / "model.safetensors").unlink(), "is no folder of a head"),
    )):  # fmt: skip
        folder = Path(shutil.copytree(SHIPPED, tmp_path / str(number)))
        spoil(folder)
        refused(lambda: push(folder, REPO), says)  # noqa: B023
        assert not hub.requests and not hub.repos
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "card"))
    (folder / "README.md").write_text("---\nlicense: mine\n---\n")
    refused(lambda: push(folder, REPO), "license")
    assert commits(hub) == 1 and set(hub.files(REPO)) == {".gitattributes"}


# -- what this package has to push ------------------------------------------------------------------------------------
@pytest.mark.full
def test_other_folders_of_this_package_go_up_and_come_down(hub, tmp_path):
    models = Path(shutil.copytree(demo.FOLDER, tmp_path / "models", ignore=shutil.ignore_patterns("sprinter_head")))
    shutil.copy(ROOT / "hub_cards" / "demo-models" / "README.md", models)
    Profile.from_pretrained(demo.FOLDER / "sv_profile").save_pretrained(tmp_path / "profile")
    custom = Path(shutil.copytree(ROOT / "hub_cards" / "custom_generate", tmp_path / "custom_generate"))
    shutil.rmtree(custom / "__pycache__", ignore_errors=True)
    for folder in (custom, models, tmp_path / "profile"):
        repo = f"org/{folder.name}"
        push(folder, repo)
        back = pull(repo, tmp_path / "back" / folder.name)
        assert detect_kind(back) == folder.name
        held = {name: data for name, data in contents(back).items() if name != ".gitattributes"}
        assert held == {name: data for name, data in contents(folder).items() if "__pycache__" not in name}
    assert detect_kind(demo.FOLDER / "draft") == "models"
    assert Profile.from_pretrained("org/profile") == Profile.from_pretrained(demo.FOLDER / "sv_profile")


CARDS = ROOT / "hub_cards"
FOLDERS = sorted({path.parent.name for path in CARDS.glob("*/README.md")} - {"space"})  # by tests/test_space.py


def test_a_copy_of_each_ready_folder_can_be_pushed(tmp_path):
    """The folders hold links, which are never uploaded; every card would be accepted. Of the demo's heads no file is left out."""
    assert not any(list_files(folder)[1] for folder in demo.FOLDER.glob("*_head"))
    for name in FOLDERS:
        copy = Path(shutil.copytree(CARDS / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__")))
        kind = detect_kind(copy)
        assert kind == {"demo-eagle3": "drafter", "demo-profile": "profile"}.get(name, kind)
        assert set(list_files(copy)[1]) <= {"RESULT.md", "tune.csv"}
        assert card_problems((copy / "README.md").read_text(encoding="utf-8")) == ([], []), name


# -- the errors that the Hub's users know -------------------------------------------------------------------------------
LOADERS = (Head.from_pretrained, LossyPolicy.from_pretrained, pull)


def test_private_and_gated_and_missing(hub):
    """Errors of the kind that the Hub's users know, in one line."""
    push(SHIPPED, REPO, private=True)
    push(SHIPPED, "org/gated")
    hub.gate("org/gated")
    create_repo("org/own")
    missing = {REPO: RepositoryNotFoundError, "org/nothing": RepositoryNotFoundError, "org/gated": GatedRepoError}
    # Before it is cached: the client falls back on what it has.
    for load, token in itertools.product(LOADERS, (hub.other_token, False)):
        for name, kind in (missing | {"org/own@v9": RevisionNotFoundError}).items():
            with pytest.raises(kind, match=rf"\A[^\n]*{name}: 4[^\n]*\Z"):
                load(name, token=token)
    assert model_info(REPO).private
    for load in LOADERS:
        assert load(REPO, token=hub.token) and load("org/gated")


def test_a_repository_of_something_else(hub):
    create_repo("org/else")
    upload_file(repo_id="org/else", path_or_fileobj=b"{}", path_in_repo="config.json")
    for load in LOADERS:
        refused(lambda load=load: load("org/else"), "model.safetensors|is no folder of a head")
        refused(lambda load=load: load("no such folder/here/at all"), "neither a folder here nor a repository name")
    linear().push_to_hub(REPO)
    refused(lambda: Profile.from_pretrained(REPO), r"profile\.json")


def test_writing_needs_a_token_with_the_right(hub, folder, monkeypatch):
    for token, status in ((hub.other_token, 403), ("hf_unknown", 401)):
        with pytest.raises(HfHubHTTPError) as error:
            push(folder, REPO, token=token)
        assert error.value.response.status_code == status
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HfHubHTTPError) as error:
        push(folder, REPO)
    assert error.value.response.status_code == 401
    with pytest.raises(HfHubHTTPError):
        Sprinter(linear()).push_to_hub("org/policy")
    assert not hub.repos


@pytest.mark.full
def test_offline_what_is_cached_loads_and_the_rest_says_so(hub, monkeypatch):
    push(SHIPPED, REPO)
    push(SHIPPED, "org/other")
    for load in LOADERS:
        load(REPO)
    before = len(hub.requests)
    assert all(load(REPO, local_files_only=True) for load in LOADERS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in LOADERS:
        assert load(REPO)
        for repo in ("org/other", "org/nothing"):
            with pytest.raises(errors.LocalEntryNotFoundError):
                load(repo)
    assert len(hub.requests) == before
    with pytest.raises(errors.OfflineModeIsEnabled):
        push(SHIPPED, REPO)


@pytest.mark.full
def test_pull_overwrites_nothing_and_leaves_nothing_half_done(hub, tmp_path):
    push(SHIPPED, REPO)
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "there", tmp_path):
        refused(lambda out=out: pull(REPO, out), "exists")
    for wrong in ("org/nothing", f"{REPO}@v9"):
        with pytest.raises(HfHubHTTPError):
            pull(wrong, tmp_path / "new")
    folder = Path(shutil.copytree(SHIPPED, tmp_path / "there" / "it"))
    (folder / "model.safetensors").write_bytes(b"")
    create_repo("org/else")
    for says in ("is no folder of a head", "SHA-256 differs"):
        with pytest.raises(ValueError, match=says):
            pull("org/else", tmp_path / "new")
        upload_folder(repo_id="org/else", folder_path=folder)
    shutil.rmtree(folder)
    assert [p.name for p in tmp_path.rglob("*")] == ["there"]


@pytest.mark.parametrize("token", ["hf_bad\n", "hf_bäd"])
def test_a_token_that_cannot_be_sent_is_not_shown(hub, hf_lossy, monkeypatch, token):
    for given in (("pull", "org/it"), ("push", SHIPPED, "org/it")):
        line = hf_lossy(*given, "--token", token).line
        assert "hf_b" not in line and ("token" in line or token.isascii()), line
    calls = (
        lambda: push(SHIPPED, "org/it", token=token), lambda: pull("org/it", token=token),
        lambda: LossyPolicy.from_pretrained("org/it", token=token),
        lambda: linear().push_to_hub("org/it", token=token), lambda: Sprinter(linear()).push_to_hub("org/it", token=token),
    )  # fmt: skip
    for call in calls:
        with pytest.raises((OSError, ValueError)) as error:
            call()
        assert "\n" not in str(error.value) and "hf_b" not in str(error.value)


def test_a_hub_that_is_not_there_is_one_line(hub, monkeypatch):
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", nowhere)
    for share in (lambda name: push(SHIPPED, name), linear().push_to_hub, Sprinter(linear()).push_to_hub):
        refused(lambda share=share: share("org/it"), r"\Aorg/it: the Hub was not reached: [^\n]*\Z", ConnectionError)


def damage(repo: str, *names: str) -> None:
    """Overwrite the last bytes of cached files, as a bad disk or a broken download does."""
    for name in names:
        file = Path(hf_hub_download(repo, name)).resolve()
        file.write_bytes(file.read_bytes()[:-3] + b"\0\0\0")


@pytest.mark.full
def test_a_damaged_download_is_downloaded_again(hub, hf_lossy):
    linear().push_to_hub("org/head")
    Sprinter(linear()).push_to_hub("org/policy")
    for repo, name, load in (
        ("org/head", "model.safetensors", Head.from_pretrained),
        ("org/head", "model.safetensors", LossyPolicy.from_pretrained),
        ("org/policy", "stop_head/model.safetensors", LossyPolicy.from_pretrained),
    ):
        for again in (lambda: load(repo, force_download=True), lambda: hf_lossy("pull", repo, "--force-download")):  # noqa: B023
            damage(repo, name)
            with pytest.raises(ValueError, match="force_download=True, or hf-lossy pull --force-download") as error:
                load(repo)
            assert "\n" not in str(error.value)
            assert "--force-download" in hf_lossy("pull", repo).line
            assert getattr(again(), "code", 0) == 0
            load(repo)


# -- a README.md that somebody wrote ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "save", [lambda seed, folder: linear(seed).save_pretrained(folder),
             lambda seed, folder: Sprinter(linear(seed)).save_pretrained(folder)], ids=["head", "policy"],
)  # fmt: skip
def test_a_readme_that_somebody_wrote_stays(tmp_path, save):
    save(0, tmp_path / "it")
    card = (tmp_path / "it" / "README.md").read_text()
    save(0, tmp_path / "it")  # the same once more: nothing to say
    (tmp_path / "it" / "README.md").write_text(card + "\nWhat I found out.\n")
    with pytest.warns(UserWarning, match="README.md stays as it is, and is not the card of what was saved") as caught:
        save(1, tmp_path / "it")
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    assert (tmp_path / "it" / "README.md").read_text() == card + "\nWhat I found out.\n"
    [config] = (tmp_path / "it").rglob("config.json")
    assert json.loads(config.read_text())["label"] == "of seed 1"
    (tmp_path / "it" / "README.md").unlink()
    save(1, tmp_path / "it")
    assert "of seed 1" in (tmp_path / "it" / "README.md").read_text()


# -- what is uploaded ----------------------------------------------------------------------------------------------------
@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "id_rsa"
    file.write_text("SECRET")
    return file


def uploaded(hub, repo: str, repo_type: str = "model") -> set[str]:
    return set(hub.files(repo, repo_type=repo_type)) - {".gitattributes"}


def sprinter(folder: Path) -> Path:
    Sprinter(linear()).save_pretrained(folder)
    return folder


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
        folder = Path(shutil.copytree(SHIPPED, tmp_path / name))
        if name != "roc.png":  # as these are read before
            (folder / name).replace(secret)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        refused(lambda: push(folder, "org/it"), f"{name} is a link: only files are uploaded")  # noqa: B023
        assert not hub.requests
    folder = sprinter(tmp_path / "policy")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "config.json").write_text(json.dumps({"key": "SECRET"}))
    (folder / "other").symlink_to(tmp_path / "private")
    (folder / "notes.txt").symlink_to(secret)
    with pytest.warns(UserWarning, match="not uploaded.*: notes.txt, other$"):
        push(folder, "org/it")
    assert uploaded(hub, "org/it") == POLICY_FILES
    assert not [data for data in hub.files("org/it").values() if b"SECRET" in data]
