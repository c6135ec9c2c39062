"""Proves that of damaged, foreign and old files a head is read whole or not at all, and that nothing but its tensors is ever loaded."""

import hashlib
import json
import math
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.heads import edit, linear, rewrite, save
from support.refusals import contents, refused

import hf_lossy_assist as hla
from hf_lossy_assist import Head, HeadConfig, HeadStop, LinearHead


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")


@pytest.fixture
def saved(tmp_path) -> Path:
    return save(tmp_path / "head")


@pytest.mark.full
def test_every_byte_counts(saved):
    """Each byte of the file in turn with one bit flipped, and every shorter file, is refused in one line."""
    data = (saved / "model.safetensors").read_bytes()
    for place in range(len(data)):
        for bit in (0x01, 0x80):
            rewrite(saved, data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            refused(lambda: Head.from_pretrained(saved), "model.safetensors")
    for length in range(len(data)):
        rewrite(saved, data[:length])
        refused(lambda: Head.from_pretrained(saved), "model.safetensors")
    rewrite(saved, data + b"\0")
    refused(lambda: Head.from_pretrained(saved), "model.safetensors")
    rewrite(saved, data)
    Head.from_pretrained(saved)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"linear.bias": torch.zeros(1)}, "linear.weight"),
        ({"linear.weight": torch.zeros(1, 32), "linear.bias": torch.zeros(1), "extra": torch.zeros(2)}, "extra"),
        ({"linear.weight": torch.zeros(1, 16), "linear.bias": torch.zeros(1)}, "16.*32|32.*16"),
        ({"linear.weight": torch.zeros(2, 32), "linear.bias": torch.zeros(1)}, "linear.weight"),
        ({"linear.weights": torch.zeros(1, 32), "linear.bias": torch.zeros(1)}, "linear.weight"),
        ({}, "linear.weight"),
    ],
    ids=["missing", "extra", "shape", "rows", "name", "empty"],
)
def test_other_tensors_are_refused(saved, weights, words):
    """First as they are, then with the checksum of the config made to fit."""
    data = safetensors.torch.save(weights)
    rewrite(saved, data)
    refused(lambda: Head.from_pretrained(saved), "SHA-256")
    rewrite(saved, data, and_digest=True)
    refused(lambda: Head.from_pretrained(saved), words)


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_pickles_are_never_loaded(saved, tmp_path):
    """By name, where the weights are missing; by content, under the right name and with the right checksum."""
    trap = pickle.dumps(Trap(tmp_path / "sprung"))
    data = (saved / "model.safetensors").read_bytes()
    rewrite(saved, trap, and_digest=True)
    refused(lambda: Head.from_pretrained(saved), "model.safetensors: .*header")
    torch.save(linear().state_dict(), saved / "model.safetensors")
    rewrite(saved, (saved / "model.safetensors").read_bytes(), and_digest=True)
    refused(lambda: Head.from_pretrained(saved), "model.safetensors: .*header")
    (saved / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "head.pkl", "weights.joblib"):
        (saved / name).write_bytes(trap)
        refused(lambda: Head.from_pretrained(saved), "model.safetensors cannot be read: No such file")
        (saved / name).unlink()
    rewrite(saved, data)
    (saved / "pytorch_model.bin").write_bytes(trap)  # beside the right file it is not looked at
    edit(saved, weights_sha256=hashlib.sha256(data).hexdigest())
    Head.from_pretrained(saved)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap does not work, so nothing was proved"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("{'hidden_size': 32}", "is not JSON"),
        ("[1, 2]", "expected an object"),
        ('{"model_type": "llama", "hidden_size": 32}', "SHA-256 differs"),
        (b"\xff\xfe{}", "is not JSON"),
    ],
)
def test_other_configs_are_refused(saved, text, words):
    (saved / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: Head.from_pretrained(saved), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 16}, "size mismatch"),
        ({"hidden_size": "32"}, "hidden_size.*'32'"),
        ({"hidden_size": 10**14}, "size mismatch"),
        ({"kind": "mlp"}, "an MLP's config has one"),
        ({"kind": "mlp", "width": 4}, "Missing key"),
        ({"kind": "tree"}, "'tree' is missing or unknown"),
        ({"weights_sha256": "0" * 64}, "SHA-256 differs"),
        ({"features": {"model": "draft", "depth": 3}}, "depth"),
        ({"features": {"model": "student"}}, "student"),
        ({"features": "draft"}, "features"),
        ({"target": {"id": "x"}}, "model_type"),
        ({"target": "org/target"}, "must be a mapping"),
        ({"draft": [1, 2]}, "must be a mapping"),
        ({"versions": [0.8]}, "versions"),
    ],
    ids=str,
)
def test_edited_configs_are_refused(saved, changes, words):
    edit(saved, **changes)
    refused(lambda: Head.from_pretrained(saved), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "mlp", "width": 2**61}, "overflow"),
        ({"kind": "mlp", "width": -5}, "negative dimension"),
        ({"kind": "mlp", "width": 2**20, "hidden_size": 2**20}, "Missing key"),
        ({"kind": "mlp", "width": 2**15, "hidden_size": 2**15}, "Missing key"),
    ],
)
def test_sizes_that_no_machine_holds_cost_no_memory(saved, changes, words):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | changes))
    tracemalloc.start()
    try:
        refused(lambda: Head.from_pretrained(saved), words)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


