"""The page of figures, texts and heads, from runs and heads whose every figure is known."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from support.heads import FIGURES, edit, full_config, linear, save
from support.refusals import refused
from support.runs import ARMS, a_run

from hf_lossy_assist.evaluation import report_page as pages
from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.metrics import compute_metrics
from hf_lossy_assist.evaluation.report_page import Table, format_title, group_by_source, make_sections, read_folder
from hf_lossy_assist.evaluation.results import ResultFolder
from hf_lossy_assist.training.charts import draw_speed_and_quality
from hf_lossy_assist.training.head_quality import CURVES, compute_curves


DATA = "data:image/svg+xml;base64,"
REQUESTS = re.compile(r"url\(|@import|https?:|\b(src|href|srcset|action)\s*=")


class Checked(HTMLParser):
    """Every element that is opened is closed, and none asks another server for anything."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe") and not any(
            name == "href" or name.startswith("on") or (name == "src" and not value.startswith(DATA))
            for name, value in attrs
        )
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read_page(page: str) -> str:
    """The text of a page, which acts nowhere and asks nobody for anything."""
    checked = Checked()
    checked.feed(page)
    assert checked.open == [] and not REQUESTS.search(page.replace(f'src="{DATA}', ""))
    return checked.text


FACTS = {
    "target": {"id": "<T>"}, "draft": {"id": "D"}, "source": "demo", "machine": "a machine", "dtype": "float32",
    "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in ARMS},
}  # fmt: skip


def html(found):
    return pages.render_html(format_title(found), make_sections(found))


def markdown(found):
    return pages.render_markdown(format_title(found), make_sections(found))


@pytest.fixture
def folder(tmp_path):
    store, answers = ResultFolder(tmp_path / "found", FACTS, False), a_run(copies=2)
    for answer in answers:
        if answer.arm in ("svip", "top_k:k=4"):
            answer.pieces, answer.sources = ["<b>", " a", " b\n", "c"], [0, 0, 1, 3]
            answer.accept_lengths = [3, 1]
    for unit in range(4):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(compute_metrics(answers, ARMS), advice={"1": "use <svip>"})
    return tmp_path / "found"


def test_the_page(folder):
    page = html([read_folder(folder)])
    shown = read_page(page)
    for text in (
        "use <svip>",
        "<T> with D",
        "6.00 (3.24–11.10)",
        "100 (69–144)",
        "prompt 2, svip, wrong",
        "<b> a b",
    ):
        assert text in shown, text
    assert (
        '<span class="draft" title="draft">&lt;b&gt; a</span><span class="draft-lossy" title="draft-lossy"> b\n</span>'
        in page
    )
    assert page.count("<img src=") == 1 and page.count("<details open>") == 1 and page.count("<details>") == 3
    assert "prefers-color-scheme: dark" in page


def test_control_characters_are_shown_by_their_codes(folder):
    named = folder.rename(folder.with_name("a\x1b[2J\u202e"))
    found = [read_folder(named)]
    page, text = html(found), markdown(found)
    assert "a\\x1b[2J\\u202e" in read_page(page) and " b\n" in page
    assert "\x1b" not in page + text and "\u202e" not in page + text


def test_markdown_says_the_same(folder):
    text = markdown([read_folder(folder)])
    assert "**batch size 1: use &#60;svip&#62;**" in text and "&#60;T&#62; with D" in text
    row = next(line for line in text.splitlines() if line.startswith("| svip"))
    assert (
        "| 50.0 (34.6–72.2) | 3.00 (1.62–5.55) | 2.00 | – | 5.00 | 80% | – | – | 4/4 | lossless | 2/4 | 15%–85% |"
        in row
    )


@pytest.mark.full
def test_a_search_is_judged_on_the_problems_of_its_certificate(tmp_path):
    """Two problems settings were tried on, where svip was slow, and two others."""
    store, tried, later = ResultFolder(tmp_path / "tuned", FACTS | {"first": 2}, False), a_run(svip=9.0), a_run()
    for answer in later:
        answer.prompt, answer.unit = answer.prompt + 2, answer.unit + 2
    later = [answer for answer in later if answer.arm in ("target", "svip")]
    for unit in range(4):
        store.add(1, unit, [answer for answer in tried + later if answer.unit == unit])
    store.finish(compute_metrics(later, ARMS), compute_metrics(tried, ARMS), advice="use svip")
    found = read_folder(tmp_path / "tuned")
    certificate, trial = found.parts
    assert [arm.prompts for arm in certificate.metrics + trial.metrics] == [2] * 6
    assert certificate.metrics[1].of_target.value == pytest.approx(3) and trial.metrics[
        2
    ].of_target.value == pytest.approx(1 / 3)
    for page in (html([found]), markdown([found])):
        assert 0 < page.index("prompts, certificate") < page.index("prompts, trial")
    lines = (tmp_path / "tuned" / "summary.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:4]] == [
        ["trial", "target"],
        ["trial", "assisted"],
        ["trial", "svip"],
    ]
    assert lines[0].startswith("part,arm,") and [line.split(",")[0] for line in lines[5:]] == ["certificate"] * 2


def test_columns_without_a_figure_are_left_out():
    table = Table("t", ["", "a", "b", "c"], [["x", "–", "1", "–"], ["y", "–", "–", "–"]])
    assert (table.heads, table.rows) == (["", "b"], [["x", "1"], ["y", "–"]])


def test_what_is_below_float32_is_lossless_up_to_rounding(folder):
    found = read_folder(folder)
    found.record["dtype"] = "bfloat16"
    lines = markdown([found]).partition("share of rounds")[0].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
    assert "lossless up to rounding" in rows["svip"] and "| lossy |" in rows["top_k:k=4"]
    assert "| lossless |" in rows["target"]


