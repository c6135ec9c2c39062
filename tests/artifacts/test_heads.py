"""Proves that a head comes back from its files bit by bit, that nothing else is ever loaded, and that it refuses other models."""

import dataclasses
import hashlib
import json
import math
import pickle
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from support import tiny
from support.refusals import contents, names, refused
from support.small import tokenizer, words
from support.tiny import assisted, prompts

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, Head, HeadConfig, HeadStop, LinearHead, MLPHead, ModelIdentity
from hf_lossy_assist.artifacts.files import new_folder, write_text
from hf_lossy_assist.models.identity import tokenizer_hash
from hf_lossy_assist.policy.sharing import kind_of


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

FILES = {"config.json", "model.safetensors", "README.md"}
FIGURES = {
    "auroc": 0.8125,
    "brier": 0.125,
    "acceptable_share": 0.75,
    "thresholds": [
        {"threshold": 0.3, "eta_tp": 0.91, "eta_fp": 0.42},
        {"threshold": 0.5, "eta_tp": 0.8, "eta_fp": 0.25},
    ],
}


@cache
def target() -> Any:
    return tiny.build("llama")


@cache
def draft() -> Any:
    return tiny.noisy(tiny.build("llama"), 0.05)


def full_config(**changes: Any) -> HeadConfig:
    """A config with something in every entry."""
    return dataclasses.replace(
        HeadConfig(
            hidden_size=32,
            label="q(x) ≤ 1.2·p(x)",
            features=FeatureSpec(layer=1, norm=False),
            target=dataclasses.replace(ModelIdentity.of(target()), id="org/target", revision="a" * 40),
            draft=dataclasses.replace(ModelIdentity.of(draft()), id="org/draft"),
            tokenizer_hash=tokenizer_hash(tokenizer()),
            decoding={"do_sample": True, "temperature": 0.7},
            training={"prompts": "some prompts", "number_of_prompts": 40, "seed": 3},
            metrics=FIGURES,
            versions={"torch": "2.9", "hf_lossy_assist": "0.1.0"},
        ),
        **changes,
    )


def linear(config: HeadConfig | None = None, seed: int = 0) -> LinearHead:
    torch.manual_seed(seed)
    return LinearHead(HeadConfig(32) if config is None else config).eval()


def mlp(seed: int = 0, **changes: Any) -> MLPHead:
    torch.manual_seed(seed)
    return MLPHead(HeadConfig(32, kind="mlp", width=5, **changes)).eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    linear(full_config()).save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def edit(folder: Path, **changes: Any) -> None:
    """Change entries of a saved config.json; None takes one out."""
    spec = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    spec = {name: value for name, value in spec.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(spec), encoding="utf-8")


def rewrite(folder: Path, data: bytes, and_digest: bool = False) -> None:
    (folder / "model.safetensors").write_bytes(data)
    if and_digest:
        edit(folder, weights_sha256=hashlib.sha256(data).hexdigest())


# -- what a head says -----------------------------------------------------------------------------------------------------


def test_by_hand():
    """σ(w·h + b) with w = (1, 0, −2, 0 …), b = 0.5: h = (2, 9, 1, 0 …) gives σ(0.5)."""
    head = linear()
    with torch.no_grad():
        head.linear.weight.zero_()[0, [0, 2]] = torch.tensor([1.0, -2.0])
        head.linear.bias.fill_(0.5)
    features = torch.zeros(2, 3, 32)
    features[..., :3] = torch.tensor([2.0, 9.0, 1.0])
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        got = head(features.to(dtype))
        assert got.shape == (2, 3) and got.dtype == torch.float32
        torch.testing.assert_close(got, torch.full((2, 3), 1 / (1 + 2.718281828459045**-0.5)))
    torch.testing.assert_close(head.logit(features), torch.full((2, 3), 0.5))


def test_mlp_by_hand():
    """One unit that passes h₀ through ReLU (above 0 it is the identity), times 3, minus 20: h₀ = 7 gives σ(1)."""
    head = mlp()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.hidden.weight[1, 0], head.linear.weight[0, 1], head.linear.bias[0] = 1.0, 3.0, -20.0
    features = torch.zeros(4, 32)
    features[:, 0] = torch.tensor([7.0, 7.0, 0.0, -50.0])
    expected = torch.tensor([1.0, 1.0, -20.0, -20.0])
    torch.testing.assert_close(head.logit(features.bfloat16()), expected)


