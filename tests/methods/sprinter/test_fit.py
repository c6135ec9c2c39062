"""Proves that fitting a verifier finds a distribution that is known, that its figures are what they are called, and that a head's folder is whole."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from support.collecting import H, drawn, models, write
from support.hub_server import card_problems
from support.refusals import names, refused

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, Head, HeadConfig, LinearHead, MLPHead, SpecDecPP, demo
from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.methods.sprinter.fit import (
    THRESHOLDS,
    VerifierReport,
    compute_labels,
    fit_head,
    fit_specdec,
    fit_sprinter,
    measure,
)
from hf_lossy_assist.training.head_training import HeadFitSettings, split_prompts
from hf_lossy_assist.training.verifier_dataset import KINDS, REPLACED, VerifierDataset, label_acceptable, read_dataset


W = torch.tensor([1.5, -1.0, 0.5, 0.0, 2.0, -0.5])
BIAS = 1.0
QUICK, MLP = HeadFitSettings(learning_rate=0.01), HeadFitSettings("mlp", 8, learning_rate=0.01)
SCALE = torch.tensor([0.1, 1.0, 5.0, 20.0, 0.5, 1.0])  # features of very different spread, far from 0


def table(prompts: int = 100, each: int = 10, seed: int = 0) -> VerifierDataset:
    given = drawn(KINDS, prompts, each, lambda x: x @ W + BIAS, seed, temperature=0.8, top_k=7)
    given.features = given.features * SCALE + 3 * SCALE
    return given


def bayes(part: VerifierDataset, lam: float) -> torch.Tensor:
    """P(acceptable) of each record."""
    return ((part.features - 3 * SCALE) / SCALE @ W + BIAS + np.log(lam)).sigmoid()


def held_out_part(given: VerifierDataset, seed: int = 0) -> VerifierDataset:
    return given.of(split_prompts(given.prompt, seed)["test"])


def brier(v: torch.Tensor, y: torch.Tensor) -> float:
    return float((v.double() - y.double()).square().mean())


# -- SPRINTER's labels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "balance"), [("linear", True), pytest.param("mlp", False, marks=pytest.mark.full)])
def test_a_known_distribution_is_found(kind, balance):
    given = table()
    head, report = fit_head(given, 1.2, HeadFitSettings(kind=kind, balance=balance, learning_rate=0.01))
    part = held_out_part(given)
    best, y = bayes(part, 1.2), label_acceptable(part.p, part.q, 1.2)
    with torch.no_grad():
        v = head(part.features)
    assert isinstance(head, {"linear": LinearHead, "mlp": MLPHead}[kind]) and not head.training
    assert report.auroc > roc_auc_score(y, best) - 0.01 and report.auroc > 0.85
    assert report.brier < brier(best, y) + 0.006
    assert (v - best).abs().mean() < 0.04 and abs(float(v.mean()) - float(y.float().mean())) < 0.03


@pytest.mark.nightly
def test_balancing_goes_with_kinds_of_unequal_size():
    """Kinds weigh the same in all; so the intercept must move back by the labels' weights, not by their counts."""
    given = table(prompts=200, each=12)
    given.q[given.kind == 0] *= 0.05  # one kind is nearly always acceptable
    given = given.of((given.kind == 0) | (given.position < 2))  # and is most of the records
    noise = torch.randn(len(given), generator=torch.Generator().manual_seed(1))
    given.features[:, 0] = 3 * SCALE[0] + noise * SCALE[0]
    x = held_out_part(given).features
    balanced, plain = (fit_head(given, 1.2, HeadFitSettings(balance=b))[0](x).mean().item() for b in (True, False))
    assert balanced == pytest.approx(plain, abs=0.03)


@pytest.mark.parametrize("count", [8, 13, 101])
def test_a_split_shares_no_prompt(count):
    prompt = torch.arange(count).repeat_interleave(5)[torch.randperm(5 * count)] * 3
    first, again, *others = (torch.stack(list(split_prompts(prompt, seed).values())) for seed in (0, 0, 1, 2, 3, 4, 5))
    assert first.sum(dim=0).tolist() == [1] * len(prompt)
    parts = [set(prompt[part].tolist()) for part in first]
    assert sum(map(len, parts)) == count == len(set.union(*parts)) and all(parts)
    assert len(parts[0]) == pytest.approx(0.7 * count, abs=1) and len(parts[2]) == pytest.approx(0.15 * count, abs=1)
    assert torch.equal(first, again) and not all(torch.equal(first, other) for other in others)


@pytest.mark.full
def test_a_seed_names_a_head():
    small = table(prompts=24, each=4)
    state = torch.random.get_rng_state()
    one, two, other = (fit_head(small, 1.2, HeadFitSettings("mlp", max_epochs=9, seed=seed))[0] for seed in (3, 3, 4))
    assert one.digest == two.digest != other.digest and torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.full
