"""Proves that a judge learns a labelling that is known, that its figures are of problems it has not seen, and that its folder is whole."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import roc_auc_score
from support.collecting import record
from support.hub_server import card_problems
from support.refusals import names, refused

import hf_lossy_assist as hla
from hf_lossy_assist import FeatureSpec, Head, HeadConfig, LinearHead, demo
from hf_lossy_assist.artifacts.identity import ModelIdentity, tokenizer_hash
from hf_lossy_assist.methods.autojudge.classifiers import (
    FOLDS,
    GRID,
    JudgeSettings,
    choose_folds,
    fit_classifier,
    fold_pipeline,
    split,
    tabulate_thresholds,
)
from hf_lossy_assist.methods.autojudge.dataset import MinedTable, read_mined
from hf_lossy_assist.methods.autojudge.fit import LABEL, JudgeReport, fit_autojudge, read_hidden_states


PROBLEMS = 48
QUICK = JudgeSettings(grid=(1e-2, 1e-4))
SETTINGS = {"do_sample": False, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 60, "seed": 0}
models = cache(demo.load)


@cache
def mismatches() -> list[dict[str, Any]]:
    """Where the demo draft's guess is not what the demo target wrote; important where either token is a digit.

    The last mismatch of a problem, if unimportant, stands in its response with the draft's token, as mined responses have it.
    """
    target, draft, _, tokenizer = models()
    digits = {i for token, i in tokenizer.get_vocab().items() if token.strip("Ġ▁ ").isdigit()}
    batch, rows = [p.prompt for p in demo.problems(PROBLEMS, 0, "calibration")], []
    texts = tokenizer(batch, return_tensors="pt", padding=True)
    out = target.generate(**texts, do_sample=False, max_new_tokens=60)
    start = texts["input_ids"].shape[1]
    mask = torch.cat([texts["attention_mask"], torch.ones_like(out[:, start:])], dim=1)
    with torch.no_grad():
        guesses = draft(out, attention_mask=mask).logits.argmax(dim=-1)[:, start - 1 : -1]
    for i, (answer, guess) in enumerate(zip(out[:, start:].tolist(), guesses.tolist(), strict=True)):
        end = answer.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in answer else len(answer)
        response = answer[:end]
        found = []
        for t, (token, other) in enumerate(zip(response, guess, strict=False)):
            if token != other:
                row = {"position": t, "target_token": token, "draft_token": other}
                found.append(row | {"important": bool({token, other} & digits)})
        if found and not found[-1]["important"]:
            t = found[-1]["position"]
            response = [*response[:t], guess[t]]
        shared = {
            "problem": i, "prompt": batch[i], "response": tokenizer.decode(response),
            "prompt_ids": tokenizer(batch[i])["input_ids"], "response_ids": response, "target_answer": None, "answer": "1",
        }  # fmt: skip
        rows += [shared | row for row in found]
    return rows


def facts(**changes: Any) -> dict[str, Any]:
    target, draft, _, tokenizer = models()
    return {
        "settings": SETTINGS, "task": "demo", "source": "the demo task", "problems": PROBLEMS,
        "target": ModelIdentity.of(target).to_dict(), "draft": ModelIdentity.of(draft).to_dict(),
        "tokenizer_hash": tokenizer_hash(tokenizer), "versions": {},
    } | changes  # fmt: skip


def write(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Path:
    Dataset.from_list(rows).save_to_disk(str(folder))
    return record(folder, "mine.json", facts(**changes))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mined") / "set", mismatches())


@pytest.fixture(autouse=True, scope="module")
def states_once():
    """The models run once for all tests of the same mismatches: it takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_lossy_assist.methods.autojudge.fit.read_hidden_states", hidden_states_once)
        yield


known: dict[tuple[str, str, bytes], torch.Tensor] = {}


def hidden_states_once(model: Any, mined: MinedTable, position: str = "token", name: str = "model") -> torch.Tensor:
    rows = torch.stack([mined.problem, mined.position, mined.target_token, mined.draft_token])
    key = model.config.name_or_path, position, rows.numpy().tobytes()
    if key not in known:
        known[key] = read_hidden_states(model, mined, position, name)
    return known[key]


def fit(data: Path, out: Path, settings: JudgeSettings = QUICK, **more: Any) -> tuple[Head, JudgeReport]:
    target, draft, _, tokenizer = models()
    given = {"target": target, "draft": draft, "tokenizer": tokenizer, "settings": settings}
    return fit_autojudge(data, out, **given | more)


@cache
def features(data: Path) -> torch.Tensor:
    mined = read_mined(data)
    parts = [hidden_states_once(model, mined) for model in (models().draft, models().target)]
    return torch.cat(parts, dim=1)