def test_a_folded_standardisation_is_the_pipeline():
    """w·(x − μ)/s + b = (w/s)·x + (b − Σ wμ/s): the head then gives scikit-learn's own probabilities."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    torch.manual_seed(0)
    x = torch.randn(400, 32) * torch.linspace(0.1, 20, 32) + torch.linspace(-5, 5, 32)
    y = (x[:, 3] / x[:, 3].std() + x[:, 20] / x[:, 20].std() + torch.randn(400) > 0).numpy()
    pipeline = make_pipeline(StandardScaler(), linear_model.LogisticRegression()).fit(x.numpy(), y)
    scaler, logistic = pipeline[0], pipeline[1]
    head = linear()
    weight = torch.from_numpy(logistic.coef_[0] / scaler.scale_)
    with torch.no_grad():
        head.linear.weight.copy_(weight)
        head.linear.bias.copy_(torch.from_numpy(logistic.intercept_) - weight @ torch.from_numpy(scaler.mean_))
    expected = torch.from_numpy(pipeline.predict_proba(x.double().numpy())[:, 1])
    torch.testing.assert_close(head(x).double(), expected, atol=1e-6, rtol=0)


# -- there and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [linear, mlp], ids=["linear", "mlp"])
def test_save_and_load_bit_by_bit(make, tmp_path):
    head = make()
    assert head.source is None
    assert head.save_pretrained(tmp_path / "a" / "head") is None
    assert head.source == str(tmp_path / "a" / "head") and names(tmp_path / "a" / "head") == FILES
    for cls, path in ((Head, head.source), (type(head), tmp_path / "a" / "head")):
        loaded = cls.from_pretrained(path)
        assert type(loaded) is type(head) and not loaded.training and loaded.source == head.source
        assert loaded.config == head.config and loaded.digest == head.digest
        assert loaded.weights.keys() == head.weights.keys()
        for name, tensor in head.weights.items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, loaded.weights[name])
        features = torch.randn(50, 32)
        assert torch.equal(loaded(features), head(features))


def test_the_config_survives(tmp_path):
    """Every entry, the nested ones as what they were, also for letters beyond ASCII."""
    config = full_config(kind="mlp", width=3, method="autojudge", polarity="important")
    head = MLPHead(config)
    head.save_pretrained(tmp_path / "head")
    loaded = Head.from_pretrained(tmp_path / "head").config
    assert loaded == config and isinstance(loaded.features, FeatureSpec) and isinstance(loaded.target, ModelIdentity)
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert "≤ 1.2·p" in (tmp_path / "head" / "config.json").read_text(encoding="utf-8")
    assert HeadConfig.from_dict({"hidden_size": 8}) == HeadConfig(8)


def test_entries_of_a_later_version_warn(saved):
    edit(saved, dropout=0.1, calibration={"a": 1})
    with pytest.warns(UserWarning, match=r"config.json: .* ignored: calibration, dropout"):
        assert Head.from_pretrained(saved).config == full_config()


def test_the_digest_is_of_the_weights():
    head, same = linear(seed=1), linear(full_config(), seed=1)
    assert head.digest == same.digest == linear(seed=1).digest != linear(seed=2).digest
    before = head.digest
    with torch.no_grad():
        head.linear.bias += 1e-6
    assert head.digest != before
    assert hashlib.sha256(safetensors.torch.save(head.weights)).hexdigest() == head.digest


def test_the_class_must_fit(tmp_path):
    mlp().save_pretrained(tmp_path / "head")
    refused(lambda: LinearHead.from_pretrained(tmp_path / "head"), "holds a MLPHead, not a LinearHead.*Head.from_pre")


@pytest.mark.parametrize(
    "make", [lambda: LinearHead(HeadConfig(8, kind="mlp", width=3)), lambda: MLPHead(HeadConfig(8))], ids=["linear", "mlp"]
)  # fmt: skip
def test_a_config_of_the_other_kind_is_refused(make):
    """Saved, such a head could not be loaded again."""
    refused(make, "kind|width")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"hidden_size": 0}, ValueError, "HeadConfig.hidden_size"),
        ({"hidden_size": 8.0}, TypeError, "HeadConfig.hidden_size"),
        ({"kind": "liner"}, ValueError, "'liner'.*Did you mean 'linear'"),
        ({"kind": "mlp"}, TypeError, "HeadConfig.width.*None"),
        ({"kind": "mlp", "width": 0}, ValueError, "HeadConfig.width"),
        ({"polarity": "accepted"}, ValueError, "'accepted'.*Did you mean 'acceptable'"),
    ],
)
def test_bad_configs_are_refused(settings, error, words):
    refused(lambda: HeadConfig(**{"hidden_size": 8} | settings), words, error)


# -- damaged and foreign files --------------------------------------------------------------------------------------------


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
    refused(lambda: Head.from_pretrained(saved), "not a whole safetensors.*pickles are never loaded")
    torch.save(linear().state_dict(), saved / "model.safetensors")
    rewrite(saved, (saved / "model.safetensors").read_bytes(), and_digest=True)
    refused(lambda: Head.from_pretrained(saved), "pickles are never loaded")
    (saved / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "head.pkl", "weights.joblib"):
        (saved / name).write_bytes(trap)
        refused(lambda: Head.from_pretrained(saved), "no model.safetensors.*pickle, which is never loaded")
        (saved / name).unlink()
    refused(lambda: Head.from_pretrained(saved), "no model.safetensors; it holds README.md, config.json$")
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
        ("[1, 2]", "not the config of a head"),
        ("null", "not the config of a head"),
        ('{"model_type": "llama", "hidden_size": 32}', "not the config of a head"),
        (b"\xff\xfe{}", "is not JSON"),
    ],
)
def test_other_configs_are_refused(saved, text, words):
    (saved / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(lambda: Head.from_pretrained(saved), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 16}, "does not fit config.json"),
        ({"hidden_size": "32"}, "hidden_size.*'32'"),
        ({"hidden_size": 10**14}, "does not fit|hidden_size"),
        ({"kind": "mlp", "width": 4}, "does not fit config.json"),
        ({"kind": "tree"}, "unknown kind 'tree'"),
        ({"weights_sha256": "0" * 64}, "SHA-256 differs"),
        ({"features": {"model": "draft", "depth": 3}}, "depth"),
        ({"features": {"model": "student"}}, "student"),
        ({"features": "draft"}, "features"),
        ({"target": {"id": "x"}}, "model_type"),
        ({"target": "org/target"}, "target"),
        ({"draft": [1, 2]}, "draft"),
        ({"metrics": [0.8]}, "metrics"),
    ],
    ids=str,
)
def test_edited_configs_are_refused(saved, changes, words):
    edit(saved, **changes)
    refused(lambda: Head.from_pretrained(saved), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 2**61}, "width: expected a whole number from 1 to"),
        ({"width": -5}, "width: expected a whole number of at least 1"),
        ({"kind": "mlp", "width": 2**20, "hidden_size": 2**20}, "are more than 1073741824 weights"),
        ({"kind": "mlp", "width": 2**15, "hidden_size": 2**15}, "does not fit config.json"),
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
DEEP: Any = []
for _ in range(70):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": {"brier": math.nan}}, "not JSON compliant"),
        ({"threshold": math.inf}, "not JSON compliant"),
        ({"label": "x" * 2**24}, "has more than 16777216 bytes"),
        ({"training": {"a": DEEP}}, "more than 64 lists and objects inside one another"),
        ({"training": ENDLESS}, "without end"),
        ({"training": {"a": {1, 2}}}, "not JSON serializable"),
        ({"training": {"a": 10**400}}, "401 digits"),
        ({"training": {1: 2, "1": 3}}, "the key '1' twice"),
        ({"label": "\ud800"}, "surrogates not allowed"),
    ],
)
def test_what_could_not_be_read_back_replaces_no_head(tmp_path, changes, words):
    made = LinearHead(HeadConfig(4, **changes)).eval()
    for folder, wrong in ((tmp_path / "head", made), (tmp_path / "policy", hla.LossyPolicy(stop=HeadStop(made)))):
        good = LinearHead(HeadConfig(4)).eval()
        (good if folder.name == "head" else hla.LossyPolicy(stop=HeadStop(good))).save_pretrained(folder)
        before = contents(tmp_path)
        refused(lambda: wrong.save_pretrained(folder), f"^this head could not be read back.*{words}")  # noqa: B023
        assert contents(tmp_path) == before and made.source is None


def test_a_policy_that_could_not_be_read_back_replaces_none(tmp_path, monkeypatch):
    hla.LossyPolicy().save_pretrained(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(hla.LossyPolicy, "_spec", lambda *_: {"rule": {"name": "typical", "epsilon": math.nan}})
    refused(lambda: hla.LossyPolicy().save_pretrained(tmp_path), "^this policy could not be read back.*NaN")
    assert contents(tmp_path) == before


def test_what_a_head_says_is_not_said_whole(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"x" * 10**6: 1}))
    with pytest.warns(UserWarning, match="not known to this version") as said:
        Head.from_pretrained(saved)
    assert len(str(said[0].message)) < 1000
    tensors = safetensors.torch.load((saved / "model.safetensors").read_bytes())
    data = safetensors.torch.save(tensors | {f"\x1b[31m{n}": torch.zeros(1) for n in range(2000)})
    (saved / "model.safetensors").write_bytes(data)
    (saved / "config.json").write_text(json.dumps(config | {"weights_sha256": hashlib.sha256(data).hexdigest()}))
    text = refused(lambda: Head.from_pretrained(saved), "does not fit config.json")
    assert len(text) < 1000 and text.isprintable()


def test_places_that_hold_no_head(tmp_path):
    refused(lambda: Head.from_pretrained(tmp_path), "has no config.json; it holds nothing")
    refused(lambda: Head.from_pretrained(tmp_path / "missing"), "neither a folder here nor a repository name")
    refused(lambda: Head.from_pretrained(tmp_path, subfolder="head"), "has no config.json")
    linear().save_pretrained(tmp_path / "head")
    assert type(Head.from_pretrained(tmp_path, subfolder="head")) is LinearHead


@pytest.mark.parametrize("value", ["x", [1.2], -1.0])
def test_a_threshold_or_lambda_that_is_no_number_is_refused(tmp_path, value):
    """In the fields of today and where older versions had them."""
    forms = ({"threshold": value}, {"lam": value}, {"metrics": {"threshold": value}}, {"training": {"lambda": value}})
    for form, field in zip(forms, ("threshold", "lam") * 2, strict=True):
        spec = HeadConfig(4).to_dict() | form
        refused(
            lambda spec=spec: HeadConfig.from_dict(spec, "config.json"),
            f"config.json: HeadConfig.{field}: expected a num",
        )


def test_configs_of_older_versions_are_read():
    """Threshold and λ stood among the figures; what is written has them as fields."""
    config = HeadConfig(4, threshold=0.25, lam=1.2, training={"seed": 3}, metrics={"auroc": 0.9})
    old = config.to_dict()
    del old["threshold"], old["lam"]
    old |= {"training": {"seed": 3, "lambda": 1.2}, "metrics": {"auroc": 0.9, "threshold": 0.25}}
    assert HeadConfig.from_dict(old) == config == HeadConfig.from_dict(config.to_dict())
    assert old["training"]["lambda"] == 1.2, "what was given is not changed"
    assert (hla.demo.head("autojudge").config.threshold, hla.demo.head().config.lam) == (0.1965, 1.2)


# -- all or nothing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there", [True, False], ids=["over another", "new"])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_while_saving_leaves_what_was(there, error, tmp_path, monkeypatch):
    """The card is written last, after the weights."""
    goal = tmp_path / "head"
    if there:
        linear(seed=1).save_pretrained(goal)
    before = contents(tmp_path)
    head = linear(seed=2)

    def fail(*args, **kwargs):
        assert (next(tmp_path.glob(".head.*")) / "model.safetensors").is_file()
        raise error("disk full")

    monkeypatch.setattr("hf_lossy_assist.artifacts.heads.head_card", fail)
    with pytest.raises(error):
        head.save_pretrained(goal)
    assert contents(tmp_path) == before and names(tmp_path) == ({"head"} if there else set())
    assert head.source is None
    monkeypatch.undo()
    head.save_pretrained(goal)
    assert Head.from_pretrained(goal).digest == head.digest and names(tmp_path) == {"head"}


def test_new_folder(tmp_path):
    """Files in a subfolder come along, others in a folder that was there stay, and everybody may read it."""
    goal = tmp_path / "deep" / "goal"
    for content in ("one", "two"):
        with new_folder(goal) as made:
            assert made.parent == goal.parent
            (made / "sub").mkdir()
            (made / "sub" / "file").write_text(content)
        assert (goal / "sub" / "file").read_text() == content and names(goal.parent) == {"goal"}
        (goal / "other").write_text("kept")
    assert (goal / "other").read_text() == "kept" and goal.stat().st_mode & 0o777 == 0o755
    write_text(goal / "other", "neü")
    assert (goal / "other").read_text(encoding="utf-8") == "neü" and names(goal) == {"sub", "other"}


# -- whose head it is -----------------------------------------------------------------------------------------------------


def identities(**changes: Any) -> Head:
    """A head for `target()` and `draft()`, with some facts of the draft's or target's identity changed."""
    made = {name: ModelIdentity.of(model) for name, model in (("target", target()), ("draft", draft()))}
    for name, facts in changes.items():
        made[name] = dataclasses.replace(made[name], **facts)
    return linear(HeadConfig(32, **made))


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize(
    ("fact", "there", "here"),
    [("hidden_size", 64, 32), ("vocab_size", 101, 97), ("num_layers", 5, 2), ("model_type", "qwen2", "llama")],
)
def test_other_models_are_refused(which, fact, there, here):
    head = identities(**{which: {fact: there}})
    message = refused(lambda: head.check(target(), draft()), f"{fact} {there!r} there, {here!r} here")
    assert message.count(which) >= 2 and "hf-lossy fit" in message
    # … by generate too, before any forward of either model.
    ran = []
    handles = [m.register_forward_pre_hook(lambda *_: ran.append(1)) for m in (target(), draft())]
    for policy in (hla.Sprinter(head), HeadStop(head), head):
        assert refused(lambda p=policy: assisted(target(), prompts((9, 4)), draft(), p), fact) == message
    for handle in handles:
        handle.remove()
    assert not ran


def test_a_head_of_another_size_is_refused_without_identities():
    """A head made by hand has none, and its own size is enough to see that it cannot read this draft."""
    head = linear(HeadConfig(16))
    ran = []
    handle = draft().register_forward_pre_hook(lambda *_: ran.append(1))
    refused(lambda: assisted(target(), prompts((9, 4)), draft(), HeadStop(head)), "16.*32|32.*16")
    handle.remove()
    assert not ran


@pytest.mark.parametrize(
    ("facts", "words"), [({"id": "org/other"}, "id 'org/other' there"), ({"revision": "b" * 40}, "revision 'bbb")]
)
def test_another_id_or_revision_only_warns(facts, words, monkeypatch):
    monkeypatch.setattr(draft().config, "_commit_hash", "c" * 40, raising=False)
    head = identities(draft=facts)
    with pytest.warns(UserWarning, match=words):
        head.check(target(), draft())
    with pytest.warns(UserWarning, match=words):
        assisted(target(), prompts((9,)), draft(), HeadStop(head))
    head.check(target=target())  # what is not given is not compared
    monkeypatch.setattr(draft().config, "_commit_hash", None)
    if "revision" in facts:
        head.check(target(), draft())  # nor what is not known


def test_the_right_models_pass_in_silence(saved):
    identities().check(target(), draft())
    linear().check(target(), draft(), tokenizer())  # nothing recorded, nothing to compare


def test_another_tokenizer_is_refused():
    shuffled = tokenizer(words()[::-1])
    assert tokenizer_hash(tokenizer()) == tokenizer_hash(tokenizer()) != tokenizer_hash(shuffled)
    head = linear(HeadConfig(32, tokenizer_hash=tokenizer_hash(tokenizer())))
    head.check(tokenizer=tokenizer())
    message = refused(lambda: head.check(tokenizer=shuffled), "token ids mean other words")
    assert tokenizer_hash(shuffled)[:12] in message and tokenizer_hash(tokenizer())[:12] in message
    refused(lambda: assisted(target(), prompts((9,)), draft(), head, tokenizer=shuffled), "token ids mean other words")


def test_identity(tmp_path):
    """The Hub's name, or a folder's own name without its path."""
    demo = hla.demo.load()
    made = ModelIdentity.of(demo.draft)
    assert (
        made.id.endswith("draft")
        and "/" not in made.id
        and made.vocab_size == demo.draft.config.vocab_size
        and made.revision is None
    )
    assert made.conflict(made) is None and made.doubt(made) is None
    assert "draft (" in str(made) and ModelIdentity(**made.to_dict()) == made
    for path in (tmp_path / "model", Path("org/name")):
        model = tiny.build("gpt2")
        model.config.name_or_path = str(path)
        assert ModelIdentity.of(model).id == ("model" if path.is_absolute() else "org/name")
        assert ModelIdentity.of(model).hidden_size == 32 and ModelIdentity.of(model).num_layers == 2


# -- card and folder ------------------------------------------------------------------------------------------------------


def test_the_card(saved):
    card = ModelCard.load(saved / "README.md")
    assert card.data.library_name == "hf_lossy_assist" and card.data.license == "apache-2.0"
    assert {"hf_lossy_assist", "speculative-decoding", "sprinter"} <= set(card.data.tags)
    assert card.data.base_model == ["org/draft", "org/target"]
    name, results = model_index_to_eval_results(card.data.to_dict()["model-index"])
    assert name == "sprinter head"
    assert {(r.metric_type, r.metric_value) for r in results} == {("auroc", 0.8125), ("brier", 0.125)}
    assert {r.dataset_name for r in results} == {"some prompts"}
    text = card.text
    for line in (
        "**Lossy.**",
        "| auroc | 0.8125 |",
        "| 0.5 | 0.800 | 0.250 |",
        "| target | org/target | " + "a" * 40 + " | llama | 32 | 2 | 97 |",
        "| draft | org/draft | not recorded | llama | 32 | 2 | 97 |",
        "q(x) ≤ 1.2·p(x)",
        "temperature 0.7",
        "- number of prompts: 40",
        "layer 1, before any norm",
        tokenizer_hash(tokenizer()),
        'hla.enable(AutoModelForCausalLM.from_pretrained("org/target"))',
    ):
        assert line in text, line
    assert "{{" not in text and "{%" not in text and "None" not in text


def test_a_card_of_local_models_names_no_base_model(tmp_path):
    """Only what can be a repository's name: another value would make the Hub refuse the card."""
    linear(HeadConfig(32, target=ModelIdentity.of(target()), draft=ModelIdentity.of(draft()))).save_pretrained(
        tmp_path
    )
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model is None and "model-index" not in card.data.to_dict() and "None" not in card.text


