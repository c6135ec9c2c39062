"""The page of figures and texts, from a run whose every figure is known."""

import re
from html.parser import HTMLParser

import pytest
from support.runs import ARMS, a_run

from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.chart import APART, HEIGHT, names_apart
from hf_lossy_assist.evaluation.figures import figures
from hf_lossy_assist.evaluation.report import html, markdown, read
from hf_lossy_assist.evaluation.store import Folder
from hf_lossy_assist.evaluation.text_view import text_view


FACTS = {
    "target": {"id": "<T>"}, "draft": {"id": "D"}, "source": "demo", "machine": "a machine", "dtype": "float32",
    "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in ARMS},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    store, answers = Folder(tmp_path / "found", FACTS, False), a_run()
    for answer in answers:
        if answer.arm in ("svip", "top_k:k=4"):
            answer.pieces, answer.sources = ["<b>", " a", " b\n", "c"], [0, 0, 1, 3]
            answer.accept_lengths = [3, 1]
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(figures(answers, ARMS), advice={"1": "use <svip>"})
    return tmp_path / "found"


class Checked(HTMLParser):
    """Every element that is opened is closed, and none asks another server for anything."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe") and not any(
            name in ("src", "href") or name.startswith("on") for name, _ in attrs
        )
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert not any(name in ("src", "href") for name, _ in attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page(folder):
    page = html([read(folder)])
    checked = Checked()
    checked.feed(page)
    assert checked.open == [] and "url(" not in page and "@import" not in page
    for text in (
        "use <svip>",
        "<T> with D",
        "6.00 (4.00–8.00)",
        "100 (80–120)",
        "top_k:k=4 (lossy)",
        "prompt 2, svip, wrong",
        "<b> a b",
    ):
        assert text in checked.text, text
    assert 'title="draft-lossy, 1 token"' in page and "prefers-color-scheme: dark" in page
    assert page.count("<circle") == 4


def test_markdown_says_the_same(folder):
    text = markdown([read(folder)])
    assert "**batch size 1: use &#60;svip&#62;**" in text and "&#60;T&#62; with D" in text
    row = next(line for line in text.splitlines() if line.startswith("| svip"))
    assert "| 50 (40–60) | 3.00 (2.00–4.00) | 2.00 | 5.00 | 80% | – | – | 2/2 | 1/2, 50%" in row


def test_a_text_keeps_every_character():
    view = text_view(["a", "<i>", "\n", "&"], [0, 1, 1, 2])
    assert re.sub(r"<[^>]*>", "", view) == "a&lt;i&gt;\n&amp;"
    assert [name for name in re.findall(r'span class="(\w+)" title', view)] == ["draft", "lossy", "correction"]


def test_names_that_meet_are_moved_apart():
    for levels in ([100.0] * 6, [30.0, 31.0, 200.0, 201.0], [HEIGHT - 41.0] * 5, [16.0] * 3):
        placed = sorted(names_apart(levels))
        assert all(b - a >= APART - 1e-9 for a, b in zip(placed, placed[1:], strict=False))
        assert min(placed) >= 0 and max(placed) <= HEIGHT
    assert names_apart([50.0, 150.0]) == [50.0, 150.0]


def test_a_damaged_folder_is_one_line(folder, hf_lossy, tmp_path):
    assert "holds no run.json" in hf_lossy("report", tmp_path / "none").line
    file = folder / "answers.jsonl"
    file.write_text(file.read_text().replace('"new_tokens": [40]', '"new_tokens": [41]', 1))
    assert re.search(r"answers.jsonl, line \d+ is damaged", hf_lossy("report", folder).line)


@pytest.mark.parametrize("missing", ["arms", "source", "target", "machine"])
def test_a_folder_of_another_version_is_one_line(tmp_path, hf_lossy, missing):
    """Its record lacks what this version reads, or its answers do."""
    store = Folder(tmp_path / "found", {name: value for name, value in FACTS.items() if name != missing}, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in a_run() if answer.unit == unit])
    store.finish(figures(a_run(), ARMS))
    assert "was not written by this version of compare or tune" in hf_lossy("report", tmp_path / "found").line


def test_names_act_nowhere(tmp_path):
    """Of models, of policies, of folders: each may be anybody's."""
    wild = 'a|b](http://x) <img src=x onerror=alert(1)> `c` "d"'
    arms = [Arm(wild if arm.name == "svip" else arm.name, print, arm.kind, arm.policy) for arm in ARMS]
    answers = a_run()
    for its in answers:
        its.arm = wild if its.arm == "svip" else its.arm
    facts = FACTS | {
        "target": {"id": wild},
        "source": wild,
        "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in arms},
    }
    store = Folder(tmp_path / wild.replace("/", ""), facts, False)
    for unit in (0, 1):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(figures(answers, arms), advice={"1": f"use {wild}"})
    found = read(tmp_path / wild.replace("/", ""))
    text = markdown([found])
    assert "<" not in text.replace("<!-- -->", "") and "](" not in text and "`" not in text
    assert {line.count("|") for line in text.splitlines() if line.startswith("|")} == {11}
    Checked().feed(html([found]))


def test_the_command(folder, hf_lossy, tmp_path):
    done = hf_lossy("report", folder, "--out", tmp_path / "page.html")
    assert done.code == 0 and (tmp_path / "page.html").read_text() == html([read(folder)])
    assert hf_lossy("report", folder, "--out", tmp_path / "page.md").code == 0
    assert (
        "expected a name that ends in .html or .md" in hf_lossy("report", folder, "--out", tmp_path / "page.pdf").line
    )
