"""Proves that fitting finds a distribution that is known, that its figures are what they are called, and that a head's folder is whole."""

import json
import math
from functools import cache, partial

import numpy as np
import pytest
import torch
from support.collecting import H, drawn, write
from support.hub_server import card_problems
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import Head, LinearHead, MLPHead
from hf_lossy_assist.methods.sprinter.fit import THRESHOLDS, VerifierReport, fit_head, fit_sprinter
from hf_lossy_assist.training.head_training import HeadFitSettings, split_prompts
from hf_lossy_assist.training.verifier_dataset import KINDS, VerifierDataset, label_acceptable, read_dataset


W = torch.tensor([1.5, -1.0, 0.5, 0.0, 2.0, -0.5])
BIAS = 1.0
SCALE = torch.tensor([0.1, 1.0, 5.0, 20.0, 0.5, 1.0])  # features of very different spread, far from 0


def table(prompts: int = 160, each: int = 10, seed: int = 0) -> VerifierDataset:
    given = drawn(KINDS, prompts, each, lambda x: x @ W + BIAS, seed, temperature=0.8, top_k=7)
    given.features = given.features * SCALE + 3 * SCALE
    return given


def bayes(part: VerifierDataset, lam: float) -> torch.Tensor:
    """P(acceptable) of each record."""
    return ((part.features - 3 * SCALE) / SCALE @ W + BIAS + np.log(lam)).sigmoid()


@cache
def big() -> VerifierDataset:
    return table()


def held_out_part(given: VerifierDataset, seed: int = 0) -> VerifierDataset:
    return given.of(split_prompts(given.prompt, seed)["test"])


def auroc(v: torch.Tensor, y: torch.Tensor) -> float:
    """The chance that an acceptable record is put above an unacceptable one, a tie counting half, by comparing all pairs."""
    gaps = v[y][:, None].double() - v[~y][None].double()
    return float((gaps > 0).double().mean() + (gaps == 0).double().mean() / 2)


def brier(v: torch.Tensor, y: torch.Tensor) -> float:
    return float((v.double() - y.double()).square().mean())


# -- the distribution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "balance"), [("linear", True), pytest.param("mlp", False, marks=pytest.mark.full)])
def test_a_known_distribution_is_found(kind, balance):
    head, report = fit_head(big(), 1.2, HeadFitSettings(kind=kind, balance=balance))
    part = held_out_part(big())
    best, y = bayes(part, 1.2), label_acceptable(part.p, part.q, 1.2)
    with torch.no_grad():
        v = head(part.features)
    assert isinstance(head, {"linear": LinearHead, "mlp": MLPHead}[kind]) and not head.training
    assert report.auroc > auroc(best, y) - 0.01 and report.auroc > 0.85
    assert report.brier < brier(best, y) + 0.006
    assert (v - best).abs().mean() < 0.04
    assert abs(float(v.mean()) - float(y.float().mean())) < 0.03


@pytest.mark.nightly
def test_balancing_goes_with_kinds_of_unequal_size():
    """Kinds weigh the same in all; so the intercept must move back by the labels' weights, not by their counts."""
    given = table(prompts=200, each=12)
    given.q[given.kind == 0] *= 0.05  # one kind is nearly always acceptable
    keep = (given.kind == 0) | (given.position < 2)  # and is most of the records
    given = given.of(keep)
    given.features[:, 0] = (
        3 * SCALE[0] + torch.randn(len(given), generator=torch.Generator().manual_seed(1)) * SCALE[0]
    )
    x = held_out_part(given).features
    balanced, plain = (fit_head(given, 1.2, HeadFitSettings(balance=b))[0](x).mean().item() for b in (True, False))
    assert balanced == pytest.approx(plain, abs=0.03)