def test_early_stopping_keeps_the_best_epoch():
    """A wide network learns few records by heart: its validation loss falls and rises, and the lowest must stay."""
    small = table(prompts=40, each=2, seed=3)
    valid = split_prompts(small.prompt, 0)["early stopping"]
    x, y = small.features[valid], label_acceptable(small.p, small.q, 1.2)[valid].float()

    def fit(epochs, patience=100):
        settings = HeadFitSettings("mlp", balance=False, learning_rate=0.05, batch_size=32, max_epochs=epochs, patience=patience)  # fmt: skip
        return fit_head(small, 1.2, settings)[0]

    heads = [fit(epochs) for epochs in range(1, 13)]
    losses = [torch.nn.functional.binary_cross_entropy(head(x), y).item() for head in heads]
    digests = [head.digest for head in heads]
    assert all(after <= before + 1e-5 for before, after in zip(losses, losses[1:], strict=False))
    assert digests[-1] == digests[-2] == digests[-3], "the last epochs should not have been better"
    assert len(set(digests)) > 1, "the first epoch should not have been the best"
    worse = next(i for i, (a, b) in enumerate(zip(digests, digests[1:], strict=False)) if a == b)
    assert fit(50).digest == digests[-1]
    assert fit(50, patience=1).digest == digests[worse], "patience 1 ends at the first epoch that is no better"


@pytest.mark.full
def test_figures_are_what_they_are_called():
    small = table(prompts=60, each=5)
    head, report = fit_head(small, 0.7, QUICK)
    part = held_out_part(small)
    with torch.no_grad():
        v = head(part.features)
    y = part.q <= 0.7 * part.p
    assert report.lam == 0.7 and report.auroc == pytest.approx(roc_auc_score(y, v), abs=1e-9)
    assert report.brier == pytest.approx(brier(v, y), abs=1e-7)
    assert report.acceptance == pytest.approx(float(y.double().mean()))
    thresholds = [row["threshold"] for row in report.thresholds]
    assert thresholds == list(THRESHOLDS) == [round(0.05 * i, 2) for i in range(1, 20)]
    for row in report.thresholds:
        says = v.numpy() >= np.float32(row["threshold"])
        assert row["eta_tp"] == pytest.approx(says[y.numpy()].mean(), abs=1e-6)
        assert row["eta_fp"] == pytest.approx(says[~y.numpy()].mean(), abs=1e-6)
    assert report.row_at(0.5) == report.row_at(0.51) == report.thresholds[9]


# -- SpecDec++'s labels -----------------------------------------------------------------------------------------------


TOKEN = FeatureSpec(position="token")


def accepted_table(prompts: int = 100, each: int = 40) -> VerifierDataset:
    """Records that are accepted with probability sigmoid(2·x_0 + 1)."""
    given = drawn([REPLACED], prompts, each, lambda x: 2 * x[:, 0] + 1)
    given.q = 0.01 + 0.99 * given.distance
    given.p, given.features = given.q * (2 * given.features[:, 0] + 1).sigmoid(), 5 * given.features - 7
    return given


def test_the_head_says_the_acceptance_probability():
    """Also where a refusal weighs more: that loss is smallest at the odds y/((1 − y)·w), and the intercept brings them back."""
    given = accepted_table()
    head, report = fit_head(given, None, QUICK)
    y = compute_labels(given)
    assert (head(given.features) - y).abs().max() < 0.03 and report.kl < 1e-3
    assert report.acceptance == pytest.approx(float(y[split_prompts(given.prompt, 0)["test"]].mean()))
    assert (head.config.method, head.config.polarity, head.config.features) == ("specdec", "acceptable", TOKEN)
    weighted, _ = fit_head(given, None, QUICK, 6.0)
    middle = (y > 0.05) & (y < 0.95)
    assert (weighted.logit(given.features) - y.logit()).abs()[middle].max() < 0.25


def test_figures_by_hand():
    """A coin of y = .25 where the head says .8, and one of y = 1 where it says .5."""
    given = accepted_table(8, 2)
    given.p[:3], given.q[:3] = torch.tensor([0.1, 0.4, 0.0]), torch.tensor([0.4, 0.1, 0.5])
    assert compute_labels(given)[:3].tolist() == pytest.approx([0.25, 1.0, 0.0])
    given = given.of(torch.arange(16) < 2)
    given.features[:, 0] = torch.tensor([0.8, 0.5]).logit()
    given.p, given.q = torch.tensor([0.25, 1.0]), torch.ones(2)
    head = LinearHead(HeadConfig(H, features=TOKEN, draft=ModelIdentity("me", None, "llama", H, 1, 1))).eval()
    with torch.no_grad():  # its logit is the first number
        head.linear.weight.copy_(torch.eye(1, H))
        head.linear.bias.zero_()
    report = measure(head, given)
    assert report.brier == pytest.approx((0.25 * 0.04 + 0.75 * 0.64 + 1.0 * 0.25) / 2, abs=1e-6)
    first = 0.25 * math.log(0.25 / 0.8) + 0.75 * math.log(0.75 / 0.2)
    assert report.kl == pytest.approx((first + math.log(2)) / 2, abs=1e-6)
    assert report.acceptance == 0.625 and report.thresholds == []
    coins = [(1, 0.8)] + [(0, 0.8)] * 3 + [(1, 0.5)] * 4  # the same two as coins that have fallen
    assert report.auroc == pytest.approx(roc_auc_score(*zip(*coins, strict=True)))


