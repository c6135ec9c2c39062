"""ROUGE and wins and ties of texts that were compared, with the real rouge-score and a judge on loopback."""

import json

import pytest
from support.openai_server import OpenAIServer

from hf_lossy_assist.cli._printing import show_quality
from hf_lossy_assist.evaluation.quality import Quality, check_references, compute_quality
from hf_lossy_assist.evaluation.writer import ArmOutput
from hf_lossy_assist.stats.intervals import Estimate
from hf_lossy_assist.tasks.base import Problem
from hf_lossy_assist.tasks.endpoint import Endpoint
from hf_lossy_assist.tasks.qa import QATask, _make_scorer, compute_rouge


REFERENCE = "the cat sat on the mat"
PROBLEMS = [Problem("Go on:", None, {"reference": REFERENCE}) for _ in range(4)]
PROMPTS = ["Go on:"] * 4


def wrote(arm, *texts, size=1):
    return [ArmOutput(arm, i, size, i, text, [1, 2], 0.1) for i, text in enumerate(texts)]


@pytest.fixture
def judge(monkeypatch):
    """`judge(prefers)`: a task whose judge replies what `prefers(a, b)` says."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with OpenAIServer(model="judge") as server, Endpoint(server.url, "judge", retries=0) as endpoint:

        def of(prefers, **settings):
            def chat(messages, max_tokens, body):
                a, b = messages[1]["content"].partition("# Reply A\n\n")[2].split("\n\n# Reply B\n\n")
                return prefers(a, b), "stop"

            server.chat = chat
            return QATask([], endpoint, **settings)

        of.server = server
        yield of


def longer(a, b):
    return "[[A=B]]" if len(a) == len(b) else "[[A>B]]" if len(a) > len(b) else "[[B>A]]"


def test_rouge():
    assert compute_rouge(REFERENCE, REFERENCE) == (1.0, 1.0, 1.0) and compute_rouge(REFERENCE, "") == (0.0, 0.0, 0.0)
    found = compute_rouge(REFERENCE, "the cat")  # precision 1; recall 2 of 6 words, 1 of 5 pairs, 2 of 6
    assert found == pytest.approx((0.5, 2 * 0.2 / 1.2, 0.5))


def test_rouge_without_its_library_is_one_line(monkeypatch):
    _make_scorer.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ROUGE needs rouge-score: pip install 'hf_lossy_assist\[eval\]'"):
        compute_rouge("a", "b")


def test_wins_ties_and_losses_in_both_orders(judge):
    base = wrote("strict", "good text", "same", "some words", "words")
    other = wrote("lossy", "a much better text", "same", "word", "verbs")
    [lossy] = compute_quality([*base, *other], PROMPTS, ["strict"], judge=judge(longer))
    assert (lossy.wins, lossy.ties, lossy.losses, lossy.unreadable) == (1, 2, 1, 0)
    assert lossy.win_tie.value == 0.75 and lossy.win_tie.low < 0.75 < lossy.win_tie.high
    assert len(judge.server.requests) == 2 * 3  # equal texts are a tie that nobody is asked for
    assert lossy.reference == "strict" and 0 < lossy.rouge["rougeL"].value < 1


def test_a_judge_that_prefers_a_place_finds_ties_alone(judge):
    found = compute_quality(
        [*wrote("a", "one"), *wrote("b", "two")], PROMPTS, ["a"], judge=judge(lambda a, b: "[[A>>B]]")
    )
    assert [(row.wins, row.ties, row.losses) for row in found] == [(0, 1, 0)]


def test_a_judge_without_verdict_counts_for_nothing(judge):
    unclear = judge(lambda a, b: "Hm.", attempts=1)
    [found] = compute_quality([*wrote("a", "one"), *wrote("b", "two")], PROMPTS, ["a"], judge=unclear)
    assert (found.wins, found.ties, found.losses, found.unreadable, found.win_tie) == (0, 0, 0, 1, None)


def test_means_by_arm_and_batch_size():
    texts = [*wrote("a", REFERENCE, "the cat"), *wrote("a", "nothing", "nothing", size=2)]
    one, two = compute_quality(texts, PROMPTS, ["task"], problems=PROBLEMS)
    assert one.rouge["rougeL"].value == pytest.approx(0.75) and two.rouge["rougeL"].value == 0
    assert one.to_dict()["rouge1"] == pytest.approx(0.75) and one.to_dict()["win_tie"] is None
    assert compute_quality(wrote("a", "b"), PROMPTS, ["task"], problems=[Problem("?")])[0].rouge == {}


def test_a_judge_does_not_see_the_tasks_texts(judge):
    [found] = compute_quality(wrote("a", "the cat"), PROMPTS, ["task"], problems=PROBLEMS, judge=judge(longer))
    assert found.win_tie is None and not judge.server.requests


def test_references_that_are_none_are_refused():
    check_references(["task", "a"], ["a", "b"], PROBLEMS)
    with pytest.raises(ValueError, match=r"^--reference: expected task or an arm \(a, b\), got c$"):
        check_references(["c"], ["a", "b"], PROBLEMS)
    for problems in ([], [Problem("?")]):
        with pytest.raises(ValueError, match="^--reference task: these prompts come with no reference texts: [^\n]*$"):
            check_references(["task"], ["a"], problems)


@pytest.mark.full
def test_the_command(hf_lossy, tmp_path, judge):
    judge(longer)
    found = tmp_path / "found"
    small = ("--limit", 2, "--max-new-tokens", 8, "--no-static", "--policies", "svip")
    options = ("--judge-url", judge.server.url, "--judge-model", "judge")
    done = hf_lossy("compare", *small, "--reference", "task,target", *options, "--out", found, "--json")
    rows = {(row["arm"], row["reference"]): row for row in done.json["quality"]}
    svip = rows["svip", "target"]
    assert svip["ties"] == 2 and svip["win_tie"] == svip["rougeL"] == 1  # lossless: the target's own texts
    assert rows["target", "task"]["rougeL"] == rows["svip", "task"]["rougeL"] > 0
    assert ("target", "target") not in rows
    assert json.loads((found / "run.json").read_text())["found"]["quality"] == done.json["quality"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many"}\n')
    prompts = ("compare", "--prompts", tmp_path / "prompts.jsonl", *small)
    assert hf_lossy(*prompts, "--reference", "target", "--json").json["quality"][-1]["arm"] == "svip"
    assert "these prompts come with no reference texts" in hf_lossy(*prompts, "--reference", "task").line
    assert "expected task or an arm (target" in hf_lossy("compare", *small, "--reference", "judge").line
    assert "pass --reference" in hf_lossy("compare", *small, *options).line
    lonely = ("--reference", "target", "--judge-url", judge.server.url)
    assert "needs --judge-url and --judge-model" in hf_lossy("compare", *small, *lonely).line


def test_the_table_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    figure = Estimate(0.123, 0.111, 0.134)
    compute_rouge = dict.fromkeys(("rouge1", "rouge2", "rougeL"), figure)
    arm = f"autojudge:head=/a/{'Z' * 70},threshold=0.123456"
    show_quality(
        [Quality(arm, 8, "strict", 100, compute_rouge, 20, 70, 10, 0, figure), Quality("svip", 8, "task", 100, {})]
    )
    shown = capsys.readouterr().out
    assert "…" not in shown and shown.count("Z") == 140 and max(map(len, shown.splitlines())) <= 80
    assert "0.12 (0.11–0.13)" in shown and "12% (11%–13%)" in shown