@pytest.fixture(scope="module")
def judged(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("judge") / "deep" / "head"
    return *fit(data, out, JudgeSettings()), out


@pytest.mark.nightly
def test_a_known_labelling_is_found(data, judged):
    head, report, _ = judged
    mined, x = read_mined(data), features(data)
    held = torch.isin(mined.problem, torch.tensor(head.config.training["held_out_problems"]))
    with torch.no_grad():
        scores = head(x)[held].numpy()
    y = mined.important[held].numpy()
    assert isinstance(head, LinearHead) and not head.training and head.config.hidden_size == x.shape[1] == 48 + 96
    assert report.auroc == pytest.approx(roc_auc_score(y, scores), abs=1e-6) and report.auroc > 0.9
    assert report.brier == pytest.approx(((scores.astype(float) - y) ** 2).mean(), abs=1e-6)
    assert report.evidence.counts == {"important": y.sum(), "unimportant": (~y).sum()}
    assert (report.mismatches, report.problems) == (len(mined), len(mined.texts))
    assert report.important == pytest.approx(float(mined.important.float().mean()))
    for row in report.thresholds:  # what the head said of some mismatch, on another day perhaps a last bit away
        low, high = row["threshold"] - 1e-6, row["threshold"] + 1e-6
        assert (scores[y] >= high).mean() - 1e-9 <= row["recall"] <= (scores[y] >= low).mean() + 1e-9
        assert (scores[~y] < low).mean() - 1e-9 <= row["accepted"] <= (scores[~y] < high).mean() + 1e-9
    assert report.c in GRID


def test_folding_changes_nothing():
    """Features far from 0, of very different spread, and one that never varies."""
    generator = np.random.default_rng(0)
    scale = np.array([0.1, 1.0, 5.0, 20.0, 0.05, 0.0])
    x = ((generator.normal(size=(400, 6)) + 3) * scale + 2).astype(np.float32)
    y = generator.random(400) < 1 / (1 + np.exp(-(x[:, 1] - 5) * 2))
    pipeline = fit_classifier(x, y, 1e-2, JudgeSettings())
    head = fold_pipeline(pipeline, HeadConfig(6))
    with torch.no_grad():
        scores = head(torch.from_numpy(x)).numpy()
    assert np.allclose(scores, pipeline.predict_proba(x)[:, 1], rtol=0, atol=1e-5)
    assert type(head) is LinearHead and not head.training


@pytest.mark.full
def test_fits_that_do_not_converge_are_counted(data, tmp_path):
    _, report = fit(data, tmp_path / "head", JudgeSettings(grid=(1.0, 1e-1), max_iter=2))
    assert report.unconverged == 1  # the other C's fit is not the head's


@pytest.mark.full
def test_a_seed_names_a_head(data, tmp_path):
    settings = [JudgeSettings(grid=(1e-3,), seed=seed) for seed in (1, 1, 2)]
    one, two, other = (fit(data, tmp_path / str(n), one)[0] for n, one in enumerate(settings))
    assert one.digest == two.digest != other.digest
    assert one.config.training["held_out_problems"] != other.config.training["held_out_problems"]


def tokens(problems, each, important):
    """`each` tokens of every problem; the first `important` problems have one important token each."""
    problem = np.arange(problems).repeat(each)
    return problem, (np.arange(len(problem)) % each == 0) & (problem < important)


def test_folds():
    """One split where it holds out enough of both; else as many folds as problems with each label, of one size, each problem once."""
    problem = np.arange(100).repeat(12)
    half = np.arange(len(problem)) % 2 == 0  # 10 problems of 6 and 6 are held out: 60 of each
    assert choose_folds(problem, half, 0) == 0
    rare = np.arange(len(problem)) % 4 == 0  # 30 of one
    assert choose_folds(problem, rare, 0) == choose_folds(problem, ~rare, 0) == FOLDS
    for important, folds in ((0, 0), (1, 0), (2, 2), (3, 3), (9, FOLDS)):
        problem, labels = tokens(40, 3, important)
        assert choose_folds(problem, labels, 0) == choose_folds(problem, ~labels, 0) == folds
        for seed in range(5 if folds else 0):
            for training, held in split(problem, folds, seed, labels):
                assert labels[held].any() and labels[training].any() and not labels[held].all()
    problem, labels = tokens(7, 3, 3)
    assert choose_folds(problem, labels, 0) == 0
    refused(lambda: split(problem, 0, 0, labels), "in 7 problems; at least 8")
    problem, labels = tokens(43, 2, 11)
    parts = split(problem, 4, 1, labels)
    assert (np.sum([held for _, held in parts], axis=0) == 1).all()
    sizes = [len(np.unique(problem[held])) for _, held in parts]
    shares = [int(labels[held].sum()) for _, held in parts]
    assert max(sizes) - min(sizes) <= 1 and max(shares) - min(shares) <= 1


@pytest.mark.parametrize("goal", [0.0, 0.9, 1.0])
def test_the_chosen_threshold_keeps_the_recall_and_wins_most(goal):
    generator = np.random.default_rng(1)
    important = generator.random(500) < 0.2
    scores = (generator.beta(2, 5, 500) + 0.3 * important).clip(0, 1).astype(np.float32)
    rows, threshold = tabulate_thresholds(scores, important, goal)
    assert [row["threshold"] for row in rows] == sorted({row["threshold"] for row in rows})
    assert len(rows) <= 26 + 12 + 1
    assert {0.005, 0.1, 0.5} <= {row["threshold"] for row in rows} and all(0 <= row["threshold"] < 1 for row in rows)
    for row in rows:
        assert row["recall"] == pytest.approx((scores[important] >= row["threshold"]).mean())
        assert row["accepted"] == pytest.approx((scores[~important] < row["threshold"]).mean())
    [chosen] = [row for row in rows if row["threshold"] == threshold]
    assert chosen["recall"] >= goal
    worth = [(row["recall"], row["accepted"]) for row in rows]
    worth += [((scores[important] >= t).mean(), (scores[~important] < t).mean()) for t in np.linspace(0, 1, 2001)]
    best = max(recall + accepted for recall, accepted in worth if recall >= goal)
    assert chosen["recall"] + chosen["accepted"] >= best - 0.005  # four digits move one token at most


def test_thresholds_by_hand():
    """A good head gives up no recall for nothing; a certain one gets none that accepts everything."""
    scores = np.array([0.1, 0.2, 0.3, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99])
    rows, threshold = tabulate_thresholds(scores, scores > 0.5, 0.5)
    assert threshold == 0.6 and {"threshold": 0.6, "recall": 1.0, "accepted": 1.0} in rows
    rows, threshold = tabulate_thresholds(np.array([1.0, 1.0, 0.0, 0.0]), np.array([True, True, False, False]), 0.9)
    assert threshold == 0.9999 and rows[-1] == {"threshold": 0.9999, "recall": 1.0, "accepted": 1.0}
    rows, threshold = tabulate_thresholds(np.array([0.0, 0.0, 1.0]), np.array([True, False, False]), 1.0)
    assert threshold == 0.0 and rows[0]["recall"] == 1.0 and rows[0]["accepted"] == 0.0


# -- the folder -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_heads_folder_is_whole_and_says_what_it_is(judged):
    head, report, folder = judged
    assert names(folder) == {"README.md", "config.json", "model.safetensors"} and names(folder.parent) == {"head"}
    back = Head.from_pretrained(folder)
    assert back.digest == head.digest and back.config == head.config and head.source == str(folder)
    card = (folder / "README.md").read_text()
    assert card_problems(card) == ([], [])
    for text in (
        'lossy_policy="autojudge", head=head', "**important**", LABEL, "states of the draft and the target",
        f"| {report.threshold:.4g} (default) |", f"| auroc | {report.auroc:.4g} |", "reject at least 90% of the important tokens",
        "recall: important tokens rejected", "https://huggingface.co/papers/2504.20039",
    ):  # fmt: skip
        assert text in card, text
    assert "held out problems:" not in card and "η_" not in card and "\n\n\n" not in card
    target, draft, _, tokenizer = models()
    back.check(target=target, draft=draft, tokenizer=tokenizer)
    assert hla.AutoJudge(back).rule.threshold == report.threshold
    config = head.config
    assert (config.method, config.polarity, config.label, config.kind) == ("autojudge", "important", LABEL, "linear")
    assert config.features == FeatureSpec("both", "token") and config.decoding == {"do_sample": False}
    assert (config.target.id, config.draft.id) == ("demo-target", "demo-draft")
    training = config.training
    assert training["C"] == report.c and training["task"] == "demo" and training["prompts"] == "the demo task"
    assert training["mismatches"] == report.mismatches and training["labels"] == "semi-greedy search"
    metrics = config.metrics
    assert config.threshold == report.threshold and metrics["thresholds"] == report.thresholds
    assert metrics["auroc"] == report.auroc and metrics["important_share"] == report.important
    assert report.row_at(report.threshold)["recall"] >= 0.9


@pytest.mark.full
def test_figures_with_folds_are_of_problems_that_were_not_seen(data, tmp_path):
    head, report = fit(data, tmp_path / "head", JudgeSettings(grid=(1e-3,), folds=3))
    mined, x = read_mined(data), features(data).numpy()
    y, scores = mined.important.numpy(), np.full(len(mined), np.nan)
    for training, held in split(mined.problem.numpy(), 3, 0, y):
        scores[held] = fit_classifier(x[training], y[training], 1e-3, JudgeSettings()).predict_proba(x[held])[:, 1]
    assert sum(report.evidence.counts.values()) == len(mined)
    assert report.brier == pytest.approx(((scores - y) ** 2).mean(), abs=1e-5)
    whole = fit_classifier(x, y, 1e-3, JudgeSettings())
    with torch.no_grad():
        assert np.allclose(whole.predict_proba(x)[:, 1], head(torch.from_numpy(x)).numpy(), atol=1e-4)
    assert head.config.training["held_out_problems"] == [] and report.auroc > 0.9


@pytest.mark.full
def test_folds_under_a_strong_penalty_speak_on_one_scale(data, tmp_path):
    """C = 1e-7 leaves a head little but the share of important rows it was fitted to, which differs from fold to fold."""
    head, report = fit(data, tmp_path / "head", JudgeSettings(grid=(1e-7,), folds=4))
    with torch.no_grad():
        scores = head(features(data)).numpy()
    y = read_mined(data).important.numpy()
    assert scores.max() - scores.min() < 0.01, "the penalty was not strong"
    for row in report.thresholds:
        t = row["threshold"]
        if scores.min() < t < scores.max():
            shares = (scores[y] >= t).mean(), (scores[~y] < t).mean()
            assert shares == pytest.approx((row["recall"], row["accepted"]), abs=0.25)
    recall, accepted = (scores[y] >= report.threshold).mean(), (scores[~y] < report.threshold).mean()
    assert recall >= 0.85 and accepted > 0.5


@pytest.mark.full
def test_one_sided_labels_and_too_few_are_refused(tmp_path, data):
    rows = mismatches()
    for number, (label, settings, says) in enumerate((
        (lambda row: False, {}, "only unimportant mismatches"),
        (lambda row: True, {"folds": 2}, "only important mismatches"),
        (lambda row: row["problem"] == 0, {"seed": 0}, "only unimportant .* try other --folds"),
        (lambda row: row["problem"] % 20 == 0, {"folds": 30}, "only unimportant"),
    )):  # fmt: skip
        folder = write(tmp_path / f"data{number}", [row | {"important": label(row)} for row in rows])
        line = refused(partial(fit, folder, tmp_path / "head", JudgeSettings(**settings)), says)
        assert "mine more" in line
    few = write(tmp_path / "few", [row for row in rows if row["problem"] in {r["problem"] for r in rows[:12]}])
    refused(lambda: fit(few, tmp_path / "head"), "in . problems; at least 8")
    refused(lambda: fit(data, tmp_path / "head", JudgeSettings(folds=500)), "at least 500 are needed")
    assert not (tmp_path / "head").exists()


@pytest.mark.full
def test_other_models_are_refused(tmp_path, data):
    target, draft, companion, tokenizer = models()
    with pytest.raises(ValueError, match="made for the draft demo-draft .* and the draft here is demo-companion"):
        fit(data, tmp_path / "head", draft=companion)
    with pytest.raises(ValueError, match="made for the target demo-target .* and the target here is demo-draft"):
        fit(data, tmp_path / "head", target=draft)
    other = write(tmp_path / "other", mismatches(), tokenizer_hash="0" * 64)
    refused(lambda: fit(other, tmp_path / "head"), "tokenizer of hash 000000000000…, and the tokenizer here")
    bare = write(tmp_path / "bare", mismatches())
    record(bare, "mine.json", {})
    refused(lambda: fit(bare, tmp_path / "head"), "mine.json cannot be read .*settings")
    more = {"target_dtype": "bfloat16", "target_weights": "0" * 64, "draft": facts()["draft"] | {"id": "org/copy"}}
    with pytest.warns(UserWarning) as warned:
        fit(write(tmp_path / "renamed", mismatches(), **more), tmp_path / "head")
    lines = "\n".join(str(one.message) for one in warned)
    assert "id 'org/copy' there" in lines and "target may differ: 'bfloat16' there, 'float32' here" in lines
    refused(lambda: fit(data, tmp_path / "head"), "exists: choose another")
    refused(lambda: fit(tmp_path / "head", tmp_path / "new"), "no mine.json")
    assert not (tmp_path / "new").exists()
