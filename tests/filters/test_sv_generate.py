"""SV inside `generate`: greedy text is the target's own, samples have the target's law (χ², tiny models and the demo's), the paper's own
form has not, and the companion is asked once a round or, where it does not pay, never."""

import warnings

import numpy as np
import pytest
import torch
from support import tiny
from support.distributions import CALLS, REJECT, goodness, pair, sample, target_law
from support.sv_models import bins, steep

import hf_lossy_assist as hla
from hf_lossy_assist.artifacts.profile_tables import Bins


@pytest.fixture(scope="module")
def models():
    found = hla.demo.load()
    hla.enable(found.target)
    return found


@pytest.mark.nightly(every=3)
@pytest.mark.full(every=9)
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")  # the paper's form is, but not in greedy decoding
@pytest.mark.parametrize("exact", ["full", "prefix", "off"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
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


def exactly(exact: str, cost: float = 0.3):
    """The policy of the χ² tests: a companion that differs from the draft, and cells that drop some tokens and keep others."""
    target, draft = pair()
    companion = tiny.noisy(target, 0.6, seed=4)
    accept = np.array([[0.05, 0.3, 0.6], [0.1, 0.5, 0.95]])
    cells = Bins(np.array([0.6], np.float32), np.array([[0.3, 0.8], [0.4, 0.9]], np.float32), accept, accept.mean(axis=1),
                 np.ones((2, 3), dtype=np.int64))  # fmt: skip
    made = steep(target, draft, companion, cells, cost)
    return hla.SpeculativeVerification(made, companion, 2, exact)


@pytest.mark.full
@pytest.mark.nightly(every=6)
@pytest.mark.parametrize("exact", ["full", "prefix"])
def test_samples_have_the_targets_law(exact):
    torch.manual_seed(0)
    assert goodness(sample(exactly(exact), {}, CALLS // 2), target_law(())) > REJECT


@pytest.mark.full
def test_samples_of_the_papers_form_have_another_law():
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="lossy"):
        counts = sample(exactly("off"), {}, CALLS // 2)
    assert goodness(counts, target_law(())) < REJECT


@pytest.mark.nightly
@pytest.mark.parametrize("exact", ["full", "prefix"])
def test_demo_samples_have_the_targets_law(models, exact):
    """Two tokens at temperature 2, where the demo's target is unsure enough: the first, and the second behind its likeliest first.

    Behind the last words of a prompt: every sample pays for its own copy.
    """
    tokenized = models.tokenizer([hla.demo.problems(1, 5)[0].prompt], return_tensors="pt")
    prompt = {name: x[:, -8:] for name, x in tokenized.items()}
    made = steep(models.target, models.draft, models.companion, bins(np.random.default_rng(3)), batch=800)
    policy = hla.SpeculativeVerification(made, models.companion, 3, exact)
    torch.manual_seed(0)
    new, dropped = [], 0
    for _ in range(3):
        out = models.target.generate(
            **prompt, assistant_model=models.draft, lossy_policy=policy, do_sample=True, temperature=2.0, top_k=0,
            num_return_sequences=800, max_new_tokens=3, return_dict_in_generate=True,
        )  # fmt: skip
        new.append(out.sequences[:, prompt["input_ids"].shape[1] :][:, :2])
        dropped += out.speculation.total().num_dropped_tokens
    drawn, ids = torch.cat(new), prompt["input_ids"]
    assert dropped > 0
    for place in range(2):
        with torch.no_grad():
            law = (models.target(ids).logits[0, -1].double() / 2.0).softmax(-1)
        counts = torch.bincount(drawn[:, place], minlength=law.shape[0])
        assert goodness(counts, law) > REJECT
        likeliest = law.argmax()
        drawn, ids = drawn[drawn[:, place] == likeliest], torch.cat([ids, likeliest[None, None]], dim=1)
    assert len(drawn) > 100, "the second test had too few samples to mean anything"


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


def test_an_int8_companion(models):
    from hf_lossy_assist.models.packed_linears import int8

    small = int8(models.draft)
    ids = models.tokenizer([p.prompt for p in hla.demo.problems(2, 5)], return_tensors="pt", padding=True)
    with torch.no_grad():
        far = (small(**ids).logits.softmax(-1) - models.draft(**ids).logits.softmax(-1)).abs().sum(-1)
    assert 0 < far[ids["attention_mask"].bool()].mean() < 0.2
    made = steep(models.target, models.draft, small, bins(np.random.default_rng(0)), batch=2)
    out = models.target.generate(
        **ids, assistant_model=models.draft, lossy_policy=hla.SpeculativeVerification(made, small, 5), max_new_tokens=24,
        do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.speculation.forwards["companion"] > 0
    assert torch.equal(
        out.sequences, type(models.target).generate(models.target, **ids, max_new_tokens=24, do_sample=False)
    )
