"""Artifacts by damages: heads, profiles, policies, certificates and drafters are read whole or not at all, in one line that says where."""

import json
import math
import pickle
import shutil
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from support.certificates import POLICY, a_certificate
from support.heads import edit, linear, rewrite, save
from support.profiles import bins, latency, profile
from support.refusals import contents, refused

import hf_lossy_assist as hla
from hf_lossy_assist import Head, HeadConfig, HeadStop, LinearHead, LossyPolicy, Profile, as_policy
from hf_lossy_assist.artifacts.files import parse_json, read_json
from hf_lossy_assist.drafters.io import load_drafter
from hf_lossy_assist.policy.sharing import detect_kind


def save_policy(folder: Path) -> None:
    hla.Sprinter(linear()).save_pretrained(folder)


def save_certificate(folder: Path) -> None:
    replace(POLICY, certificate=a_certificate()).save_pretrained(folder)


def save_drafter(folder: Path) -> None:
    shutil.copytree(hla.demo.FOLDER / "eagle3_drafter", folder)


# By kind: what saves one, what loads it, its JSON file and its tensors.
KINDS = {
    "head": (save, Head.from_pretrained, "config.json", "model.safetensors"),
    "profile": (profile().save_pretrained, Profile.from_pretrained, "profile.json", "profile.safetensors"),
    "policy": (save_policy, LossyPolicy.from_pretrained, "policy.json", "stop_head/model.safetensors"),
    "certificate": (save_certificate, LossyPolicy.from_pretrained, "certificate.json", None),
    "drafter": (save_drafter, load_drafter, "config.json", "model.safetensors"),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture
def artifact(kind, tmp_path):
    make, load, facts, tensors = KINDS[kind]
    make(tmp_path / "it")
    return tmp_path / "it", load, facts, tensors


# -- the JSON file ----------------------------------------------------------------------------------------------------
TEXTS = {
    "nothing": ("", "is not JSON"),
    "Python's": ("{'hidden_size': 32}", "is not JSON"),
    "cut off": ('{"prompt": "a', "is not JSON"),
    "a hundred thousand lists": ('{"stop": ' + "[" * 10**5 + "]" * 10**5 + "}", "inside one another"),
    "a key twice": ('{"prompt": "a", "stop": {"name": "svip", "h": 0.1, "h": 0.9}}', "'h' twice"),
    "NaN": ('{"prompt": "a", "stop": {"name": "svip", "h": NaN}}', "NaN is no number"),
    "too large for a float": ('{"prompt": "a", "stop": {"name": "svip", "h": 1e400}}', "1e400 is no number"),
    "5000 digits": ('{"prompt": "a", "gamma": 1' + "0" * 5000 + "}", "limit .*for integer string conversion"),
    "half a character": ('{"stop": "\\ud800"}', "surrogates not allowed"),
}
FILES = {
    "a list": (b"[1, 2]", "an object"),
    "a text": (b'"svip"', "an object"),
    "nothing at all": (b"null", "an object"),
    "no UTF-8": (b"\xff\xfe{}", "is not JSON"),
    "no end": (b" " * (2**24 + 1), "has more than 16777216 bytes"),
} | {name: (text.encode(), words) for name, (text, words) in TEXTS.items()}


@every_kind
def test_other_json_files_are_refused(artifact, kind):
    folder, load, facts, _ = artifact
    for name, (data, words) in FILES.items():
        (folder / facts).write_bytes(data)
        line = refused(lambda: load(folder), words)
        assert facts in line and len(line) < 500, name
    if kind != "policy":  # whose thresholds may never be reached
        (folder / facts).write_text('{"a": Infinity}')
        refused(lambda: load(folder), "Infinity is no number")
    (folder / facts).unlink()
    if kind == "certificate":
        assert load(folder).certificate is None
    else:
        refused(lambda: load(folder), "config.json" if kind == "policy" else f"{facts} cannot be read: No such file")


def test_a_policys_text_is_read_as_its_file():
    for text, words in TEXTS.values():
        if text.startswith("{"):
            refused(lambda text=text: as_policy(text), words)
    assert as_policy('{"stop": {"name": "svip", "h": Infinity}}').stop.h == float("inf")
    around = {"name": "any_of"}
    around["stops"] = [around, around]
    refused(lambda: as_policy({"stop": around}), "inside one another")
    refused(lambda: read_json("/dev/zero"), "^/dev/zero is a device or a pipe")
    text = '{"a": [1, -2.5e3, true, null, "\\ud83d\\ude00 [[{{"], "b": {"c": "' + "[" * 500 + '"}}'
    assert parse_json(text, "here") == json.loads(text) and parse_json("1" * 308, "here") == int("1" * 308)


IDENTITY = {"id": "x"}
ENTRIES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "head": [
        ({"hidden_size": 16}, "size mismatch"), ({"hidden_size": "32"}, "hidden_size.*'32'"),
        ({"hidden_size": 8.0}, "'hidden_size' expected int"), ({"width": "8"}, "'width'"),
        ({"kind": "mlp"}, "an MLP's config has one"), ({"kind": "mlp", "width": 4}, "Missing key"),
        ({"kind": "tree"}, "'tree' is missing or unknown"), ({"weights_sha256": "0" * 64}, "SHA-256 differs"),
        ({"weights_sha256": None}, "SHA-256 differs"), ({"features": {"model": "draft", "depth": 3}}, "depth"),
        ({"features": {"model": "student"}}, "student"), ({"features": "draft"}, "features"),
        ({"target": IDENTITY}, "model_type"), ({"target": "org/target"}, "must be a mapping"),
        ({"draft": [1, 2]}, "must be a mapping"), ({"versions": [0.8]}, "versions"),
        ({"threshold": 70}, r"HeadConfig\.threshold: expected a number from 0 to 1, got 70"),
        # Where heads of older versions have the threshold and λ, too
        ({"threshold": "x"}, "threshold"), ({"lam": [1.2]}, "lam"),
        ({"threshold": None, "metrics": {"threshold": "x"}}, "threshold"),
        ({"lam": None, "training": {"lambda": [1.2]}}, "lam"),
    ],
    "profile": [
        ({"gama": 7}, "unexpected keyword argument 'gama'"), ({"gamma": None}, "missing 1 required .*'gamma'"),
        ({"gamma": "7"}, "'gamma' expected int, got str"), ({"gamma": True}, "'gamma' expected int, got bool"),
        ({"gamma": 5}, "not measured up to γ = 5 tokens"), ({"decoding": [1]}, "'decoding' expected a dict, got list"),
        ({"draft": IDENTITY}, "ModelIdentity.*missing"), ({"tables_sha256": None}, "SHA-256 differs"),
        ({"tables_sha256": "0" * 64}, "SHA-256 differs"),
    ],
    "policy": [
        ({"stpo": "svip"}, "entry 'stpo'.*Did you mean 'stop'"),
        ({"stop": {"name": "svip", "max_drafts": 4}}, "takes h, c, form, max_draft"),
        ({"stop": "svpi"}, "Did you mean 'svip'"),
        ({"stop": {"name": "head", "head": "no_head"}}, "no_head/config.json cannot be read"),
    ],
    "certificate": [
        ({"harms": None}, "missing"), ({"policy": ["top_k"]}, "policy"), ({"harm_bound": "0.01"}, "harm_bound"),
        ({"harm_bound": 0.001}, "contradict each other"), ({"harms": 1.5}, "harms"),
        ({"harms": 251}, "contradict each other"), ({"gains": 71}, "contradict each other"),
        ({"problems": 0}, "contradict each other"), ({"right": 321}, "contradict each other"),
        ({"max_loss": 0.001}, "contradict each other"), ({"confidence": 1.0}, "no confidence"),
        ({"speed": 0}, "no confidence, problems or speed"), ({"speed": None}, "speed"), ({"models": []}, "models"),
        ({"models": {"target": {"weights": "0", "dtype": "float32"}}}, "missing"),
        ({"decoding": {"do_sample": "yes"}}, "decoding"), ({"versions": {"torch": 2}}, "versions"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("kind", ENTRIES)
def test_edited_entries_are_refused(artifact, kind):
    folder, load, facts, _ = artifact
    before = (folder / facts).read_bytes()
    for changes, words in ENTRIES[kind]:
        edit(folder, facts, **changes)
        line = refused(lambda: load(folder), words)
        assert facts in line or kind == "policy", changes
        (folder / facts).write_bytes(before)
    load(folder)


@pytest.mark.filterwarnings("ignore:.*entries not known to this version")
@every_kind
def test_entries_of_any_other_type_are_refused_or_read(artifact, kind):
    """No error but one line of a `ValueError`, whatever stands in the place of an entry."""
    folder, load, facts, _ = artifact
    before = (folder / facts).read_bytes()
    for name, value in json.loads(before).items():
        for other in (7, "x", [1], {"a": [{}]}, [], {}, -1, 10**30, 0.5, True, ""):
            if type(other) is not type(value):
                edit(folder, facts, **{name: other})
                try:
                    load(folder)
                except ValueError as error:
                    assert "\n" not in str(error) and len(str(error)) < 1000, (name, other)
    (folder / facts).write_bytes(before)
    load(folder)


# -- the tensors ------------------------------------------------------------------------------------------------------
@every_kind
def test_other_files_of_tensors_are_refused(artifact, kind, tmp_path):
    """As they are, and where there is a checksum with the one that fits them; what is unpickled would write a file."""
    folder, load, facts, tensors = artifact
    if tensors is None:
        return
    data, trap = (folder / tensors).read_bytes(), pickle.dumps(Trap(tmp_path / "sprung"))
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    for other in (data[:-8], data[: len(data) // 2], b"", trap, b"nothing", *([] if kind == "drafter" else [flipped])):
        (folder / tensors).write_bytes(other)
        line = refused(lambda: load(folder), "header|incomplete|metadata" if kind == "drafter" else "SHA-256 differs")
        assert Path(tensors).name in line or kind == "drafter"
    if kind in ("head", "profile"):
        for other in (trap, b"nothing", b""):
            rewrite(folder, other, True, facts, tensors)
            refused(lambda: load(folder), f"{tensors}: .*header")
    (folder / tensors).unlink()
    for name in ("pytorch_model.bin", "head.pkl", "weights.joblib"):
        (folder / Path(tensors).parent / name).write_bytes(trap)
    refused(lambda: load(folder), "safetensors")
    (folder / tensors).write_bytes(data)
    if kind in ("head", "profile"):
        rewrite(folder, data, True, facts, tensors)
    load(folder)  # what lies beside the right file is not looked at
    assert not (tmp_path / "sprung").exists()
    pickle.loads(trap)
    assert (tmp_path / "sprung").exists(), "the trap does not work, so nothing was proved"


class Trap:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_other_tensors_of_a_head_are_refused(tmp_path):
    weight, bias = torch.zeros(1, 32), torch.zeros(1)
    folder = save(tmp_path)
    for tensors, words in (
        ({"linear.bias": bias}, "linear.weight"),
        ({"linear.weight": weight, "linear.bias": bias, "extra": torch.zeros(2)}, "extra"),
        ({"linear.weight": torch.zeros(1, 16), "linear.bias": bias}, "16.*32|32.*16"),
        ({"linear.weight": torch.zeros(2, 32), "linear.bias": bias}, "linear.weight"),
        ({"linear.weights": weight, "linear.bias": bias}, "linear.weight"),
        ({}, "linear.weight"),
        ({"linear.weight": weight * math.nan, "linear.bias": bias}, "weights that are NaN, infinite or not of"),
        ({"linear.weight": weight, "linear.bias": bias + math.inf}, "weights that are NaN, infinite or not of"),
        ({"linear.weight": weight.to(torch.complex64), "linear.bias": bias}, "not of torch.float32"),
        ({"linear.weight": weight.to(torch.int8), "linear.bias": bias}, "not of torch.float32"),
        ({"linear.weight": weight.to(torch.float8_e4m3fn), "linear.bias": bias}, "not of torch.float32"),
        ({f"\x1b[31m{n}": torch.zeros(1) for n in range(2000)}, "Missing key|Unexpected key"),
    ):
        rewrite(folder, safetensors.torch.save(tensors), and_digest=True)
        line = refused(lambda: Head.from_pretrained(folder), words)
        assert len(line) < 1000 and line.isprintable()


def test_other_tables_of_a_profile_are_refused(tmp_path):
    folder = tmp_path / "profile"
    profile().save_pretrained(folder)
    tables, cells = safetensors.numpy.load_file(folder / "profile.safetensors"), bins()
    for changes, words in (
        ({"bins.accept": None}, "'bins.accept' is missing"),
        ({"pays": np.ones(2)}, "predicted speeds have gaps"),
        ({"pays": np.full(3, np.nan)}, "predicted speeds have gaps"),
        ({"bins.accept": bins(rows=2).accept}, "tables of acceptance have gaps"),
        ({"bins.accept": cells.accept * np.nan}, "tables of acceptance have gaps"),
        ({"bins.accept": -cells.accept}, "tables of acceptance are out of order"),
        ({"bins.accept": cells.accept + 1}, "tables of acceptance are out of order"),
        ({"bins.counts": cells.counts - 100}, "tables of acceptance are out of order"),
        ({"bins.s_edges": cells.s_edges[::-1].copy()}, "tables of acceptance are out of order"),
        ({"bins.a_edges": cells.a_edges * np.nan}, "tables of acceptance have gaps"),
        ({"bins.s_edges": cells.s_edges * np.nan}, "tables of acceptance have gaps"),
        ({"bins.a_edges": np.array(0.5)}, "tables of acceptance have gaps"),
        ({"latency.seconds": latency().seconds * np.nan}, "latency table has gaps"),
    ):
        other = {name: value for name, value in (tables | changes).items() if value is not None}
        rewrite(folder, safetensors.numpy.save(other), True, "profile.json", "profile.safetensors")
        refused(lambda: Profile.from_pretrained(folder), f"profile.json and profile.safetensors: .*{words}")


def test_sizes_that_no_machine_holds_cost_no_memory(tmp_path):
    folder = save(tmp_path)
    for changes, words in (
        ({"kind": "mlp", "width": 2**61}, "overflow"),
        ({"kind": "mlp", "width": -5}, "negative dimension"),
        ({"kind": "mlp", "width": 2**20, "hidden_size": 2**20}, "Missing key"),
        ({"hidden_size": 10**14}, "size mismatch"),
    ):
        edit(folder, **{"kind": "linear", "width": None, "hidden_size": 32} | changes)
        tracemalloc.start()
        refused(lambda: Head.from_pretrained(folder), words)
        assert tracemalloc.get_traced_memory()[1] < 2**26
        tracemalloc.stop()


# -- places and what could not be read back ---------------------------------------------------------------------------
def test_places_that_hold_nothing(tmp_path):
    for load, words in (
        (Head.from_pretrained, "config.json cannot be read: No such file"),
        (Profile.from_pretrained, "profile.json cannot be read: No such file"),
        (LossyPolicy.from_pretrained, r"holds no policy \(policy.json\) and no head \(config.json\)$"),
        (detect_kind, "is no folder of a head"),
    ):
        refused(lambda load=load: load(tmp_path), words)
        if load is not detect_kind:
            refused(lambda load=load: load("no/good/name"), "neither a folder here nor a repository name")
    linear().save_pretrained(tmp_path / "head")
    assert type(Head.from_pretrained(tmp_path, subfolder="head")) is LinearHead


ENDLESS: dict[str, Any] = {}
ENDLESS["a"] = ENDLESS


def test_what_could_not_be_read_back_replaces_nothing(tmp_path, monkeypatch):
    def head(**changes):
        return LinearHead(HeadConfig(4, **changes)).eval()

    wrong = [
        *((profile(**changes), words) for changes, words in (
            ({"metrics": {"samples": math.nan}}, "JSON compliant"), ({"training": {"source": "\ud800"}}, "surrogates"),
        )),
        *((made, words) for changes, words in (
            ({"metrics": {"brier": math.nan}}, "JSON compliant"), ({"label": "x" * 2**24}, "has more than 16777216 bytes"),
            ({"training": ENDLESS}, "recursion|Circular"), ({"training": {"a": {1, 2}}}, "not JSON serializable"),
            ({"label": "\ud800"}, "surrogates"),
        ) for made in (head(**changes), LossyPolicy(stop=HeadStop(head(**changes))))),
    ]  # fmt: skip
    monkeypatch.setattr(Unspeakable, "_spec", lambda *_: {"rule": {"name": "typical", "epsilon": math.nan}})
    for made, words in [*wrong, (Unspeakable(), "NaN")]:
        folder = tmp_path / type(made).__name__
        good = {Profile: profile(), LinearHead: head(), LossyPolicy: LossyPolicy(stop=HeadStop(head()))}
        good.get(type(made), LossyPolicy()).save_pretrained(folder)
        before = contents(tmp_path)
        with pytest.raises((ValueError, TypeError, RecursionError), match=words):
            made.save_pretrained(folder)
        saved = getattr(getattr(made, "stop", None), "head", made)
        assert contents(tmp_path) == before and getattr(saved, "source", None) is None


class Unspeakable(LossyPolicy):
    """A policy whose JSON form cannot be read back."""


def test_a_long_field_is_shortened_in_warnings(tmp_path):
    edit(save(tmp_path), **{"x" * 10**6: 1})
    with pytest.warns(UserWarning, match="not known to this version") as caught:
        Head.from_pretrained(tmp_path)
    assert len(str(caught[0].message)) < 1000
