"""LiveCodeBench's rows, plain and packed, and what its tests say of a program, in the real runner."""

import base64
import json
import pickle
import zlib

import pytest
from support.hub_rows import fake_datasets
from support.task_files import rows

from hf_lossy_assist.tasks.contests import LiveCodeBench, unpacked
from hf_lossy_assist.tasks.tasks import task_named


# Where bubblewrap is missing, all but what tests/test_sandbox.py says of it is to hold.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:the task livecodebench runs programs with your rights:UserWarning"),
]

ALLOWED = {"allow_code_execution": True}
FENCED = "Here:\n\n```python\n{}\n```\nDone."


def packed(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def cases(kind, *pairs):
    return json.dumps([{"input": given, "output": wanted, "testtype": kind} for given, wanted in pairs])


SUM = {
    "question_content": "Print the sum of n numbers.",
    "starter_code": "",
    "difficulty": "easy",
    "platform": "atcoder",
    "question_id": "abc_a",
    "metadata": "{}",
    "public_test_cases": cases("stdin", ("2\n1 2\n", "3\n")),
    "private_test_cases": packed(cases("stdin", ("3\n1 2 3.5\n", "6.50\n\n"))),
}
PAIRS = {
    "question_content": "All pairs (a, b) of a in xs.",
    "starter_code": "class Solution:\n    def pairs(self, xs: List[int], b: str) -> List[List]:\n        ",
    "metadata": json.dumps({"func_name": "pairs"}),
    "public_test_cases": cases("functional", ('[1, 2]\n"b"', '[[1, "b"], [2, "b"]]')),
    "private_test_cases": cases("functional", ('[]\n"b"', "[]")),
}


@pytest.fixture
def contest(tmp_path):
    return LiveCodeBench(rows(tmp_path / "lcb.jsonl", SUM, PAIRS), timeout=3.0, **ALLOWED)


def test_rows_become_requests(contest):
    script, function = contest.problems()
    assert "standard input" in script.prompt and script.prompt.startswith("Print the sum") and script.gold == "passed"
    assert "```python\nclass Solution:" in function.prompt and "standard input" not in function.prompt
    assert (script.extra["difficulty"], script.extra["question_id"]) == ("easy", "abc_a")


@pytest.mark.parametrize(
    "place, program, answer",
    [
        (0, "n = int(input())\nprint(sum(map(float, input().split())))", "passed"),
        (0, "import sys\nn, *xs = sys.stdin.read().split()\nprint(sum(map(float, xs)))\nsys.exit()", "passed"),
        (0, "import sys\nxs = sys.stdin.buffer.read().split()[1:]\nsys.stdout.write(str(sum(map(float, xs))))", "passed"),
        (0, "from __future__ import annotations\ninput()\nprint(sum(Counter(map(int, input().split())).elements()))", "failed: inv"),
        (0, "input()\nprint(3)", "failed: test 2 of 2"),
        (0, "print(", "failed: '(' was never closed"),
        (1, "class Solution:\n    def pairs(self, xs: List[int], b: str):\n        return [(x, b) for x in xs]", "passed"),
        (1, "def pairs(xs, b):\n    return list(product(xs, b))", "passed"),
        (1, "def pairs(xs, b):\n    return []", "failed: test 1 of 2"),
        (1, "def other(xs, b):\n    return []", "failed: 'pairs'"),
    ],
)  # fmt: skip
def test_what_the_tests_say_is_the_answer(contest, place, program, answer):
    found = contest.extract(contest.problems()[place], FENCED.format(program))
    assert found is not None and found.startswith(answer)


def test_the_last_block_counts_and_none_is_no_answer(contest):
    problem = contest.problems()[0]
    right = "n = int(input())\nprint(sum(map(float, input().split())))"
    assert contest.extract(problem, FENCED.format("print(0)") + FENCED.format(right)) == "passed"
    assert contest.extract(problem, right) is None and contest.extract(problem, "") is None


def test_an_endless_program_has_failed(contest):
    quick = LiveCodeBench(contest.path, timeout=0.5, **ALLOWED)
    assert quick.extract(quick.problems()[0], FENCED.format("while True:\n    pass")) == "failed: timed out"


class Hostile:
    def __reduce__(self):
        return eval, ("1 / 0",)


def test_packed_tests_name_nothing():
    assert unpacked(packed("[1]"), "here") == [1] and unpacked(" [1]", "here") == [1]
    with pytest.raises(ValueError, match="here: the packed tests cannot be read: expected the pickle of a text"):
        unpacked(packed(Hostile()), "here")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("no base64!", "the packed tests cannot be read"),
        (base64.b64encode(b"no zlib").decode(), "the packed tests cannot be read"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "the packed tests cannot be read"),
        (packed([1]), "expected the pickle of a text"),
        (packed(["[1]"]), "expected the pickle of a text"),
        (packed(b"[1]"), "expected the pickle of a text"),
        (packed("{}"), r"expected a list of tests, got \{\}"),
        ("[", "here is not JSON"),
    ],
)
def test_packed_tests_that_are_none_are_one_line(text, expected):
    with pytest.raises(ValueError, match=expected) as excinfo:
        unpacked(text, "here")
    assert "here" in str(excinfo.value) and "\n" not in str(excinfo.value)


def test_packed_tests_have_a_limit(monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.tasks.contests.LARGEST", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes when unpacked"):
        unpacked(packed("[" + " " * 2000 + "]"), "here")


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"public_test_cases": "[]", "private_test_cases": "[]"}, "expected at least one test"),
        ({"public_test_cases": '[{"input": 1, "output": "a"}]'}, "line 1, public_test_cases: expected tests with the texts"),
        ({"public_test_cases": '[{"input": "1", "output": "a", "testtype": "x"}]'}, "expected tests with the texts"),
        ({"private_test_cases": None}, "line 1: expected a text under 'private_test_cases', got None"),
        ({"metadata": '{"func_name": 3}'}, "line 1: expected a function's name under 'func_name', got 3"),
        ({"question_content": None}, "line 1: expected a text under 'question_content'"),
    ],
)  # fmt: skip
def test_rows_that_lack_something(tmp_path, change, expected):
    with pytest.raises(ValueError, match=expected):
        LiveCodeBench(rows(tmp_path / "bad.jsonl", SUM | change), **ALLOWED).problems()


def test_by_name_from_the_hub_and_only_with_permission(monkeypatch):
    asked = fake_datasets(monkeypatch, [SUM])
    with pytest.raises(
        ValueError, match="the task livecodebench runs programs that a model wrote.*allow_code_execution"
    ):
        task_named("livecodebench")
    assert asked == []  # refused before anything is fetched
    task = task_named("livecodebench", **ALLOWED)
    assert task.problems()[0].extra["platform"] == "atcoder"
    assert asked == [(("lighteval/code_generation_lite", "release_v5"), {"split": "test"})]
