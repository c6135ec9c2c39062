"""The page of figures and texts, from a run whose every figure is known."""

import re

import pytest
from support.pages import Checked, read_page
from support.runs import ARMS, a_run

from hf_lossy_assist.evaluation.arms import Arm
from hf_lossy_assist.evaluation.chart import APART, NARROW, WIDE, Point, front, names_apart
from hf_lossy_assist.evaluation.figures import figures
from hf_lossy_assist.evaluation.report import html, markdown, read
from hf_lossy_assist.evaluation.scoring import Scores
from hf_lossy_assist.evaluation.store import Folder
from hf_lossy_assist.evaluation.text_view import legend, text_view


FACTS = {
    "target": {"id": "<T>"}, "draft": {"id": "D"}, "source": "demo", "machine": "a machine", "dtype": "float32",
    "arms": {arm.name: {"kind": arm.kind, "lossless": arm.lossless} for arm in ARMS},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    store, answers = Folder(tmp_path / "found", FACTS, False), a_run(copies=2)
    for answer in answers:
        if answer.arm in ("svip", "top_k:k=4"):
            answer.pieces, answer.sources = ["<b>", " a", " b\n", "c"], [0, 0, 1, 3]
            answer.accept_lengths = [3, 1]
            answer.p, answer.q = [0.5, 0.25, 1e-7, 1.0], [0.75, 0.5, 0.125, 0.0]
            answer.heads = {"P(acceptable)": [0.9, 0.8, 0.1, None]}
    for unit in range(4):
        store.add(1, unit, [answer for answer in answers if answer.unit == unit])
    store.finish(figures(answers, ARMS), advice={"1": "use <svip>"})
    return tmp_path / "found"


def test_the_page(folder):
    page = html([read(folder)])
    shown = read_page(page)
    for text in (
        "use <svip>",
        "<T> with D",
        "6.00 (3.24–11.10)",
        "100 (69–144)",
        "top_k:k=4 (lossy)",
        "prompt 2, svip, wrong",
        "<b> a b",
    ):
        assert text in shown, text
    assert 'tabindex="0" title="draft-lossy, p 1e-07, q 0.125, P(acceptable) 0.1"' in page
    assert 'title="bonus, p 1, q 0"' in page and "prefers-color-scheme: dark" in page
    assert page.count("<circle") == 2 * 4 and page.count("<details open>") == 1 and page.count("<details>") == 3


def test_markdown_says_the_same(folder):
    text = markdown([read(folder)])
    assert "**batch size 1: use &#60;svip&#62;**" in text and "&#60;T&#62; with D" in text
    row = next(line for line in text.splitlines() if line.startswith("| svip"))
    assert "| 50.0 (34.6–72.2) | 3.00 (1.62–5.55) | 2.00 | 5.00 | 80% | – | – | 4/4 | 2/4, 50%" in row


def test_a_search_is_judged_on_the_problems_of_its_certificate(tmp_path):
    """Two problems settings were tried on, where svip was slow, and two others."""
    store, tried, later = Folder(tmp_path / "tuned", FACTS | {"first": 2}, False), a_run(svip=9.0), a_run()
    for its in later:
        its.prompt, its.unit = its.prompt + 2, its.unit + 2
    later = [its for its in later if its.arm in ("target", "svip")]
    for unit in range(4):
        store.add(1, unit, [its for its in tried + later if its.unit == unit])
    store.finish(figures(later, ARMS), figures(tried, ARMS), advice="use svip")
    found = read(tmp_path / "tuned")
    certificate, trial = found.parts
    assert [its.prompts for its in certificate.figures + trial.figures] == [2] * 6
    assert certificate.figures[1].of_target.value == pytest.approx(3) and trial.figures[
        2
    ].of_target.value == pytest.approx(1 / 3)
    for said in (html([found]), markdown([found])):
        assert (
            0
            < said.lower().index("prompts, certificate" if "<h3>" in said else "1, certificate")
            < said.index(", trial")
        )
    lines = (tmp_path / "tuned" / "summary.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:4]] == [
        ["trial", "target"],
        ["trial", "assisted"],
        ["trial", "svip"],
    ]
    assert lines[0].startswith("part,arm,") and [line.split(",")[0] for line in lines[5:]] == ["certificate"] * 2


def test_a_text_keeps_every_character():
    view = text_view(["a", "<i>", "\n", "&"], [0, 1, 1, 2])
    assert re.sub(r"<[^>]*>", "", view) == "a&lt;i&gt;\n&amp;"
    assert re.findall(r'span class="(\w+)">', view) == ["draft", "lossy", "correction"]


def test_each_token_says_what_is_known_of_it():
    scores = Scores([0.5, 0.12345], [], {"P(important)": [None, 0.75]})
    titles = lambda view: re.findall(r'class="t" tabindex="0" title="([^"]*)"', view)  # noqa: E731
    assert titles(text_view(["a", "b"], [2, 1], scores)) == [
        "correction, p 0.5",
        "draft-lossy, p 0.123, P(important) 0.75",
    ]
    assert titles(text_view(["a", "b"], [2, 0])) == ["correction", "draft"]
    alone = text_view(["a", "b"], [], Scores([1.0, 0.25]))
    assert titles(alone) == ["target alone, p 1", "target alone, p 0.25"] and 'class="draft"' not in alone
    for source in ("draft", "draft-lossy", "correction", "bonus"):
        assert source in legend()


def test_names_that_meet_are_moved_apart():
    for frame in (WIDE, NARROW):
        for levels in ([100.0] * 6, [30.0, 31.0, 200.0, 201.0], [frame.height - 41.0] * 5, [16.0] * 3):
            placed = sorted(names_apart(levels, frame))
            assert all(b - a >= APART - 1e-9 for a, b in zip(placed, placed[1:], strict=False))
            assert min(placed) >= 0 and max(placed) <= frame.height
    assert names_apart([50.0, 150.0]) == [50.0, 150.0]


def test_points_that_meet_have_names_of_their_own():
    """All texts equal, so all points on one level: one line each, and none crosses another."""
    points = [Point(f"p{i}", x, 1.0, None, None, i % 2 == 0) for i, x in enumerate([10, 90, 50.0, 50.0, 89])]
    wide, narrow, key = front(points, "right answers").split("</svg>")
    for chart, names in ((wide, ["p0", "p1 (lossy)", "p2", "p3 (lossy)", "p4"]), (narrow, list("12345"))):
        lines = re.findall(r'class="lead" x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)"', chart)
        placed = re.findall(r'<circle[^>]*cx="([\d.]+)"[^>]*/>\n<text x="[\d.]+" y="([\d.]+)">([^<]+)<', chart)
        assert sorted(name for *_, name in placed) == sorted(names) and len(lines) == 5
        by_place = sorted((float(y), -float(x)) for x, y, _ in placed)
        assert [x for _, x in by_place] == sorted(x for _, x in by_place), (
            "a name stands above that of a point further right"
        )
        assert all(b[0] - a[0] >= APART - 0.11 for a, b in zip(by_place, by_place[1:], strict=False))
    long = [Point("sprinter:head=" + "x" * 60, 1.0, 1.0, None, None, False)]
    assert "sprinter:head=x…xxxxxxxx (lossy)<" in front(long, "x") and long[0].name in front(long, "x")
    assert re.findall("<li>([^<]+)</li>", key) == ["p0", "p1 (lossy)", "p2", "p3 (lossy)", "p4"]


def test_a_chart_grows_with_its_names():
    many = [Point(f"p{i}", 1.0 + i, 0.5, 0.4, 0.6, True) for i in range(40)]
    height = float(re.search(r'viewBox="0 0 760 (\d+)"', front(many, "x"))[1])
    placed = [float(y) for y in re.findall(r'<text x="[\d.]+" y="([\d.]+)">p\d+<', front(many, "x"))]
    assert len(placed) == 40 and max(placed) < height and WIDE.height < height


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
    checked = Checked()
    checked.feed(html([found]))  # refuses what acts
    assert checked.open == []


def test_the_command(folder, hf_lossy, tmp_path):
    done = hf_lossy("report", folder, "--out", tmp_path / "page.html")
    assert done.code == 0 and (tmp_path / "page.html").read_text() == html([read(folder)])
    assert hf_lossy("report", folder, "--out", tmp_path / "page.md").code == 0
    assert (
        "expected a name that ends in .html or .md" in hf_lossy("report", folder, "--out", tmp_path / "page.pdf").line
    )
