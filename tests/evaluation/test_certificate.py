"""A certificate travels with its policy and is doubted where it says nothing."""

import json
from dataclasses import replace

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.repocard_data import model_index_to_eval_results
from support.certificates import POLICY, a_certificate

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.identity import ModelIdentity, weights_hash
from hf_lossy_assist.evaluation.comparison import describe_comparison
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.models.introspection import dtype_of
from hf_lossy_assist.policy.parse import strip_paths
from hf_lossy_assist.policy.policy import compute_fingerprint


@pytest.fixture(scope="module")
def models():
    found = hla.demo.load()
    hla.enable(found.target)
    return found


def certify(models, draft=None, **decoding):
    """A certificate of the demo's models; `draft`: of another draft."""
    records = {
        role: ModelIdentity.of(model).to_dict() | {"weights": weights_hash(model), "dtype": dtype_of(model)}
        for role, model in (("target", models.target), ("draft", draft or models.draft))
    }
    return a_certificate(models=records, decoding={"do_sample": False, **decoding})


def test_a_policy_carries_its_certificate(tmp_path):
    policy = replace(POLICY, certificate=a_certificate())
    policy.save_pretrained(tmp_path / "policy")
    loaded = hla.LossyPolicy.from_pretrained(tmp_path / "policy")
    assert loaded == policy and loaded.certificate == policy.certificate
    card = (tmp_path / "policy" / "README.md").read_text()
    assert "1 of 320; certified: at most 2.00% at 95% confidence" in card and "for prompts drawn like these" in card
    name, results = model_index_to_eval_results(ModelCard(card).data.to_dict()["model-index"])
    assert name == "policy" and {one.dataset_name for one in results} == {"demo"}
    assert [(one.metric_type, one.metric_value) for one in results] == [("harm", 1 / 320), ("speedup", 2.5)]
    assert loaded.with_fallback().certificate is None  # it was not measured
    assert "99.9% confidence" in str(replace(policy.certificate, confidence=1 - (1 - 0.999)))


@pytest.mark.full
def test_another_policy_in_its_place_has_no_certificate(tmp_path, hub):
    replace(POLICY, certificate=a_certificate()).save_pretrained(tmp_path / "policy")
    with pytest.warns(UserWarning, match="README.md stays as it is"):
        hla.LossyPolicy(hla.TopK(40)).save_pretrained(tmp_path / "policy")
    assert hla.LossyPolicy.from_pretrained(tmp_path / "policy").certificate is None
    replace(POLICY, certificate=a_certificate()).push_to_hub("org/tuned")
    assert "certificate.json" in hub.files("org/tuned")
    hla.LossyPolicy(hla.TopK(40)).push_to_hub("org/tuned")
    assert "certificate.json" not in hub.files("org/tuned") and "policy.json" in hub.files("org/tuned")


def test_a_path_of_this_machine_is_not_published(tmp_path, monkeypatch):
    folder = tmp_path / "private" / "judge"
    folder.mkdir(parents=True)
    assert strip_paths(f"autojudge:head={folder},threshold=0.5+svip") == "autojudge:head=judge,threshold=0.5+svip"
    (tmp_path / "e").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder whose name occurs in other words
    assert strip_paths("autojudge:head=e,threshold=1e-3+svip") == "autojudge:head=e,threshold=1e-3+svip"
    assert strip_paths(f"autojudge:head={tmp_path}/e/../e") == "autojudge:head=e"
    monkeypatch.chdir("e")
    assert strip_paths("autojudge:head=.,threshold=0.5") == "autojudge:head=e,threshold=0.5"
    for name in ("autojudge:head=org/name+svip", "top_k:k=4", "svip", '{"rule": "strict"}', "x" * 5000):
        assert strip_paths(name) == name
    (folder / "policy.json").write_text("{}")
    assert (strip_paths(str(folder)), strip_paths(f"{folder}/policy.json")) == ("judge", "policy.json")
    spec = {"rule": {"name": "union", "rules": [{"name": "judge", "head": str(folder)}, "strict"]}}
    assert json.loads(strip_paths(json.dumps(spec))) == json.loads(json.dumps(spec).replace(str(folder), "judge"))


