"""Proves that a head comes back from its files bit by bit, and that it refuses other models."""

import copy
import dataclasses
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from support import tiny
from support.heads import draft, edit, full_config, linear, save, target
from support.refusals import contents, names, refused
from support.small import tokenizer, words
from support.tiny import assisted, prompts

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, Head, HeadConfig, HeadStop, LinearHead, MLPHead, ModelIdentity
from hf_lossy_assist.artifacts.files import new_folder, write_text
from hf_lossy_assist.artifacts.identity import tokenizer_hash, weights_hash


pytestmark = pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")

FILES = {"config.json", "model.safetensors", "README.md"}


def mlp(seed: int = 0, **changes: Any) -> MLPHead:
    torch.manual_seed(seed)
    return MLPHead(HeadConfig(32, kind="mlp", width=5, **changes)).eval()


@pytest.fixture
def saved(tmp_path) -> Path:
    return save(tmp_path / "head")


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
    head = mlp()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.hidden.weight[1, 0], head.linear.weight[0, 1], head.linear.bias[0] = 1.0, 3.0, -20.0
    features = torch.zeros(4, 32)
    features[:, 0] = torch.tensor([7.0, 7.0, 0.0, -50.0])
    expected = torch.tensor([1.0, 1.0, -20.0, -20.0])
    torch.testing.assert_close(head.logit(features.bfloat16()), expected)


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
        assert loaded.tensors().keys() == head.tensors().keys()
        for name, tensor in head.tensors().items():
            assert tensor.dtype == torch.float32 and torch.equal(tensor, loaded.tensors()[name])
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


def test_configs_of_other_versions_are_read(saved):
    edit(saved, dropout=0.1, calibration={"a": 1})
    with pytest.warns(UserWarning, match=r"config.json: .* ignored: calibration, dropout"):
        assert Head.from_pretrained(saved).config == full_config()
    config = HeadConfig(4, threshold=0.25, lam=1.2, training={"seed": 3}, metrics={"auroc": 0.9})
    old = config.to_dict()
    del old["threshold"], old["lam"]
    old |= {"training": {"seed": 3, "lambda": 1.2}, "metrics": {"auroc": 0.9, "threshold": 0.25}}
    assert HeadConfig.from_dict(old) == config == HeadConfig.from_dict(config.to_dict())
    assert old["training"]["lambda"] == 1.2, "what was given is not changed"
    assert (hla.demo.head("autojudge").config.threshold, hla.demo.head().config.lam) == (0.1965, 1.2)


def test_the_digest_is_of_the_weights():
    head, same = linear(seed=1), linear(full_config(), seed=1)
    assert head.digest == same.digest == linear(seed=1).digest != linear(seed=2).digest
    before = head.digest
    with torch.no_grad():
        head.linear.bias += 1e-6
    assert head.digest != before
    assert hashlib.sha256(safetensors.torch.save(head.tensors())).hexdigest() == head.digest


def test_a_head_and_its_config_are_of_one_kind(tmp_path):
    mlp().save_pretrained(tmp_path / "head")
    refused(lambda: LinearHead.from_pretrained(tmp_path / "head"), "holds a MLPHead, not a LinearHead")
    refused(lambda: LinearHead(HeadConfig(8, kind="mlp", width=3)), "the config is of kind 'mlp'")
    refused(lambda: MLPHead(HeadConfig(8)), "the config is of kind 'linear'")


def test_a_threshold_in_percent_is_refused():
    """By the config, the stop and the policy, for a head's output is a share; 1 is the neutral value."""
    for make in (
        lambda: HeadConfig(4, threshold=70),
        lambda: hla.sprinter(LinearHead(HeadConfig(4)), threshold=70),
        lambda: hla.specdec(LinearHead(HeadConfig(4, features=FeatureSpec(position="token"))), threshold=70),
    ):
        refused(make, r"(HeadConfig|HeadStop|SpecDecPP)\.threshold: expected a number from 0 to 1, got 70")
    head = LinearHead(HeadConfig(4))
    head.linear.bias.data.fill_(99.0)  # whose sigmoid rounds to 1
    stops = [HeadStop(head, t).should_stop(None, None, torch.zeros(2, 4)).tolist() for t in (0.99, 1)]
    assert stops == [[False, False], [True, True]]