# -- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(table(prompts=40, each=5), tmp_path_factory.mktemp("data") / "set")


def test_a_dataset_comes_back_as_it_was(data):
    given, back = table(prompts=40, each=5), read_dataset(data)
    for name in ("features", "p", "q", "distance", "prompt", "kind", "position"):
        assert torch.equal(getattr(given, name), getattr(back, name)), name
    assert (back.kinds, back.facts) == (given.kinds, given.facts)


@pytest.mark.full
def test_a_heads_folder_is_whole(data, tmp_path):
    collected = write(accepted_table(40, 25), tmp_path / "data")
    for name, (head, report), words in (
        ("sprinter", fit_sprinter(data, tmp_path / "deep" / "sprinter", settings=MLP), ["org/draft"]),
        ("specdec", fit_specdec(collected, tmp_path / "deep" / "specdec", MLP, weight=3.0),
         ["Lossless", 'lossy_policy="specdec", head=head']),
    ):  # fmt: skip
        folder, report = tmp_path / "deep" / name, report[0] if name == "sprinter" else report
        assert names(folder) == {"README.md", "config.json", "model.safetensors"}
        back, card = Head.from_pretrained(folder), (folder / "README.md").read_text()
        assert back.digest == head.digest and back.config == head.config and type(back) is type(head) is MLPHead
        assert head.source == str(folder) and back.config.metrics["kl"] == report.kl
        assert card_problems(card) == ([], []) and f"| auroc | {report.auroc:.4g} |" in card
        assert all(part in card for part in words) and ("**Lossy.**" in card) == (name == "sprinter")
        assert not [p for p in folder.iterdir() if str(tmp_path).encode() in p.read_bytes()]
    assert names(tmp_path / "deep") == {"sprinter", "specdec"}
    assert head.config.training["prefixes"].startswith("the draft's text with 15%")
    assert "weighs 3, intercept moved back" in head.config.training["loss"] and SpecDecPP(head).head is head


@pytest.mark.full
def test_what_a_head_records(data, tmp_path):
    head, _ = fit_sprinter(data, tmp_path / "head", settings=HeadFitSettings(learning_rate=0.01, seed=2))
    config = head.config
    assert config.decoding == {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 1.0}
    assert (config.method, config.polarity, config.hidden_size) == ("sprinter", "acceptable", H)
    assert config.label == "q(x) ≤ 1.2·p(x)" and config.lam == 1.2 and config.training["seed"] == 2
    assert (config.target.id, config.draft.id, config.tokenizer_hash) == ("org/target", "org/draft", "0" * 64)
    sizes = [int(part.sum()) for part in split_prompts(read_dataset(data).prompt, 2).values()]
    parts = "{} for training, {} for early stopping, {} for the figures".format(*sizes)
    assert config.training["tokens"].startswith(parts) and hla.Sprinter(head)


@pytest.mark.nightly
def test_of_several_lambdas_the_datas_is_used(data, tmp_path):
    head, reports = fit_sprinter(data, tmp_path / "1", [0.5, 1.2, 3.0])
    alone, (expected,) = fit_sprinter(data, tmp_path / "2")
    assert [r.lam for r in reports] == [0.5, 1.2, 3.0] and all(isinstance(r, VerifierReport) for r in reports)
    assert head.digest == alone.digest and reports[1] == expected
    assert reports[0].acceptance < reports[1].acceptance < reports[2].acceptance
    metrics = Head.from_pretrained(tmp_path / "1").config.metrics
    assert metrics["auroc"] == expected.auroc and metrics["auroc_lambda_0.5"] == reports[0].auroc
    assert metrics["auroc_lambda_3"] == reports[2].auroc and "auroc_lambda_1.2" not in metrics
    other, (first, _) = fit_sprinter(data, tmp_path / "3", [3.0, 0.5])
    assert other.config.lam == 3.0 and other.config.metrics["auroc"] == first.auroc