@pytest.mark.parametrize("count", [8, 13, 101])
def test_a_split_shares_no_prompt(count):
    prompt = torch.arange(count).repeat_interleave(5)[torch.randperm(5 * count)] * 3
    parts = list(split_prompts(prompt, seed=0).values())
    assert torch.stack(parts).sum(dim=0).tolist() == [1] * len(prompt)
    names = [set(prompt[part].tolist()) for part in parts]
    assert sum(map(len, names)) == count == len(set.union(*names)) and all(names)
    assert len(names[0]) == pytest.approx(0.7 * count, abs=1) and len(names[2]) == pytest.approx(0.15 * count, abs=1)
    assert all(torch.equal(a, b) for a, b in zip(parts, split_prompts(prompt, seed=0).values(), strict=True))
    assert any(
        not torch.equal(a, b)
        for seed in range(1, 6)
        for a, b in zip(parts, split_prompts(prompt, seed).values(), strict=True)
    )


@pytest.mark.full
def test_a_seed_names_a_head():
    small = table(prompts=24, each=4)
    one, two, other = (fit_head(small, 1.2, HeadFitSettings(kind="mlp", seed=seed))[0] for seed in (3, 3, 4))
    assert one.digest == two.digest != other.digest
    state = torch.random.get_rng_state()
    fit_head(small, 1.2, HeadFitSettings(kind="mlp"))
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.full
def test_early_stopping_keeps_the_best_epoch():
    """A wide network learns few records by heart: its validation loss falls and rises, and the lowest must stay."""
    small = table(prompts=40, each=2, seed=3)
    valid = split_prompts(small.prompt, 0)["early stopping"]
    x, y = small.features[valid], label_acceptable(small.p, small.q, 1.2)[valid].float()
    settings = {"kind": "mlp", "balance": False, "learning_rate": 0.05, "batch_size": 32}
    losses, hash_files = [], []
    for epochs in range(1, 16):
        head, _ = fit_head(small, 1.2, HeadFitSettings(**settings, max_epochs=epochs, patience=100))
        losses.append(torch.nn.functional.binary_cross_entropy(head(x), y).item())
        hash_files.append(head.digest)
    assert all(after <= before + 1e-5 for before, after in zip(losses, losses[1:], strict=False))
    assert hash_files[-1] == hash_files[-2] == hash_files[-3], "the last epochs should not have been better"
    assert len(set(hash_files)) > 1, "the first epoch should not have been the best"
    patient, _ = fit_head(small, 1.2, HeadFitSettings(**settings, max_epochs=200, patience=100))
    hasty, _ = fit_head(small, 1.2, HeadFitSettings(**settings, max_epochs=200, patience=1))
    assert patient.digest == hash_files[-1]
    worse = next(i for i, (a, b) in enumerate(zip(hash_files, hash_files[1:], strict=False)) if a == b)
    assert hasty.digest == hash_files[worse], "patience 1 ends at the first epoch that is no better"


# -- the figures ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_figures_are_what_they_are_called():
    head, report = fit_head(big(), 0.7)
    part = held_out_part(big())
    with torch.no_grad():
        v = head(part.features)
    y = part.q <= 0.7 * part.p
    assert report.lam == 0.7
    assert report.auroc == pytest.approx(auroc(v, y), abs=1e-9)
    assert report.brier == pytest.approx(brier(v, y), abs=1e-7)
    assert report.acceptance == pytest.approx(float(y.double().mean()))
    assert (
        [row["threshold"] for row in report.thresholds]
        == list(THRESHOLDS)
        == [round(0.05 * i, 2) for i in range(1, 20)]
    )
    for row in report.thresholds:
        says = v.numpy() >= np.float32(row["threshold"])
        assert row["eta_tp"] == pytest.approx(says[y.numpy()].mean(), abs=1e-6)
        assert row["eta_fp"] == pytest.approx(says[~y.numpy()].mean(), abs=1e-6)
    assert report.row_at(0.5) == report.row_at(0.51) == report.thresholds[9]


# -- the folder -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(table(prompts=40, each=5), tmp_path_factory.mktemp("data") / "set")


def test_a_dataset_comes_back_as_it_was(data):
    given, back = table(prompts=40, each=5), read_dataset(data)
    for name in ("features", "p", "q", "distance", "prompt", "kind", "position"):
        assert torch.equal(getattr(given, name), getattr(back, name)), name
    assert (back.kinds, back.facts) == (given.kinds, given.facts)