# -- all or nothing -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("there", "error"), [(True, OSError), (False, KeyboardInterrupt)], ids=["over another", "new"]
)
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

    monkeypatch.setattr("hf_lossy_assist.artifacts.head.render", fail)
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


def test_other_models_are_refused():
    facts = (("hidden_size", 64, 32), ("vocab_size", 101, 97), ("num_layers", 5, 2), ("model_type", "qwen2", "llama"))
    for which, (fact, there, here) in itertools.product(("target", "draft"), facts):
        head = identities(**{which: {fact: there}})
        message = refused(lambda: head.check(target(), draft()), f"{fact} {there!r} there, {here!r} here")  # noqa: B023
        assert message.count(which) >= 2 and "hf-lossy fit" in message
    # … by generate too, before any forward of either model.
    ran = []
    handles = [m.register_forward_pre_hook(lambda *_: ran.append(1)) for m in (target(), draft())]
    for policy in (hla.Sprinter(head), HeadStop(head), head):
        assert refused(lambda p=policy: assisted(target(), prompts((9, 4)), draft(), p), "model_type") == message
    for handle in handles:
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


def test_other_weights_under_the_same_name_only_warn():
    weights = {"target": f"float64:{weights_hash(target())}", "draft": f"float64:{weights_hash(draft())}"}
    head = linear(dataclasses.replace(identities().config, model_weights=weights))
    head.check(target(), draft())
    assisted(target(), prompts((9,)), draft(), HeadStop(head))
    tuned, half = copy.deepcopy(draft()), copy.deepcopy(draft()).bfloat16()
    with torch.no_grad():
        tuned.lm_head.weight += 0.5
    line = "the head's {0} and this {0} may differ: {1}; it was made for the former"
    for model, doubt in ((tuned, "other weights under the same name"), (half, "'float64' there, 'bfloat16' here")):
        with pytest.warns(UserWarning, match=line.format("draft", doubt)):
            head.check(target(), model)
        with pytest.warns(UserWarning, match=line.format("target", doubt)):
            head.check(model, draft())
    for run in (
        lambda: assisted(target(), prompts((9, 4)), tuned, head),
        lambda: list(hla.generate_many(target(), [[5, 6]], assistant_model=tuned, lossy_policy=head, max_new_tokens=3)),
        lambda: target().generate(**prompts((9,)), custom_generate=hla.Runner(head, tuned), max_new_tokens=3),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=line.format("draft", "other weights under the same name")):
            run()
    linear(identities().config).check(tuned, tuned)  # heads of older versions do not say


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
    assert made.id.endswith("draft") and "/" not in made.id and made.revision is None
    assert made.vocab_size == demo.draft.config.vocab_size
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
        "**Lossy.**", "| auroc | 0.8125 |", "| 0.5 | 0.800 | 0.250 |",
        "| target | org/target | " + "a" * 40 + " | llama | 32 | 2 | 97 |",
        "| draft | org/draft | not recorded | llama | 32 | 2 | 97 |", "q(x) ≤ 1.2·p(x)", "temperature 0.7",
        "- number of prompts: 40", "layer 1, before any norm", tokenizer_hash(tokenizer()),
        'hla.enable(AutoModelForCausalLM.from_pretrained("org/target"))',
    ):  # fmt: skip
        assert line in text, line
    assert "{{" not in text and "{%" not in text and "None" not in text


def test_cards_of_models_in_int8_and_of_local_ones(tmp_path):
    names = {"target": "org/target[:3]:int8", "draft": "org/draft[:4]:int8"}
    config = full_config()
    models = {role: dataclasses.replace(getattr(config, role), id=name) for role, name in names.items()}
    linear(full_config(**models)).save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert 'target = hla.enable(hla.early_exit(hla.load("org/target", dtype="int8"), 3))' in card
    assert 'draft = hla.early_exit(hla.load("org/draft", dtype="int8"), 4)' in card and "AutoModel" not in card
    assert ModelCard.load(tmp_path / "README.md").data.base_model == ["org/draft", "org/target"]
    # Only what can be a repository's name: another value would make the Hub refuse the card.
    identities().save_pretrained(tmp_path / "local")
    card = ModelCard.load(tmp_path / "local" / "README.md")
    assert card.data.base_model is None and "model-index" not in card.data.to_dict() and "None" not in card.text