def test_a_text_keeps_every_character():
    text = group_by_source("t", ["a", "<i>", "\n", "&"], [0, 1, 1, 2])
    assert text.runs == [("draft", "a"), ("draft-lossy", "<i>\n"), ("correction", "&")]
    assert group_by_source("t", ["a", "b"], []).runs == [("target alone", "ab")]


def test_a_chart_names_every_point():
    """All texts equal, so all points on one level; a name may be anything, "$" included."""
    points = [(f"p{i}$^", x, 1.0, None if i else (0.8, 1.0)) for i, x in enumerate([10, 90, 50.0, 50.0, 89])]
    figure = draw_speed_and_quality(points, "right answers")
    figure.canvas.draw()
    [legend] = figure.legends
    assert [text.get_text().replace("\\$", "$") for text in legend.get_texts()] == [name for name, *_ in points]
    assert figure.axes[0].get_xlim()[0] == 0


@pytest.mark.full
def test_a_damaged_folder_is_one_line(folder, hf_lossy, tmp_path):
    assert "holds no run.json" in hf_lossy("report", tmp_path / "none").line
    file = folder / "answers.jsonl"
    file.write_text(file.read_text().replace('"new_tokens": [40]', '"new_tokens": [41]', 1))
    assert re.search(r"answers.jsonl, line \d+ is damaged", hf_lossy("report", folder).line)


@pytest.mark.parametrize("missing", ["arms", "source", "target", "machine"])
def test_a_folder_of_another_version_is_one_line(tmp_path, hf_lossy, missing):
    """Its record lacks what this version reads, or its answers do."""
    store = ResultFolder(tmp_path / "found", {name: value for name, value in FACTS.items() if name != missing}, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in a_run() if answer.unit == unit])
    store.finish(compute_metrics(a_run(), ARMS))
    assert "was not written by this version of compare or tune" in hf_lossy("report", tmp_path / "found").line


def test_names_act_nowhere(tmp_path):
    """Names of models, policies and folders may be anybody's."""
    wild = 'a|b](http://x) <img src=x onerror=alert(1)> `c` "d"'
    arms = [Arm(wild if arm.name == "svip" else arm.name, print, arm.kind, arm.policy) for arm in ARMS]
    answers = a_run()
    for answer in answers:
        answer.arm = wild if answer.arm == "svip" else answer.arm
    facts = FACTS | {
        "target": {"id": wild},
        "source": wild,
        "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in arms},
    }
    store = ResultFolder(tmp_path / wild.replace("/", ""), facts, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(compute_metrics(answers, arms), advice={"1": f"use {wild}"})
    found = read_folder(tmp_path / wild.replace("/", ""))
    text = markdown([found])
    assert "<" not in text.replace("<!-- -->", "") and "](" not in text and "`" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {15}
    checked = Checked()
    checked.feed(html([found]))  # refuses what acts
    assert checked.open == []


def test_the_command(folder, hf_lossy, tmp_path):
    done = hf_lossy("report", folder, "--out", tmp_path / "page.html")
    assert done.code == 0 and (tmp_path / "page.html").read_text() == html([read_folder(folder)])
    assert hf_lossy("report", folder, "--out", tmp_path / "page.md").code == 0
    assert (
        "expected a name that ends in .html or .md" in hf_lossy("report", folder, "--out", tmp_path / "page.pdf").line
    )


def metrics(**changes):
    generator = np.random.default_rng(0)
    scores = generator.beta(0.6, 0.3, 30_000)
    return FIGURES | {
        "auroc": 0.8712, "auroc_low": 0.8512, "auroc_high": 0.8899,
        CURVES: compute_curves(scores, scores, generator.random(len(scores)) < scores).to_dict(),
    } | changes  # fmt: skip


def write_head(where, **changes):
    linear(full_config(**({"metrics": metrics()} | changes))).save_pretrained(where)
    return where


@pytest.mark.nightly
def test_a_head_with_curves(tmp_path):
    found = read_folder(write_head(tmp_path / "head"))
    page = html([found])
    text, curves = read_page(page), found.curves
    for line in (
        "What the heads are worth",
        "AUROC 0.871 (95 %: 0.851–0.890;",
        f"{curves.positives} acceptable and {curves.negatives} unacceptable held-out tokens",
        "it says P(acceptable): q(x) ≤ 1.2·p(x); org/target with org/draft",
        "Wilson's intervals, as if the tokens of one text were independent",
    ):
        assert line in text, line
    assert curves.positives + curves.negatives == 30_000
    assert page.count("<img src=") == 2
    for bin_ in curves.reliability:
        row = [
            f"{bin_.mean:.3f}",
            str(bin_.tokens),
            f"{bin_.share.value:.3f}",
            f"{bin_.share.low:.3f}–{bin_.share.high:.3f}",
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
    found = read_folder(write_head(tmp_path / "head", metrics=metrics(**wild), label="<img src=x onerror=y>"))
    page = html([found])
    checked = Checked()
    checked.feed(page)  # refuses tags that act
    assert checked.open == [] and "no better than chance <script>" in checked.text and "few & <b>" in checked.text
    assert "**few &#38; &#60;b&#62;**" in markdown([found]) and "(no interval;" in checked.text


@pytest.mark.full(every=3)
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
    head = write_head(tmp_path / "head")
    edit(head, metrics=metrics(**changes))
    assert "config.json: metrics: " in refused(lambda: read_folder(head), says)
    assert (
        says in hf_lossy("report", head, "--out", tmp_path / "page.html").line
        and not (tmp_path / "page.html").exists()
    )


def test_a_head_of_other_weights_is_refused(tmp_path):
    head = write_head(tmp_path / "head")
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:-1])
    refused(lambda: read_folder(head), "model.safetensors")
