"""ROUGE and wins and ties of texts that were compared, with the real rouge-score and a judge on loopback."""

import pytest
from support.openai_server import OpenAIServer

from hf_lossy_assist.evaluation.measuring import Answer
from hf_lossy_assist.evaluation.quality import qualities
from hf_lossy_assist.tasks import answers as answers_module
from hf_lossy_assist.tasks.answers import Problem
from hf_lossy_assist.tasks.endpoint import Endpoint
from hf_lossy_assist.tasks.judging import QATask
from hf_lossy_assist.tasks.rouge import _scorer, rouge


pytestmark = pytest.mark.slow

REFERENCE = "the cat sat on the mat"
PROBLEMS = [Problem("Go on:", None, {"reference": REFERENCE}) for _ in range(4)]


def wrote(arm, *texts, size=1):
    return [Answer(arm, i, size, i, text, [1, 2], 0.1) for i, text in enumerate(texts)]


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
    assert rouge(REFERENCE, REFERENCE) == (1.0, 1.0, 1.0) and rouge(REFERENCE, "") == (0.0, 0.0, 0.0)
    found = rouge(REFERENCE, "the cat")  # precision 1; recall 2 of 6 words, 1 of 5 pairs, 2 of 6
    assert found == pytest.approx((0.5, 2 * 0.2 / 1.2, 0.5))


def test_rouge_without_its_library_is_one_line(monkeypatch):
    _scorer.cache_clear()
    monkeypatch.setattr(answers_module, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ROUGE needs rouge-score: pip install 'hf_lossy_assist\[eval\]'"):
        rouge("a", "b")


def test_wins_ties_and_losses_in_both_orders(judge):
    base = wrote("strict", "good text", "same", "some words", "words")
    other = wrote("lossy", "a much better text", "same", "word", "verbs")
    strict, lossy = qualities([*base, *other], PROBLEMS, judge=judge(longer), against="strict")
    assert (lossy.wins, lossy.ties, lossy.losses, lossy.unreadable) == (1, 2, 1, 0)
    assert lossy.win_tie.value == 0.75 and lossy.win_tie.low < 0.75 < lossy.win_tie.high
    assert len(judge.server.asked) == 2 * 3  # equal texts are a tie that nobody is asked for
    assert strict.win_tie is None and strict.wins == 0


def test_a_judge_that_prefers_a_place_finds_ties_alone(judge):
    found = qualities(
        [*wrote("a", "one"), *wrote("b", "two")], PROBLEMS, judge=judge(lambda a, b: "[[A>>B]]"), against="a"
    )
    assert (found[1].wins, found[1].ties, found[1].losses) == (0, 1, 0)


def test_a_judge_without_verdict_counts_for_nothing(judge):
    asked = judge(lambda a, b: "Hm.", attempts=1)
    found = qualities([*wrote("a", "one"), *wrote("b", "two")], PROBLEMS, judge=asked, against="a")[1]
    assert (found.wins, found.ties, found.losses, found.unreadable, found.win_tie) == (0, 0, 0, 1, None)


def test_means_by_arm_and_batch_size():
    texts = [*wrote("a", REFERENCE, "the cat"), *wrote("a", "nothing", "nothing", size=2)]
    one, two = qualities(texts, PROBLEMS)
    assert one.rouge["rougeL"].value == pytest.approx(0.75) and two.rouge["rougeL"].value == 0
    assert one.to_dict()["rouge1"] == pytest.approx(0.75) and one.to_dict()["win_tie"] is None
    assert qualities(wrote("a", "b"), [Problem("?")])[0].rouge == {}
    with pytest.raises(ValueError, match=r"against: expected an arm that wrote these texts \(a\), got b"):
        qualities(wrote("a", "b"), PROBLEMS, judge=QATask([]), against="b")


def test_the_command(hf_lossy, tmp_path, judge):
    judge(longer)
    found = tmp_path / "found"
    small = ("--limit", 2, "--max-new-tokens", 8, "--no-static", "--policies", "svip")
    assert hf_lossy("compare", *small, "--out", found).code == 0
    asked = ("--judge-url", judge.server.url, "--judge-model", "judge")
    done = hf_lossy("quality", found, "--json", *asked)
    rows = {row["arm"]: row for row in done.json["quality"]}
    assert rows["svip"]["ties"] == 2 and rows["svip"]["win_tie"] == 1  # lossless: the target's own texts
    assert rows["target"]["rougeL"] == rows["svip"]["rougeL"] > 0
    shown = hf_lossy("quality", found)
    assert shown.code == 0 and "ROUGE-L" in shown.out
    assert "demo has other problems now than when it was compared on" in hf_lossy("quality", found, "--seed", 1).line
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "How many"}\n')
    assert hf_lossy("compare", "--prompts", tmp_path / "prompts.jsonl", *small, "--out", tmp_path / "other").code == 0
    assert "was compared on prompts without a task" in hf_lossy("quality", tmp_path / "other").line
    assert "was compared on demo, not on gsm8k" in hf_lossy("quality", found, "--task", "gsm8k").line
    assert "needs --judge-url and --judge-model" in hf_lossy("quality", found, "--judge-url", judge.server.url).line
