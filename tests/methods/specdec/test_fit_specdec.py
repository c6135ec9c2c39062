"""Proves that SpecDec++'s head learns acceptance probabilities from what is collected for it, and that the shipped one does its work."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import roc_auc_score
from support import small
from support.collecting import H, drawn, models, run, tiny_pair, word_prompts, write
from support.hub_server import card_problems
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, Head, HeadConfig, LinearHead, SpecDecPP, demo
from hf_lossy_assist.artifacts.identity import ModelIdentity
from hf_lossy_assist.methods.sprinter.fit import compute_labels, fit_head, fit_specdec, fit_sprinter, measure
from hf_lossy_assist.training.head_training import HeadFitSettings, split_prompts
from hf_lossy_assist.training.verifier_dataset import REPLACED, VerifierDataset, read_dataset


TOKEN = FeatureSpec(position="token")
QUICK = HeadFitSettings("linear", learning_rate=0.01)


# -- collecting -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def states(model: Any, text: list[int], *columns: torch.Tensor) -> Any:
    """The model's output behind `text` and a row of `columns` (N,) each."""
    ends = torch.stack(columns, dim=1)
    return model(torch.cat([torch.tensor([text]).expand(len(ends), -1), ends], dim=1), output_hidden_states=True)


@pytest.mark.parametrize("mix", [0.5, *(pytest.param(mix, marks=pytest.mark.full) for mix in (0.0, 1.0))])
def test_states_laws_and_replaced_tokens_by_plain_forwards(tmp_path, mix):
    """Each record is the draft's token, with its own state, behind a text of which the share `mix` is the target's own draw."""
    target, draft, tokenizer = pair = tiny_pair()
    given = word_prompts(5, 8, 3, 6)
    accepted, expected, spread = 0, 0.0, 0.0
    for (number, kind), records in run(tmp_path, pair, given, new_tokens=10, mix=mix).items():
        text = tokenizer(given[number].prompt)["input_ids"]
        assert kind == 0 and [record["position"] for record in records] == list(range(10))
        for i, record in enumerate(records):
            x = torch.tensor([record["token"]])
            target_out, draft_out = states(target, text, x), states(draft, text, x)
            p, q = (out.logits[0, -2].softmax(dim=-1) for out in (target_out, draft_out))
            want = [float(p[x]), float(q[x]), float((p - q).abs().sum() / 2)]
            assert [record["p"], record["q"], record["distance"]] == pytest.approx(want, abs=2e-4)
            assert torch.allclose(
                torch.tensor(record["features"]), draft_out.hidden_states[-1][0, -1].float(), atol=1e-3, rtol=1e-3
            )
            if i + 1 == len(records):
                break
            every = torch.arange(
                small.VOCAB
            )  # what the text went on with: the token that explains the next record's state
            following = torch.tensor([records[i + 1]["token"]]).expand(small.VOCAB)
            hidden = states(draft, text, every, following).hidden_states[-1][:, -1]
            off = (hidden - torch.tensor(records[i + 1]["features"])).abs().amax(dim=1)
            assert off.min() < 1e-3 < off.sort().values[1]
            text = [*text, int(off.argmin())]
            chance = 1 - mix + mix * record["p"]
            accepted, expected, spread = accepted + (text[-1] == x), expected + chance, spread + chance * (1 - chance)
    assert float(accepted) == pytest.approx(expected, abs=3.5 * math.sqrt(spread) + 1e-4)
    assert mix == 0 or spread > 1


def test_what_is_collected_says_what_it_is_for(tmp_path):
    run(tmp_path, tiny_pair(), word_prompts(5, 8), new_tokens=4, mix=0.15)
    given, card = read_dataset(tmp_path / "data"), (tmp_path / "data" / "README.md").read_text()
    assert given.kinds == [REPLACED] and len(given) == 8 and given.facts["settings"]["mix"] == 0.15
    assert card_problems(card) == ([], []) and "hf-lossy fit specdec" in card and "SPRINTER" not in card
    refused(
        lambda: fit_sprinter(tmp_path / "data", tmp_path / "head"), "fit specdec. Collect again with --for sprinter"
    )
    run(tmp_path, tiny_pair(), word_prompts(5, 8), "other", new_tokens=4)
    refused(
        lambda: fit_specdec(tmp_path / "other", tmp_path / "head"), "fit sprinter. Collect again with --for specdec"
    )
    refused(lambda: fit_specdec(tmp_path / "data", tmp_path / "data"), "exists")
    refused(lambda: fit_specdec(tmp_path / "data", tmp_path / "head"), "2 prompts; at least 8")


# -- fitting --------------------------------------------------------------------------------------------------------------


def table(prompts: int = 100, each: int = 40, seed: int = 0) -> VerifierDataset:
    """Records that are accepted with probability sigmoid(2·x_0 + 1)."""
    given = drawn([REPLACED], prompts, each, lambda x: 2 * x[:, 0] + 1, seed)
    given.q = 0.01 + 0.99 * given.distance
    given.p, given.features = given.q * (2 * given.features[:, 0] + 1).sigmoid(), 5 * given.features - 7
    return given


def test_the_head_says_the_acceptance_probability():
    given = table()
    head, report = fit_head(given, None, QUICK)
    y = compute_labels(given)
    assert (head(given.features) - y).abs().max() < 0.03
    assert report.kl < 1e-3 and report.acceptance == pytest.approx(
        float(y[split_prompts(given.prompt, 0)["test"]].mean())
    )
    assert (head.config.method, head.config.polarity, head.config.features) == ("specdec", "acceptable", TOKEN)
    assert SpecDecPP(head).head is head


