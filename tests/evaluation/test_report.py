"""The page of figures, from runs whose every figure is known."""

import json
import re
from dataclasses import asdict
from html.parser import HTMLParser

import pytest
from support.runs import ARMS, a_run

from hf_lossy_assist.artifacts.files import write_text
from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.comparison import finish_run, open_run
from hf_lossy_assist.evaluation.metrics import compute_metrics


REQUESTS = re.compile(r"url\(|@import|https?:|\b(src|href|srcset|action)\s*=")


class Checked(HTMLParser):
    """Every element that is opened is closed, and none asks another server for anything."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "iframe")
        assert not any(name in ("href", "src") or name.startswith("on") for name, _ in attrs)
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
def page(hf_lossy, tmp_path):
    """Make the page of a run with these answers and facts; return its text, which acts nowhere and asks nobody for anything."""

    def make(answers, facts=FACTS, name="found", advice={"1": "use <svip>"}, **more):  # noqa: B006
        facts = FACTS | facts
        arms = [Arm(arm, **{key: facts["arms"][arm][key] for key in ("kind", "lossless")}) for arm in facts["arms"]]
        with open_run(tmp_path / name, facts) as run:
            write_text(run.part / "00001-000000.json", json.dumps({"answers": [asdict(answer) for answer in answers]}))
            certified = [answer for answer in answers if answer.prompt >= facts.get("first", 0)]
            finish_run(run, compute_metrics(certified, arms), advice=advice, **more)
        done = hf_lossy("report", tmp_path / name, "--out", tmp_path / "page.html")
        assert done.code == 0, done.err
        return read_page((tmp_path / "page.html").read_text())

    return make


def test_the_page(page, tmp_path):
    text = page(a_run(copies=2))
    assert not REQUESTS.search((tmp_path / "page.html").read_text())
    for words in (
        "batch size 1: use <svip>", "<T> with D", "6.00 (3.24–11.10)", "100 (69–144)", "batch size 1, 4 prompts",
    ):  # fmt: skip
        assert words in text, words
    for title in ("first, ms", "95 %", "50.0 (34.6–72.2)", "3.00 (1.62–5.55)", "15%–85%"):
        assert title in text, title
    text = page(a_run(), name="a\x1b[2J\u202e")
    assert "a\\x1b[2J\\u202e" in text and "\x1b" not in text and "\u202e" not in text


@pytest.mark.full
def test_a_search_is_judged_on_the_problems_of_its_certificate(page, tmp_path):
    """Two problems settings were tried on, where svip was slow, and two others."""
    tried, later = a_run(svip=9.0), a_run()
    for answer in later:
        answer.prompt, answer.unit = answer.prompt + 2, answer.unit + 2
    later = [answer for answer in later if answer.arm in ("target", "svip")]
    text = page(tried + later, {"first": 2}, trial=compute_metrics(tried, ARMS), advice="use svip")
    certificate, trial = text.split("batch size 1, 2 prompts, certificate")[1].split("batch size 1, 2 prompts, trial")
    assert re.search(r"svip +50\.0 +3\.00", certificate) and re.search(r"svip +5\.56 +0\.33", trial)
    lines = (tmp_path / "found" / "summary.csv").read_text().splitlines()
    assert lines[0].startswith("part,arm,") and [line.split(",")[0] for line in lines[5:]] == ["certificate"] * 2


@pytest.mark.full
def test_a_damaged_folder_is_one_line(page, hf_lossy, tmp_path):
    assert "none" in hf_lossy("report", tmp_path / "none").line
    page(a_run())
    file = tmp_path / "found" / "answers.jsonl"
    text = file.read_text()
    file.write_text(text[:-20])
    assert re.search(r"answers.jsonl, line \d+", hf_lossy("report", tmp_path / "found").line)
    file.write_text("")
    assert "answers.jsonl is empty" in hf_lossy("report", tmp_path / "found").line
    file.write_text(text.replace('"seconds"', '"wall_time"'))
    assert "was not written by this version" in hf_lossy("report", tmp_path / "found").line
    file.write_text(text)
    (tmp_path / "found" / "run.json").write_text("{}")
    assert "was not written by this version" in hf_lossy("report", tmp_path / "found").line


def test_names_act_nowhere(page):
    """Names of models, policies and folders may be anybody's."""
    wild = '$a^|b](http:) <img src=x onerror=alert(1)> `c` "d"'
    answers = a_run()
    for answer in answers:
        answer.arm = wild if answer.arm == "svip" else answer.arm
    arms = {wild if name == "svip" else name: arm for name, arm in FACTS["arms"].items()}
    assert f"use {wild}" in page(
        answers, {"target": {"id": wild}, "source": wild, "arms": arms}, wild, {"1": f"use {wild}"}
    )