def test_another_model_or_decoding_is_doubted_in_one_line(models):
    certificate = certify(models, max_new_tokens=8, repetition_penalty=1.0)
    here = {"target": models.target, "draft": models.draft}
    assert certificate.doubts(here, {"do_sample": False, "temperature": 0.5, "max_new_tokens": 8}) == []
    assert certificate.doubts({"target": models.draft}, {})[0].startswith("another target (")
    assert certificate.doubts(here, {"do_sample": True}) == ["do_sample False there, True here"]
    assert certificate.doubts(here, {"max_new_tokens": 9}) == ["texts of up to 8 new tokens there, longer ones here"]
    assert certificate.doubts(here | {"draft": None}, {}) == ["no draft model by itself"]
    assert certificate.doubts(here, {"repetition_penalty": 1.2}) == ["repetition_penalty 1.0 there, 1.2 here"]
    certificate = certify(models)
    wild = dict(certificate.models)
    wild["target"] = wild["target"] | {"id": "a\x1b[2Jb\u202e\n" + "c" * 9000}
    [doubt] = replace(certificate, models=wild).doubts({"target": models.target}, {})
    assert "\x1b" not in doubt and "\u202e" not in doubt and "\n" not in doubt and len(doubt) < 400


def test_other_weights_and_another_precision_are_doubted(models):
    certificate, other = certify(models), hla.demo.load(torch.bfloat16)
    assert certificate.doubts({"target": other.target}, {}) == ["another target ('float32' there, 'bfloat16' here)"]
    trained = hla.demo.load().target
    assert certificate.doubts({"target": trained}, {}) == []
    with torch.no_grad():
        trained.get_output_embeddings().weight.mul_(1.01)
    assert certificate.doubts({"target": trained}, {}) == ["another target (other weights under the same name)"]
    packed = hla.prepack(hla.demo.load().target)
    assert "cannot be read here" in certificate.doubts({"target": packed}, {})[0]


def written(models, policy, **settings):
    ids = models.tokenizer("How many books", return_tensors="pt")
    return models.target.generate(
        **ids, **{"assistant_model": models.draft, "lossy_policy": policy, "max_new_tokens": 4} | settings
    )


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_generate_says_what_differs(models, recwarn):
    """The same call as was certified says nothing; others say what is other, once."""
    certificate = certify(models, max_new_tokens=DecodingSettings().max_new_tokens, repetition_penalty=1.0)
    policy = replace(POLICY, certificate=certificate)
    written(models, policy, do_sample=False)
    assert not [warning for warning in recwarn if "certificate" in str(warning.message)]
    for settings, difference in (
        ({"do_sample": True}, "do_sample False there, True here"),
        ({"assistant_model": None, "drafter": "suffix", "lossy_policy": replace(policy, stop=hla.Constant(3))}, ".*no draft model by itself"),
        ({"lossy_policy": replace(policy, rule=hla.TopK(7))}, "another policy than 'top_k:k=4\\+svip'"),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match=f"this policy's certificate is of something else: {difference}"):
            written(models, policy, **settings)
    written(models, policy, do_sample=True)
    assert not [warning for warning in recwarn if "certificate" in str(warning.message)]


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_a_drafter_beside_a_target_in_another_precision(recwarn):
    """It is what its files hold, before and after its copy drafted."""
    models, drafter = hla.demo.load(dtype=torch.bfloat16), hla.demo.drafter()
    hla.enable(models.target)
    writer = TextWriter(models.target, models.tokenizer, DecodingSettings())
    facts = describe_comparison(writer, drafter, [], ["a"], "demo", [1])
    assert (facts["target_dtype"], facts["draft_dtype"]) == ("bfloat16", "float16")
    policy = replace(POLICY, certificate=certify(models, drafter))
    for _ in range(2):
        written(models, policy, assistant_model=drafter, do_sample=False)
        assert facts["draft_weights"] == weights_hash(drafter)
    assert not [warning for warning in recwarn if "certificate" in str(warning.message)]


def test_a_fingerprint_is_of_what_a_head_says_and_not_of_where_it_lies(tmp_path):
    head = hla.demo.head()
    first = hla.sprinter(head)
    first.save_pretrained(tmp_path / "policy")
    assert compute_fingerprint(hla.LossyPolicy.from_pretrained(tmp_path / "policy")) == compute_fingerprint(first)
    before = compute_fingerprint(first)
    with torch.no_grad():
        next(head.parameters()).add_(1)
    assert compute_fingerprint(first) != before