def test_records_that_are_none_are_refused(tmp_path):
    """q ≤ λ·p is False of a NaN: without a word it would be a label."""
    for name, value in (("q", math.nan), ("features", math.inf)):
        given = table(prompts=10, each=5)
        getattr(given, name)[7] = value
        folder = write(given, tmp_path / name)
        says = f"{folder} .*{name} has values that are NaN or infinite"
        refused(lambda: fit_sprinter(folder, tmp_path / "head"), says)  # noqa: B023


@pytest.mark.full
def test_a_heads_folder_is_whole(data, tmp_path):
    head, (report,) = fit_sprinter(data, tmp_path / "deep" / "head", settings=HeadFitSettings(kind="mlp", width=8))
    folder = tmp_path / "deep" / "head"
    names = {"README.md", "config.json", "model.safetensors"}
    assert {p.name for p in folder.iterdir()} == names
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["head"]
    back = Head.from_pretrained(folder)
    assert back.digest == head.digest and back.config == head.config and type(back) is type(head)
    assert (head.source, head.config.kind) == (str(folder), "mlp")
    card = (folder / "README.md").read_text()
    assert card_problems(card) == ([], [])
    assert "org/draft" in card
    assert f"| auroc | {report.auroc:.4g} |" in card
    assert not [p for p in folder.iterdir() if str(tmp_path).encode() in p.read_bytes()]


@pytest.mark.full
def test_what_a_head_records(data, tmp_path):
    head, _ = fit_sprinter(data, tmp_path / "head", settings=HeadFitSettings(seed=2))
    config = head.config
    assert config.decoding == {"do_sample": True, "temperature": 0.8, "top_k": 7, "top_p": 1.0}
    assert (config.method, config.polarity, config.hidden_size) == ("sprinter", "acceptable", H)
    assert config.label == "q(x) ≤ 1.2·p(x)" and config.lam == 1.2 and config.training["seed"] == 2
    assert (config.target.id, config.draft.id, config.tokenizer_hash) == ("org/target", "org/draft", "0" * 64)
    sizes = [int(part.sum()) for part in split_prompts(read_dataset(data).prompt, 2).values()]
    assert config.training["tokens"].startswith(
        f"{sizes[0]} for training, {sizes[1]} for early stopping, {sizes[2]} for the figures"
    )
    hla.Sprinter(head)  # usable as it is
    json.dumps(config.to_dict())


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
    whole, one_label, one_sided = (table(prompts=20, each=2) for _ in range(3))
    one_label.q = one_label.p.clone()
    held_out = split_prompts(one_sided.prompt, 0)["test"]
    one_sided.q[held_out] = one_sided.p[held_out]
    for number, (given, lambdas, says) in enumerate((
        (one_label, [], "only one label"), (one_sided, [], "only one label"), (table(prompts=7, each=2), [], "7 prompts"),
        (whole, [-1.0], "--lambda"), (whole, [1.2, 1e9], "only one label"),
    )):  # fmt: skip
        folder = write(given, tmp_path / f"data{number}")
        refused(partial(fit_sprinter, folder, tmp_path / "deep" / "head", lambdas), says)
    assert not list(tmp_path.glob("deep/*"))


def test_what_is_there_is_not_overwritten_and_what_is_no_dataset_is_refused(data, tmp_path):
    (tmp_path / "head").mkdir()
    refused(lambda: fit_sprinter(data, tmp_path / "head"), "exists")
    refused(lambda: fit_sprinter(tmp_path / "head", tmp_path / "new"), "no collect.json")
    (tmp_path / "x.partial").mkdir()
    refused(lambda: fit_sprinter(tmp_path / "x", tmp_path / "new"), "--resume")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["head", "x.partial"]
    for wrong in ({"kind": "tree"}, {"width": 0}, {"patience": 0}, {"learning_rate": -1.0}, {"max_epochs": 0}):
        with pytest.raises(ValueError):
            HeadFitSettings(**wrong)