def test_what_a_folder_holds(saved, tmp_path):
    assert kind_of(saved) == "head"
    hla.Sprinter(linear()).save_pretrained(tmp_path / "policy")
    assert kind_of(tmp_path / "policy") == "policy"
    hla.LossyPolicy(stop=hla.SVIP()).save_pretrained(tmp_path / "plain")
    assert kind_of(tmp_path / "plain") == "policy"
    assert kind_of(hla.demo.FOLDER / "draft") == kind_of(hla.demo.FOLDER) == "models"
    (tmp_path / "repo" / "custom_generate").mkdir(parents=True)
    (tmp_path / "repo" / "custom_generate" / "generate.py").touch()
    assert kind_of(tmp_path / "repo") == "custom_generate"
    (tmp_path / "empty").mkdir()
    refused(lambda: kind_of(tmp_path / "empty"), "is no head.*it holds nothing")
    refused(lambda: kind_of(tmp_path / "missing"), "there is no folder")
    for folder in (saved, tmp_path / "policy" / "stop_head"):  # damaged ones are found out
        rewrite(folder, b"no weights")
    refused(lambda: kind_of(saved), "safetensors")
    refused(lambda: kind_of(tmp_path / "policy"), "safetensors")


@pytest.mark.parametrize("dtype", ["complex64", "int8", "bool", "F8_E8M0", "float8_e4m3fn"])
def test_weights_of_another_dtype_are_refused(tmp_path, dtype):
    head = LinearHead(HeadConfig(4)).eval()
    head.save_pretrained(tmp_path)
    if dtype == "F8_E8M0":  # in the format's list, and not in torch's of this library
        header = {"linear.weight": {"dtype": dtype, "shape": [1, 4], "data_offsets": [0, 4]},
                  "linear.bias": {"dtype": dtype, "shape": [1], "data_offsets": [4, 5]}}  # fmt: skip
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(5)
    else:
        kind = getattr(torch, dtype)
        data = safetensors.torch.save({name: tensor.to(kind) for name, tensor in head.weights.items()})
    rewrite(tmp_path, data, and_digest=True)
    with pytest.raises(
        ValueError, match=rf"model.safetensors .*{dtype}.*; expected torch.float32, .*float64"
    ) as error:
        Head.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)
