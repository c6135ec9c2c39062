"""Lines on screen, card and config beside a head whose figures are of few tokens, or do not show that it is better than chance."""

import pytest
from support.collecting import drawn, write
from support.hub_server import card_problems

from hf_lossy_assist import Head
from hf_lossy_assist.stats.intervals import Estimate
from hf_lossy_assist.training.head_training import FEWEST, Evidence, add_intervals, format_share
from hf_lossy_assist.training.verifier_dataset import KINDS, REPLACED


MORE = {"important": "mine more problems", "unimportant": "mine other problems"}


def evidence(important=80, unimportant=300, auroc=(0.9, 0.8, 0.95), texts=7):
    counts = {"important": important, "unimportant": unimportant}
    return Evidence(Estimate(*auroc), texts, "problem", counts, MORE)


def test_a_share_has_its_counts_and_its_interval():
    assert format_share(6, 6) == "6 of 6 (100 %; 95 %: 61 % to 100 %)"
    assert format_share(0, 6) == "0 of 6 (0 %; 95 %: 0 % to 39 %)"
    assert format_share(81, 263) == "81 of 263 (30.8 %; 95 %: 25.5 % to 36.6 %)"  # Newcombe (1998), Table I
    assert format_share(0, 0) == "0 of 0"


def test_rows_get_the_ends_of_each_share():
    [row] = add_intervals([{"threshold": 0.3, "recall": 1.0, "accepted": 81 / 263}], {"recall": 6, "accepted": 263})
    assert row["threshold"] == 0.3 and row["recall"] == 1.0
    assert (row["recall_low"], row["recall_high"]) == pytest.approx((0.60967, 1.0), abs=1e-5)
    assert (row["accepted_low"], row["accepted_high"]) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert add_intervals([{"recall": 0.5}], {"recall": 0}) == [{"recall": 0.5}]


def test_few_tokens_of_either_label_are_warned_of():
    assert evidence(FEWEST, FEWEST).warning is None
    few = evidence(FEWEST - 1, 300).warning
    assert few == "these figures are of 49 important tokens in 7 held-out problems, fewer than 50: mine more problems"
    assert "12 unimportant tokens" in evidence(80, 12).warning and MORE["unimportant"] in evidence(80, 12).warning
    assert "\n" not in few


def test_a_head_is_good_only_where_the_interval_says_so():
    assert evidence(auroc=(0.9, 0.501, 0.99)).verdict is None
    chance = evidence(auroc=(0.9, 0.5, 0.99)).verdict
    figures = "AUROC 0.900 (95 %: 0.500 to 0.990, 7 held-out problems)"
    assert chance == f"no better than chance as far as is known: {figures}; mine more problems"
    alone = evidence(auroc=(1.0, None, None), texts=1)
    assert alone.verdict == f"no better than chance as far as is known: {alone}; mine more problems"
    assert str(alone) == "AUROC 1.000 (no interval, 1 held-out problem)"


def test_what_a_config_keeps():
    assert evidence().metrics() == {
        "auroc": 0.9, "auroc_low": 0.8, "auroc_high": 0.95, "held_out_problems": 7, "held_out_important": 80, "held_out_unimportant": 300,
    }  # fmt: skip
    bad = evidence(3, 300, (0.5, 0.3, 0.7))
    assert bad.metrics()["verdict"] == bad.verdict and bad.metrics()["warning"] == bad.warning
    assert "auroc_low" not in evidence(auroc=(0.9, None, None)).metrics()


def table(kinds, prompts, each, strength):
    return drawn(kinds, prompts, each, lambda x: strength * x[:, 0] + 1.5, lam=1.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "kinds", "each"),
    [("sprinter", list(KINDS), 5), pytest.param("specdec", [REPLACED], 20, marks=pytest.mark.nightly)],
    ids=["sprinter", "specdec"],
)
def test_a_head_is_called_good_only_where_it_is(hf_lossy, tmp_path, method, kinds, each):
    for name, strength in (("noise", 0.0), ("law", 3.0)):
        data = write(table(kinds, 60, each, strength), tmp_path / name)
        done = hf_lossy("fit", method, data, "--out", tmp_path / f"{name}-head")
        assert done.code == 0 and "…" not in done.out, done
        last, card = done.out.splitlines()[-1], (tmp_path / f"{name}-head" / "README.md").read_text()
        metrics = Head.from_pretrained(tmp_path / f"{name}-head").config.metrics
        assert metrics["auroc_low"] < metrics["auroc"] < metrics["auroc_high"] and metrics["held_out_prompts"] == 9
        assert f"{metrics['auroc_low']:.3f} to {metrics['auroc_high']:.3f}" in done.out
        assert f"| auroc low | {metrics['auroc_low']:.4g} |" in card and card_problems(card) == ([], [])
        if name == "law":
            assert metrics["auroc_low"] > 0.7 and "verdict" not in metrics
            assert last.startswith("see how fast it is: hf-lossy ")
            assert f"{name}-head" in last and "than chance" not in card
            continue
        assert metrics["auroc_low"] <= 0.5 and last == metrics["verdict"] and "see how fast" not in done.out
        assert last.startswith("no better than chance as far as is known: AUROC 0.")
        assert "**No better than chance as far as is known: " in card


@pytest.mark.full
def test_figures_of_few_tokens_are_warned_of(hf_lossy, tmp_path):
    """12 prompts hold two out: 2 · 4 · 4 tokens, of which the rarer label has fewer than half."""
    data = write(table(list(KINDS), 12, 4, 3.0), tmp_path / "data")
    done = hf_lossy("fit", "sprinter", data, "--out", tmp_path / "head")
    assert done.code == 0, done.err
    metrics = Head.from_pretrained(tmp_path / "head").config.metrics
    bad = metrics["held_out_unacceptable"]
    assert bad < metrics["held_out_acceptable"] and bad + metrics["held_out_acceptable"] == 32
    says = f"these figures are of {bad} unacceptable tokens in 2 held-out prompts, fewer than 50: collect more prompts or longer texts"
    assert f"warning: {says}, or fit a smaller λ" in done.out.splitlines()
    card = (tmp_path / "head" / "README.md").read_text()
    assert f"**Few tokens:** {says}" in card and card_problems(card) == ([], [])
    row = next(row for row in metrics["thresholds"] if row["threshold"] == 0.5)
    assert row["eta_fp_low"] < row["eta_fp"] < row["eta_fp_high"]
    assert f"{row['eta_fp']:.3f} ({row['eta_fp_low']:.3f} to {row['eta_fp_high']:.3f})" in card
