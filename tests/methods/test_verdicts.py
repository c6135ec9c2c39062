"""`hf-lossy fit` on data in which there is nothing to learn, or little: it says so, in its last lines and on the card."""

import pytest
from support.collecting import drawn, write
from support.hub_server import card_problems

from hf_lossy_assist import Head
from hf_lossy_assist.training.verifier_dataset import KINDS, REPLACED


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
            assert (
                metrics["auroc_low"] > 0.7
                and last.startswith("see how fast it is: hf-lossy ")
                and "verdict" not in metrics
            )
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
