"""Errors on the Hub are one line with a way out, of the kind that its users know; and what a damaged download needs."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, create_repo, hf_hub_download
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

from hf_lossy_assist import Head, HeadConfig, LinearHead, LossyPolicy, Sprinter, demo
from hf_lossy_assist.policy.sharing import pull, push


SHIPPED = demo.FOLDER / "sprinter_head"
LOADERS = (Head.from_pretrained, LossyPolicy.from_pretrained, pull)


def linear(seed: int = 0) -> LinearHead:
    torch.manual_seed(seed)
    return LinearHead(HeadConfig(4, label=f"of seed {seed}")).eval()


def test_what_cannot_be_read_is_one_line(hub):
    push(SHIPPED, "org/gated")
    hub.gate("org/gated")
    create_repo("org/own")
    refusals = (
        ("org/nothing", RepositoryNotFoundError, "org/nothing: 4"),
        ("org/gated", GatedRepoError, "org/gated: 403"),
        ("org/own@v9", RevisionNotFoundError, "org/own@v9: 404"),
    )
    for load, (name, kind, says) in itertools.product(LOADERS, refusals):
        with pytest.raises(kind) as error:
            load(name, token=hub.other_token)
        assert says in str(error.value) and "\n" not in str(error.value)


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
    for call in (
        lambda: push(SHIPPED, "org/it"),
        lambda: linear().push_to_hub("org/it"),
        lambda: Sprinter(linear()).push_to_hub("org/it"),
    ):
        with pytest.raises(ConnectionError, match="^org/it: the Hub was not reached: ") as error:
            call()
        assert "\n" not in str(error.value)


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
