"""The page of figures and heads, from runs and heads whose every figure is known."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from support.heads import FIGURES, edit, full_config, linear, save
from support.refusals import refused
from support.runs import ARMS, a_run

from hf_lossy_assist.evaluation.metrics import compute_metrics
from hf_lossy_assist.evaluation.report_page import PNG, read_section, render_page
from hf_lossy_assist.evaluation.results import ResultFolder


DATA = "data:image/png;base64,"
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
    assert checked.open == []
    return checked.text


FACTS = {
    "target": {"id": "<T>"}, "drafts": ["D"], "source": "demo", "machine": "a machine", "target_dtype": "float32",
    "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in ARMS},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    store, answers = ResultFolder(tmp_path / "found", FACTS, False), a_run(copies=2)
    for unit in range(4):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(compute_metrics(answers, ARMS), advice={"1": "use <svip>"})
    return tmp_path / "found"


def test_the_page(folder):
    page = render_page([folder])
    shown = read_page(page)
    assert not REQUESTS.search(page.replace(f'src="{DATA}', ""))
    for text in (
        "batch size 1: use <svip>",
        "<T> with D",
        "6.00 (3.24–11.10)",
        "100 (69–144)",
        "batch size 1, 4 prompts",
    ):
        assert text in shown, text
    assert page.count("<img src=") == 1
    [table] = read_section(folder).tables
    assert "first, ms" in table.columns and "95 %" in table.columns and len(table.columns) == 14
    [row] = [row for row in table.rows if row[0] == "svip"]
    assert row[1:4] == ["50.0 (34.6–72.2)", "3.00 (1.62–5.55)", "2.00"] and row[-3:-1] == ["2/4", "15%–85%"]


def test_control_characters_are_shown_by_their_codes(folder):
    page = render_page([folder.rename(folder.with_name("a\x1b[2J\u202e"))])
    assert "a\\x1b[2J\\u202e" in read_page(page) and "\x1b" not in page and "\u202e" not in page


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
    certificate, trial = read_section(tmp_path / "tuned").tables
    assert certificate.title == "batch size 1, 2 prompts, certificate" and trial.title.endswith("prompts, trial")
    speeds = [next(row[2] for row in table.rows if row[0] == "svip") for table in (certificate, trial)]
    assert speeds == ["3.00", "0.33"]
    lines = (tmp_path / "tuned" / "summary.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:4]] == [
        ["trial", "target"],
        ["trial", "assisted"],
        ["trial", "svip"],
    ]
    assert lines[0].startswith("part,arm,") and [line.split(",")[0] for line in lines[5:]] == ["certificate"] * 2


@pytest.mark.full
def test_a_damaged_folder_is_one_line(folder, hf_lossy, tmp_path):
    assert "holds no run.json" in hf_lossy("report", tmp_path / "none").line
    file = folder / "answers.jsonl"
    file.write_text(file.read_text()[:-20])
    assert re.search(r"answers.jsonl, line \d+", hf_lossy("report", folder).line)


@pytest.mark.parametrize("missing", ["arms", "source"])
def test_a_folder_of_another_version_is_one_line(tmp_path, hf_lossy, missing):
    """Its record lacks what this version reads."""
    store = ResultFolder(tmp_path / "found", {name: value for name, value in FACTS.items() if name != missing}, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in a_run() if answer.unit == unit])
    store.finish(compute_metrics(a_run(), ARMS))
    assert "was not written by this version of compare or tune" in hf_lossy("report", tmp_path / "found").line


def test_names_act_nowhere(tmp_path):
    """Names of models, policies and folders may be anybody's, "$" included."""
    wild = '$a^|b](http:) <img src=x onerror=alert(1)> `c` "d"'
    arms = [replace(arm, name=wild) if arm.name == "svip" else arm for arm in ARMS]
    answers = a_run()
    for answer in answers:
        answer.arm = wild if answer.arm == "svip" else answer.arm
    facts = FACTS | {
        "target": {"id": wild},
        "source": wild,
        "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in arms},
    }
    store = ResultFolder(tmp_path / wild, facts, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(compute_metrics(answers, arms), advice={"1": f"use {wild}"})
    assert f"use {wild}" in read_page(render_page([tmp_path / wild]))  # refuses what acts


def test_a_head_and_the_pictures_that_fit_wrote_of_it(tmp_path, hf_lossy):
    wild = {"auroc": 0.8712, "verdict": "no better than chance <script>alert(1)</script>"}
    head = tmp_path / "head"
    linear(full_config(metrics=FIGURES | wild, label="<img src=x onerror=y>")).save_pretrained(head)
    (head / "roc.png").write_bytes(PNG + b"rest")
    (head / "reliability.png").write_bytes(b"<svg>anything else</svg>")
    done = hf_lossy("report", head, "--out", tmp_path / "page.html")
    assert done.code == 0, done
    page = (tmp_path / "page.html").read_text()
    text = read_page(page)
    assert "auroc 0.871" in text and "org/target with org/draft" in text and "no better than chance <script>" in text
    assert page.count("<img src=") == 1  # what is no picture is not shown
    edit(head, metrics={"auroc": "<b>"})
    assert "no AUROC in its config" in read_page(render_page([head]))
    head = save(tmp_path / "other")
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:-1])
    refused(lambda: read_section(head), "model.safetensors")
