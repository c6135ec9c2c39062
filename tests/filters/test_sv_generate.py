"""SV inside `generate`: greedy text is the target's own, and a companion is asked once a round, or never if it does not pay.

What samples are distributed by is enumerated: test_verification.py, and rules/test_lossless_registry.py through the engine.
"""

import warnings

import numpy as np
import pytest
import torch
from support import tiny
from support.sv_models import bins, steep

import hf_lossy_assist as hla


@pytest.fixture(scope="module")
def models():
    found = hla.demo.load()
    hla.enable(found.target)
    return found


@pytest.mark.filterwarnings("ignore:.*this policy is lossy")  # the paper's form is, but not in greedy decoding
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("llama", "full"), pytest.param("gemma3", "prefix", marks=pytest.mark.full),
        pytest.param("gpt2", "off", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_greedy_text_is_the_targets(name, exact):
    target = tiny.shared(name)
    draft, companion = tiny.draft_of(target, "often"), tiny.draft_of(target, "rarely")
    for lengths in ((7,), (3, 9, 5, 5)):
        inputs = tiny.prompts(lengths)
        made = steep(target, draft, companion, bins(np.random.default_rng(0)), batch=len(lengths))
        out = tiny.assisted(target, inputs, draft, hla.SpeculativeVerification(made, companion, 5, exact))
        assert torch.equal(out.sequences, tiny.greedy(target, inputs))
        total, forwards = out.speculation.total(), out.speculation.forwards
        assert total.num_dropped_tokens > 0 and total.num_draft_tokens > 0
        assert forwards["companion"] <= forwards["target"]


def test_where_it_does_not_pay_it_is_strict_acceptance(models):
    inputs = models.tokenizer([p.prompt for p in hla.demo.problems(3, 5)], return_tensors="pt", padding=True)
    made = steep(models.target, models.draft, models.companion, bins(np.random.default_rng(0)), pays=0.9)
    texts = []
    for policy in (hla.SpeculativeVerification(made, models.companion, 5), hla.LossyPolicy(stop=hla.Constant(5))):
        torch.manual_seed(7)
        out = models.target.generate(
            **inputs, assistant_model=models.draft, lossy_policy=policy, max_new_tokens=24, do_sample=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert not out.speculation.forwards.get("companion") and out.speculation.total().num_dropped_tokens == 0
        texts.append(out.sequences)
    assert torch.equal(*texts)


@pytest.mark.full
def test_a_companion_by_name_is_loaded_once_and_a_policy_goes_through_files(models, tmp_path):
    models.companion.save_pretrained(tmp_path / "companion")
    by_name = str(tmp_path / "companion")
    inputs = models.tokenizer([p.prompt for p in hla.demo.problems(3, 5)], return_tensors="pt", padding=True)
    made = steep(models.target, models.draft, models.companion, bins(np.random.default_rng(0)), batch=3)
    hla.SpeculativeVerification(made, by_name, 5).save_pretrained(tmp_path / "policy")
    loaded = hla.LossyPolicy.from_pretrained(tmp_path / "policy", companion=by_name)
    assert loaded.to_dict()["filter"]["companion"] == by_name
    texts = []
    for policy in (loaded, loaded, hla.SpeculativeVerification(made, models.companion, 5)):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*may differ")  # another name for the same companion
            out = models.target.generate(**inputs, assistant_model=models.draft, lossy_policy=policy, max_new_tokens=24, do_sample=False)  # fmt: skip
        texts.append(out)
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