def test_a_refusals_weight_lowers_the_odds_and_the_intercept_brings_them_back():
    """The weighted loss is smallest at the odds y/((1 − y)·w)."""
    given = table()
    head, _ = fit_head(given, None, QUICK, 6.0)
    y = compute_labels(given)
    middle = (y > 0.05) & (y < 0.95)
    assert (head.logit(given.features) - y.logit()).abs()[middle].max() < 0.25
    assert "weighs 6, intercept moved back" in head.config.training["loss"]


def test_labels_are_the_chance_of_strict_acceptance():
    given = table(8, 2)
    given.p[:3], given.q[:3] = torch.tensor([0.1, 0.4, 0.0]), torch.tensor([0.4, 0.1, 0.5])
    assert compute_labels(given)[:3].tolist() == pytest.approx([0.25, 1.0, 0.0])


def ruler() -> LinearHead:
    """A head whose logit is the first number."""
    me = ModelIdentity("me", None, "llama", H, 1, 1)
    head = LinearHead(HeadConfig(H, features=TOKEN, draft=me)).eval()
    with torch.no_grad():
        head.linear.weight.zero_()
        head.linear.weight[0, 0] = 1.0
        head.linear.bias.zero_()
    return head


def test_figures_by_hand():
    """A coin of y = .25 where the head says .8, and one of y = 1 where it says .5."""
    given = table(8, 2).of(torch.arange(16) < 2)
    given.features[:, 0] = torch.tensor([0.8, 0.5]).logit()
    given.p, given.q = torch.tensor([0.25, 1.0]), torch.ones(2)
    report = measure(ruler(), given)
    assert report.brier == pytest.approx((0.25 * 0.04 + 0.75 * 0.64 + 1.0 * 0.25) / 2, abs=1e-6)
    first = 0.25 * math.log(0.25 / 0.8) + 0.75 * math.log(0.75 / 0.2)
    assert report.kl == pytest.approx((first + math.log(2)) / 2, abs=1e-6)
    assert report.acceptance == 0.625 and report.thresholds == []
    coins = [(1, 0.8)] + [(0, 0.8)] * 3 + [(1, 0.5)] * 4  # the same two as coins that have fallen
    assert report.auroc == pytest.approx(roc_auc_score(*zip(*coins, strict=True)))


def test_nothing_to_learn_is_refused():
    given = table(10, 2)
    for value in (1.0, 0.0):
        given.p = given.q * value
        refused(lambda: fit_head(given, None), "only one label")
    refused(lambda: fit_head(table(10, 2), None, weight=0), "--weight")


@pytest.mark.full
def test_the_folder(tmp_path):
    data = write(table(40, 25), tmp_path / "data")
    head, report = fit_specdec(data, tmp_path / "head", HeadFitSettings("mlp", 8), weight=3.0)
    assert {path.name for path in (tmp_path / "head").iterdir()} == {
        "README.md", "config.json", "model.safetensors",
    }  # fmt: skip
    card = (tmp_path / "head" / "README.md").read_text()
    assert card_problems(card) == ([], [])
    assert "Lossless" in card and "**Lossy.**" not in card and 'lossy_policy="specdec", head=head' in card
    loaded = Head.from_pretrained(tmp_path / "head")
    assert loaded.digest == head.digest and loaded.config.metrics["kl"] == report.kl
    assert json.loads((tmp_path / "head" / "config.json").read_text())["training"]["prefixes"].startswith(
        "the draft's text with 15%"
    )


# -- from the command line to the demo --------------------------------------------------------------------------------------


@pytest.mark.full
def test_collect_fit_generate(hf_lossy, tmp_path):
    data, head = tmp_path / "data", tmp_path / "head"
    collected = hf_lossy(
        "collect", "--for", "specdec", "--out", data, "--limit", 10, "--max-new-tokens", 24, "--batch-size", 5
    )
    assert collected.code == 0 and "tokens of 10 prompts" in collected.out
    fitted = hf_lossy("fit", "specdec", data, "--out", head, "--width", 8, "--weight", 3)
    assert fitted.code == 0, fitted.err
    assert "AUROC" in fitted.out and "tokens are accepted" in fitted.out
    policy = json.dumps({"stop": {"name": "specdec", "head": str(head), "threshold": 0.4}})
    out = hf_lossy("generate", "--policy", policy, "--max-new-tokens", 12, "--json").json
    assert out["speculation"]["lossless"] is True and out["policy"]["stop"]["head"] == str(head)
    assert "--for: unknown method 'specdek'" in hf_lossy("collect", "--for", "specdek", "--out", tmp_path / "no").line
    assert "exists" in hf_lossy("fit", "specdec", data, "--out", head).line


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
    texts, figures = [], []
    for stop in (hla.Constant(12), SpecDecPP(head, 0.7)):
        out = target.generate(**inputs, **settings, lossy_policy=stop)
        texts.append(out.sequences)
        figures.append((out.speculation.mean_acceptance_length, out.speculation.draft_acceptance_rate))
    assert torch.equal(*texts)
    assert figures[1][0] > figures[0][0] and figures[1][1] > figures[0][1], "more accepted, less in vain"