ENDLESS: dict[str, Any] = {}
ENDLESS["a"] = ENDLESS


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": {"brier": math.nan}}, "not JSON compliant"),
        ({"label": "x" * 2**24}, "has more than 16777216 bytes"),
        ({"training": ENDLESS}, "recursion|Circular"),
        ({"training": {"a": {1, 2}}}, "not JSON serializable"),
        ({"label": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_what_could_not_be_read_back_replaces_no_head(tmp_path, changes, words):
    made = LinearHead(HeadConfig(4, **changes)).eval()
    for folder, wrong in ((tmp_path / "head", made), (tmp_path / "policy", hla.LossyPolicy(stop=HeadStop(made)))):
        good = LinearHead(HeadConfig(4)).eval()
        (good if folder.name == "head" else hla.LossyPolicy(stop=HeadStop(good))).save_pretrained(folder)
        before = contents(tmp_path)
        with pytest.raises((ValueError, TypeError, RecursionError), match=words):
            wrong.save_pretrained(folder)
        assert contents(tmp_path) == before and made.source is None


def test_a_policy_that_could_not_be_read_back_replaces_none(tmp_path, monkeypatch):
    hla.LossyPolicy().save_pretrained(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(hla.LossyPolicy, "_spec", lambda *_: {"rule": {"name": "typical", "epsilon": math.nan}})
    refused(lambda: hla.LossyPolicy().save_pretrained(tmp_path), "NaN")
    assert contents(tmp_path) == before


def test_a_long_field_of_a_head_is_shortened_in_warnings(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"x" * 10**6: 1}))
    with pytest.warns(UserWarning, match="not known to this version") as caught:
        Head.from_pretrained(saved)
    assert len(str(caught[0].message)) < 1000
    tensors = safetensors.torch.load((saved / "model.safetensors").read_bytes())
    data = safetensors.torch.save(tensors | {f"\x1b[31m{n}": torch.zeros(1) for n in range(2000)})
    (saved / "model.safetensors").write_bytes(data)
    (saved / "config.json").write_text(json.dumps(config | {"weights_sha256": hashlib.sha256(data).hexdigest()}))
    text = refused(lambda: Head.from_pretrained(saved), "Unexpected key")
    assert len(text) < 1000 and text.isprintable()


def test_places_that_hold_no_head(tmp_path):
    refused(lambda: Head.from_pretrained(tmp_path), "config.json cannot be read: No such file")
    refused(lambda: Head.from_pretrained(tmp_path / "missing"), "neither a folder here nor a repository name")
    linear().save_pretrained(tmp_path / "head")
    assert type(Head.from_pretrained(tmp_path, subfolder="head")) is LinearHead


def test_a_threshold_in_percent_is_refused():
    """By the config, the stop and the policy, for a head's output is a share; 1 is the neutral value."""
    for make in (
        lambda: HeadConfig(4, threshold=70),
        lambda: HeadConfig.from_dict(HeadConfig(4).to_dict() | {"threshold": 70}),
        lambda: hla.HeadStop(LinearHead(HeadConfig(4)), 70),
        lambda: hla.sprinter(LinearHead(HeadConfig(4)), threshold=70),
        lambda: hla.specdec(LinearHead(HeadConfig(4, features=hla.FeatureSpec(position="token"))), threshold=70),
    ):
        refused(make, r"(HeadConfig|HeadStop|SpecDecPP)\.threshold: expected a number from 0 to 1, got 70")
    head = LinearHead(HeadConfig(4))
    head.linear.bias.data.fill_(99.0)  # whose sigmoid rounds to 1
    stops = [hla.HeadStop(head, t).should_stop(None, None, torch.zeros(2, 4)).tolist() for t in (0.99, 1)]
    assert stops == [[False, False], [True, True]]


@pytest.mark.parametrize("value", ["x", [1.2]])
def test_a_threshold_or_lambda_that_is_no_number_is_refused(value):
    """In the fields of today and where older versions had them."""
    forms = ({"threshold": value}, {"lam": value}, {"metrics": {"threshold": value}}, {"training": {"lambda": value}})
    for form, field in zip(forms, ("threshold", "lam") * 2, strict=True):
        refused(lambda form=form: HeadConfig.from_dict(HeadConfig(4).to_dict() | form), rf"\b{field}\b", TypeError)


def test_configs_of_older_versions_are_read():
    """Threshold and λ stood among the figures; what is written has them as fields."""
    config = HeadConfig(4, threshold=0.25, lam=1.2, training={"seed": 3}, metrics={"auroc": 0.9})
    old = config.to_dict()
    del old["threshold"], old["lam"]
    old |= {"training": {"seed": 3, "lambda": 1.2}, "metrics": {"auroc": 0.9, "threshold": 0.25}}
    assert HeadConfig.from_dict(old) == config == HeadConfig.from_dict(config.to_dict())
    assert old["training"]["lambda"] == 1.2, "what was given is not changed"
    assert (hla.demo.head("autojudge").config.threshold, hla.demo.head().config.lam) == (0.1965, 1.2)