def test_what_cannot_be_fitted_leaves_nothing_behind(tmp_path):
    """Values that are no numbers, too: q ≤ λ·p is False of a NaN, and would be a label without a word."""
    whole, one_label, one_sided, nan, infinite = (table(prompts=20, each=2) for _ in range(5))
    one_label.q = one_label.p.clone()
    held_out = split_prompts(one_sided.prompt, 0)["test"]
    one_sided.q[held_out] = one_sided.p[held_out]
    nan.q[7], infinite.features[7] = math.nan, math.inf
    never, always = accepted_table(10, 2), accepted_table(10, 2)
    never.p, always.p = 0 * never.q, always.q
    specdec, out = (lambda folder, out, _: fit_specdec(folder, out)), tmp_path / "deep" / "head"
    for number, (fit, given, lambdas, says) in enumerate((
        (fit_sprinter, one_label, [], "only one label"), (fit_sprinter, one_sided, [], "only one label"),
        (fit_sprinter, table(prompts=7, each=2), [], "7 prompts; at least 8"), (fit_sprinter, whole, [-1.0], "--lambda"),
        (fit_sprinter, whole, [1.2, 1e9], "only one label"), (fit_sprinter, nan, [], "data5 .*q has values that are NaN"),
        (fit_sprinter, infinite, [], "features has values that are NaN or infinite"),
        (specdec, never, [], "only one label"), (specdec, always, [], "only one label"),
        (fit_sprinter, never, [], "fit specdec. Collect again with --for sprinter"),
        (specdec, whole, [], "fit sprinter. Collect again with --for specdec"),
    )):  # fmt: skip
        refused(partial(fit, write(given, tmp_path / f"data{number}"), out, lambdas), says)
    refused(lambda: fit_head(accepted_table(10, 2), None, weight=0), "--weight")
    assert not list(tmp_path.glob("deep/*"))


def test_what_is_there_is_not_overwritten_and_what_is_no_dataset_is_refused(data, tmp_path):
    (tmp_path / "head").mkdir()
    for fit in (fit_sprinter, fit_specdec):
        refused(partial(fit, data, tmp_path / "head"), "exists")
    refused(lambda: fit_sprinter(tmp_path / "head", tmp_path / "new"), "no collect.json")
    (tmp_path / "x.partial").mkdir()
    refused(lambda: fit_sprinter(tmp_path / "x", tmp_path / "new"), "--resume")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["head", "x.partial"]
    for wrong in ({"kind": "tree"}, {"width": 0}, {"patience": 0}, {"learning_rate": -1.0}, {"max_epochs": 0}):
        with pytest.raises(ValueError):
            HeadFitSettings(**wrong)


# -- SpecDec++ from the command line to the demo ------------------------------------------------------------------------


@pytest.mark.full
def test_collect_fit_generate(hf_lossy, tmp_path):
    data, head = tmp_path / "data", tmp_path / "head"
    collect = ("collect", "--for", "specdec", "--out", data, "--limit", 10, "--max-new-tokens", 24, "--batch-size", 5)
    collected = hf_lossy(*collect)
    assert collected.code == 0 and "tokens of 10 prompts" in collected.out
    fitted = hf_lossy("fit", "specdec", data, "--out", head, "--width", 8, "--weight", 3)
    assert fitted.code == 0, fitted.err
    assert "AUROC" in fitted.out and "tokens are accepted" in fitted.out
    policy = json.dumps({"stop": {"name": "specdec", "head": str(head), "threshold": 0.4}})
    out = hf_lossy("generate", "--policy", policy, "--max-new-tokens", 12, "--json").json
    assert out["speculation"]["lossless"] is True and out["policy"]["stop"]["head"] == str(head)
    assert "--for: unknown method 'specdek'" in hf_lossy("collect", "--for", "specdek", "--out", tmp_path / "no").line


def test_the_shipped_head():
    """It reads the demo draft, and drafts the right tokens: beside a constant length that drafts as much, more of it is accepted."""
    head, m = demo.head("specdec"), models()
    head.check(target=m.target, draft=m.draft, tokenizer=m.tokenizer)
    assert head.config.metrics["auroc"] > 0.85 and head.config.training["number_of_prompts"] >= 1000
    assert sum(path.stat().st_size for path in Path(demo.FOLDER / "specdec_head").iterdir()) < 200_000
    inputs = m.tokenizer([p.prompt for p in demo.problems(6, 11)], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    settings = {"max_new_tokens": 64, "do_sample": False, "assistant_model": m.draft, "return_dict_in_generate": True}
    target = hla.enable(m.target)
    constant, stopped = (target.generate(**inputs, **settings, lossy_policy=stop) for stop in (hla.Constant(12), SpecDecPP(head, 0.7)))  # fmt: skip
    assert torch.equal(constant.sequences, stopped.sequences)
    for figure in ("mean_acceptance_length", "draft_acceptance_rate"):
        assert getattr(stopped.speculation, figure) > getattr(constant.speculation, figure), (
            "more accepted, less in vain"
        )
