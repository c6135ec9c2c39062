"""`calibrate_svip`: its mathematics on numbers worked out by hand, its replay against brute force and against the engine."""

import copy
import json
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refused
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist.methods.svip.calibrate import calibrate_svip
from hf_lossy_assist.methods.svip.calibration_report import (
    ENTROPY_FLOOR,
    choose_c,
    compute_bounds,
    fit_gamma,
    measure_reliability,
    replay,
)


VOCAB = 40


@torch.no_grad()
def llama(seed=0, vocab=VOCAB, eos=None, **config):
    """A random Llama whose texts vary and whose entropies are spread out."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    special = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": eos}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=vocab, max_position_embeddings=128, **sizes, **special | config)
    ).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(3.0)
    model.lm_head.weight.mul_(5.0)
    return model


@torch.no_grad()
def near(model, noise=0.1):
    """A copy that often agrees with `model`."""
    torch.manual_seed(7)
    out = copy.deepcopy(model)
    for weight in out.parameters():
        if weight.dim() > 1:
            weight.add_(noise * weight.std() * torch.randn_like(weight))
    return out


@pytest.fixture(scope="module")
def target():
    return llama(eos=3)


@pytest.fixture(scope="module")
def draft(target):
    return near(target)


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(4, VOCAB, (n,), generator=generator) for n in (3, 9, 5, 7, 4, 6)]


def calibrate(target, draft, prompts, **settings):
    return calibrate_svip(
        target, draft, prompts, **{"max_new_tokens": 24, "batch_size": 4, "cost_ratio": 0.2} | settings
    )


# ---------------------------------------------------------------------------------------------------------------------
# the mathematics


def test_bounds_on_numbers_worked_out_by_hand():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.25, 0.5]])
    found = {name: x.item() for name, x in compute_bounds(p.log(), q.log()).items()}
    assert found["entropy"] == pytest.approx(1.5 * math.log(2), abs=1e-6)
    assert found["cross_entropy"] == pytest.approx(1.75 * math.log(2), abs=1e-6)  # ¼·1 + ¼·2 + ½·2 bits
    assert found["kl"] == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert found["beta"] == pytest.approx(0.75, abs=1e-6)
    assert found["pinsker"] == pytest.approx(1 - math.sqrt(0.125 * math.log(2)), abs=1e-6)
    assert found["bretagnolle_huber"] == pytest.approx(1 - math.sqrt(1 - 2**-0.25), abs=1e-6)
    assert found["gamma"] == pytest.approx(7 / 6, abs=1e-6)
    assert found["match"] is False


def test_two_sure_models_that_disagree():
    found = compute_bounds(torch.tensor([[0.0, -math.inf]]), torch.tensor([[-math.inf, 0.0]]))
    assert all(bool(x.isfinite().all()) for name, x in found.items() if name != "gamma")
    assert found["entropy"] < ENTROPY_FLOOR and found["gamma"].isnan()
    assert found["beta"].item() == pytest.approx(0) and found["bretagnolle_huber"].item() == pytest.approx(0)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 30), st.floats(0.01, 60), st.sampled_from([1e-9, 1e-5, 0.01, 1.0]))
def test_pinsker_and_bretagnolle_huber_hold_for_all_laws(seed, vocab, scale, distance):
    generator = torch.Generator().manual_seed(seed)
    p, noise = (torch.randn(20, vocab, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    found = compute_bounds(p, p + distance * noise)
    assert (found["beta"] + 1e-9 >= found["pinsker"]).all()
    assert (found["beta"] + 1e-9 >= found["bretagnolle_huber"]).all()
    assert (found["gamma"].nan_to_num(1.0) >= 1).all() and (found["kl"] >= 0).all()
    plain = (found["entropy"] + found["kl"] - found["cross_entropy"]).abs()
    assert (plain < 1e-9).all() and (found["beta"] <= 1 + 1e-9).all()


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60), st.floats(0.01, 0.99))
def test_the_chosen_c_covers_and_no_smaller_one_does(gammas, coverage):
    gamma = torch.tensor(gammas, dtype=torch.float64)
    c = choose_c(gamma, coverage)
    assert (gamma <= 2 * c + 1).double().mean() >= coverage - 1e-9
    assert c == 0 or (gamma < 2 * c + 1).double().mean() < coverage


def test_the_gamma_fit_recovers_what_made_the_data():
    torch.manual_seed(0)
    shape, rate = 1.7, 4.0
    gamma = 1 + torch.distributions.Gamma(shape, rate).sample((20_000,)).double()
    fit = fit_gamma(gamma)
    assert fit == pytest.approx((shape, rate), rel=0.05)

    # 2 · Gamma(1, 2) of shape 1 is exponential, so Eq. 9 is 1 − e^(−rate·2c).
    found = {"gamma": gamma, "entropy": gamma * 0, "beta": gamma * 0 + 1}
    row = measure_reliability(0.25, found, (1.0, 2.0))
    assert row["gamma"] == pytest.approx(1 - math.exp(-2 * 2 * 0.25))
    middle = measure_reliability((float(gamma.mean()) - 1) / 2, found, fit)
    assert middle["gaussian"] == pytest.approx(0.5)
    assert middle["gamma"] == pytest.approx(middle["empirical"], abs=0.02)


def test_no_gamma_law_is_claimed_where_none_fits():
    assert fit_gamma(torch.ones(50, dtype=torch.float64)) is None
    assert fit_gamma(torch.full((50,), 1.5, dtype=torch.float64)) is None


# ---------------------------------------------------------------------------------------------------------------------
# the replay


def brute_force(stops, accept, longest):
    """(calls, drafted, accepted) of one text by following every outcome of every round."""
    width = len(accept)

    def go(start):
        if start >= width:
            return torch.zeros(3, dtype=torch.float64)
        end = start
        while not stops[end] and end + 1 < width and end + 1 - start < longest:
            end += 1
        drafted, total, reached = end + 1 - start, torch.tensor([1.0, end + 1 - start, 0], dtype=torch.float64), 1.0
        for n in range(drafted):
            total += reached * (1 - accept[start + n]) * (go(start + n + 1) + torch.tensor([0, 0, n]))
            reached *= accept[start + n]
        return total + reached * (go(start + drafted + 1) + torch.tensor([0, 0, drafted]))

    return go(0)


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.integers(1, 5), st.booleans())
def test_the_replay_is_the_expectation_over_every_outcome(seed, longest, sure):
    generator = torch.Generator().manual_seed(seed)
    accept = torch.rand(3, 9, generator=generator, dtype=torch.float64)
    accept = accept.round() if sure else accept
    stops, lengths = torch.rand(3, 9, generator=generator) < 0.3, (9, 4, 1)
    valid = torch.arange(9) < torch.tensor(lengths)[:, None]
    expected = sum(brute_force(stops[i, :n].tolist(), accept[i, :n].tolist(), longest) for i, n in enumerate(lengths))
    assert replay(stops, accept, valid, longest) == pytest.approx(tuple(expected.tolist()))


@pytest.mark.full(every=6)
@pytest.mark.parametrize("max_draft", [3, 40])
def test_the_replay_counts_the_rounds_of_the_engine(target, draft, prompts, max_draft):
    found = calibrate(target, draft, prompts, thresholds=[0.2, 0.35, 0.5], max_draft=max_draft)
    model = hla.enable(copy.deepcopy(target))
    for row in found.grid:
        stop, rounds = hla.SVIP(row["h"], max_draft=max_draft), 0
        for prompt in prompts:
            out = model.generate(
                prompt[None], assistant_model=draft, lossy_policy=stop, max_new_tokens=24, do_sample=False,
                return_dict_in_generate=True,
            )  # fmt: skip
            rounds += out.speculation.total().num_spec_steps
        assert found.positions / row["tokens_per_call"] == pytest.approx(rounds)


# ---------------------------------------------------------------------------------------------------------------------
# the whole


@pytest.mark.nightly(every=2)
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True}, {"do_sample": True, "temperature": 0.6}])
@pytest.mark.parametrize("form", ["bound", "entropy"])
def test_calibration_of_tiny_models(target, draft, prompts, sampling, form):
    found = calibrate(target, draft, prompts, form=form, **sampling)
    assert found.texts == len(prompts) and 20 <= found.positions <= 24 * len(prompts)
    assert found.holds == {"pinsker": 1.0, "bretagnolle_huber": 1.0}
    assert found.means["cross_entropy"] == pytest.approx(found.means["entropy"] + found.means["kl"])
    assert found.reliability[0]["c"] == found.c and found.reliability[0]["empirical"] >= 0.9
    assert found.reliability[1]["c"] == 0.15
    assert found.best["speed"] == max(row["speed"] for row in found.grid)
    assert found.stop == hla.SVIP(found.best["h"], form=form)

    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert hla.LossyPolicy.from_dict({"stop": read["stop"]}).stop == found.stop
    assert "best h" in str(found) and max(map(len, str(found).splitlines())) <= 120

    model, inputs = hla.enable(copy.deepcopy(target)), {"max_new_tokens": 12, "do_sample": False}
    out = model.generate(prompts[1][None], **inputs, assistant_model=draft, lossy_policy=found.stop)
    assert torch.equal(out, target.generate(prompts[1][None], **inputs))


def test_a_draft_that_is_the_target(target, prompts):
    found = calibrate(target, target, prompts, cost_ratio=None)
    assert found.means["kl"] == 0 and found.c == 0 and found.gamma_fit is None and found.cost_ratio > 0
    assert found.means["beta"] == pytest.approx(1) and found.means["match"] == 1
    assert found.no_excess == found.positions - found.left_out
    assert all(row["acceptance_rate"] == pytest.approx(1) for row in (*found.grid, found.constant))
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.full
def test_batches_padding_and_kinds_of_prompts_do_not_matter(target, draft, prompts):
    def tokenizer(text):
        return {"input_ids": [int(word) for word in text.split()]}

    texts = [" ".join(map(str, prompt.tolist())) for prompt in prompts]
    one = calibrate(target, draft, prompts, batch_size=1)
    for other in (
        calibrate(target, draft, [prompt[None].int() for prompt in prompts], batch_size=6),
        calibrate(target, draft, texts, tokenizer=tokenizer),
    ):
        assert other.positions == one.positions and other.means == pytest.approx(one.means, rel=1e-4)
        assert other.best["speed"] == pytest.approx(one.best["speed"])


@pytest.mark.full
def test_texts_follow_the_raw_law_whatever_the_generation_config_says(target, draft, prompts):
    warped = copy.deepcopy(target)
    warped.generation_config.update(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=3.0
    )
    for sampling in ({}, {"do_sample": True}):
        state = torch.get_rng_state()
        found = calibrate(warped, draft, prompts, **sampling)
        assert torch.equal(torch.get_rng_state(), state)
        assert found.to_dict() == calibrate(target, draft, prompts, **sampling).to_dict()
    assert warped.generation_config.top_k == 1


def test_a_sampled_text_came_from_the_draft_as_often_as_beta_says(target, draft, prompts):
    found = calibrate(target, draft, prompts * 8, do_sample=True, thresholds=[0.0], max_draft=1)
    # One drafted token a round: the acceptance rate is the mean of β over round starts, which are every position or second one.
    assert found.best["acceptance_rate"] == pytest.approx(found.means["beta"], abs=0.03)


@torch.no_grad()
def test_temperature_enters_the_replay_as_if_it_were_in_the_weights(target, draft, prompts):
    cooled = [copy.deepcopy(model) for model in (target, draft)]
    for model in cooled:
        model.lm_head.weight.div_(0.6)
    settings = {"do_sample": True, "thresholds": [math.inf]}  # one that no entropy passes, so entropies play no part

    def figures(*models, **others):
        best = calibrate(*models, prompts, **settings, **others).best
        return [best[name] for name in ("draft_length", "acceptance_rate", "tokens_per_call", "speed")]

    found = figures(target, draft, temperature=0.6)
    assert found == pytest.approx(figures(*cooled), rel=1e-4)
    assert found != pytest.approx(figures(target, draft), rel=1e-2)


def test_learned_positions_start_behind_the_padding(prompts):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(5.0)
    one, six = (calibrate(model, near(model), prompts, batch_size=size) for size in (1, 6))
    assert one.means["match"] < 1 and six.means == pytest.approx(one.means, rel=1e-4)


def test_vocabularies_that_differ_by_padding(target, prompts):
    found = calibrate(llama(vocab=100), llama(seed=5, vocab=101), prompts)
    assert 0 < found.means["beta"] < 1 and found.holds["pinsker"] == 1


@pytest.mark.parametrize(
    ("change", "error", "line"),
    [
        ({"prompts": []}, ValueError, "prompts: expected at least one, got none"),
        ({"prompts": "one text"}, TypeError, "expected a list .* got str"),
        ({"prompts": ["a text"]}, TypeError, r"prompts\[0\] is a text: pass tokenizer="),
        ({"prompts": [torch.tensor([], dtype=torch.int64)]}, ValueError, r"prompts\[0\]: expected at least 1 token"),
        ({"prompts": [torch.ones(2, 3, dtype=torch.int64)]}, ValueError, r"got \(2, 3\)"),
        ({"prompts": [torch.ones(3)]}, TypeError, "got torch.float32"),
        ({"prompts": [torch.tensor([VOCAB])]}, ValueError, f"from 0 to {VOCAB - 1}"),
        ({"draft": "gpt2"}, TypeError, "draft: expected a loaded Transformers model, got str"),
        ({"draft": llama(vocab=60)}, ValueError, f"{VOCAB} token ids, the draft 60"),
        ({"draft": llama(pard_token=2)}, ValueError, "draft: a model with a pard_token .*: delete it"),
        ({"coverage": 1.0}, ValueError, "coverage: expected a number above 0 and below 1, got 1.0"),
        ({"coverage": 0}, ValueError, "coverage"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"c": math.inf}, ValueError, "c: expected"),
        ({"cost_ratio": -1}, ValueError, "cost_ratio"),
        ({"thresholds": [0.1, -2.0]}, ValueError, "thresholds"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"batch_size": 1.5}, TypeError, "batch_size"),
        ({"form": "both"}, ValueError, "SVIP.form"),
        ({"max_draft": 0}, ValueError, "SVIP.max_draft"),
        ({"max_new_tokens": 3}, ValueError, "too few: 20 are needed"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(target, draft, prompts, change, error, line):
    arguments = {"target": target, "draft": draft, "prompts": prompts} | change
    with pytest.raises(error, match=line) as raised:
        calibrate(**arguments)
    assert "\n" not in str(raised.value)


@torch.no_grad()
def test_broken_logits_are_named(target, prompts):
    broken = copy.deepcopy(target)
    broken.lm_head.weight[5] = math.nan
    refused(lambda: calibrate(target, broken, prompts), r"NaN logits on the text of prompts\[0\]")


def test_without_scipy_the_way_out_is_named(target, draft, prompts, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"calibrate_svip needs scipy: pip install 'hf_lossy_assist\[train\]'"):
        calibrate(target, draft, prompts)
