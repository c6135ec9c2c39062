"""A head's folder on the page: what stands there is what its config holds, old heads say so in a line, damaged ones are refused in one."""

import numpy as np
import pytest
from support.heads import FIGURES, edit, full_config, linear, save
from support.pages import Checked, read_page
from support.refusals import refused

from hf_lossy_assist.evaluation import report_page as pages
from hf_lossy_assist.evaluation.report_page import format_title, make_sections, read_folder
from hf_lossy_assist.training.head_quality import CURVES, compute_curves


def html(found):
    return pages.render_html(format_title(found), make_sections(found))


def markdown(found):
    return pages.render_markdown(format_title(found), make_sections(found))


def metrics(**changes):
    generator = np.random.default_rng(0)
    said = generator.beta(0.6, 0.3, 30_000)
    return FIGURES | {
        "auroc": 0.8712, "auroc_low": 0.8512, "auroc_high": 0.8899,
        CURVES: compute_curves(said, said, generator.random(len(said)) < said).to_dict(),
    } | changes  # fmt: skip


def folder(where, **changes):
    linear(full_config(**({"metrics": metrics()} | changes))).save_pretrained(where)
    return where


@pytest.mark.full
def test_a_head_with_curves(tmp_path):
    found = read_folder(folder(tmp_path / "head"))
    page = html([found])
    text, curves = read_page(page), found.curves
    for said in (
        "What the heads are worth",
        "AUROC 0.871 (95 %: 0.851–0.890;",
        f"{curves.positives} acceptable and {curves.negatives} unacceptable held-out tokens",
        "it says P(acceptable): q(x) ≤ 1.2·p(x); org/target with org/draft",
        "Wilson's intervals, as if the tokens of one text were independent",
    ):
        assert said in text, said
    assert curves.positives + curves.negatives == 30_000
    assert page.count("<img src=") == 2
    for its in curves.reliability:
        row = [
            f"{its.mean:.3f}",
            str(its.tokens),
            f"{its.share.value:.3f}",
            f"{its.share.low:.3f}–{its.share.high:.3f}",
        ]
        assert all(f">{cell}</td>" in page for cell in row)
        assert "| " + " | ".join(row) + " |" in markdown([found])
    assert "AUROC 0.871 (95 %: 0.851–0.890;" in markdown([found])


def test_an_old_head_says_so_in_a_line(tmp_path, hf_lossy):
    old = save(tmp_path / "old")
    done = hf_lossy("report", old, "--out", tmp_path / "page.html")
    assert done.code == 0, done
    text = read_page((tmp_path / "page.html").read_text())
    assert (
        "this head's config has no curves" in text
        and "AUROC 0.812 (no interval)" in text
        and "<img" not in (tmp_path / "page.html").read_text()
    )
    assert "this head's config has no curves" in markdown([read_folder(old)])
    edit(old, metrics={})
    assert "no AUROC in its config" in read_page(html([read_folder(old)]))


def test_what_fitting_warned_of_is_on_the_page_and_acts_nowhere(tmp_path):
    wild = {"verdict": "no better than chance <script>alert(1)</script>", "warning": "few & <b>", "auroc_low": None}
    found = read_folder(folder(tmp_path / "head", metrics=metrics(**wild), label="<img src=x onerror=y>"))
    page = html([found])
    checked = Checked()
    checked.feed(page)  # refuses tags that act
    assert checked.open == [] and "no better than chance <script>" in checked.text and "few & <b>" in checked.text
    assert "**few &#38; &#60;b&#62;**" in markdown([found]) and "(no interval;" in checked.text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({CURVES: {"roc": "x", "reliability": []}}, "curves: roc: expected 1 to 50 lists"),
        ({CURVES: [1, 2]}, "curves: expected an object"),
        ({CURVES: {"roc": [[0, 0], [1, 1]], "reliability": [[0.5, 9, 3]]}}, "hits: expected"),
        ({"auroc": "<b>"}, "auroc: expected a number"),
        ({"auroc": 2}, "auroc: expected a number"),
        ({"auroc_low": 0.9}, "auroc_low: expected a number"),
        ({"auroc_high": 0.5}, "auroc_high: expected a number"),
    ],
)
def test_a_damaged_head_is_one_line(tmp_path, hf_lossy, changes, says):
    its = folder(tmp_path / "head")
    edit(its, metrics=metrics(**changes))
    assert "config.json: metrics: " in refused(lambda: read_folder(its), says)
    assert (
        says in hf_lossy("report", its, "--out", tmp_path / "page.html").line and not (tmp_path / "page.html").exists()
    )


def test_a_head_of_other_weights_is_refused(tmp_path):
    its = folder(tmp_path / "head")
    (its / "model.safetensors").write_bytes((its / "model.safetensors").read_bytes()[:-1])
    refused(lambda: read_folder(its), "model.safetensors")
