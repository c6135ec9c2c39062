"""What the tests of a program say of it, with the real runner: endless loops, many threads, programs to be completed."""

import gzip
import json
import threading

import pytest
from support.task_files import ANY, in_thread, rows

from hf_lossy_assist.tasks.code import why_no_sandbox
from hf_lossy_assist.tasks.load import CodeTask, load_task


ALLOWED = {"allow_code_execution": True, "sandbox": why_no_sandbox() is None}
ADD = {
    "prompt": 'def add(a: int, b: int) -> int:\n    """The sum of a and b."""\n',
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(0, 0) == 0\n",
    "entry_point": "add",
}


@pytest.fixture
def code(tmp_path):
    return CodeTask(rows(tmp_path / "code.jsonl", ADD), timeout=2.0, **ALLOWED)


FENCED = "Sure, here it is:\n\n```python\n{}\n```\n\nIt adds `a` and `b`."


@pytest.mark.full(every=4)
@pytest.mark.parametrize(
    "response, answer",
    [
        (FENCED.format("def add(a, b):\n    return a + b"), "passed"),
        (FENCED.format("    return a + b"), "passed"),
        (FENCED.format("return a + b"), "passed"),
        (FENCED.format("import math\n\ndef add(a, b):\n    return int(math.fsum([a, b]))"), "passed"),
        ("def add(a, b):\n    return a + b\n", "passed"),
        ("    return a + b\n", "passed"),
        ("1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", "passed"),
        (FENCED.format("def add(a, b):\n    return a + b") + "\n```python\nprint(add(1, 2))\n```", "passed"),
        (
            FENCED.format("def add(a, b):\n    return a * b") + "\nBetter:\n```\ndef add(a, b):\n    return a + b",
            "passed",
        ),
        (FENCED.format("def add(a, b):\n    return a - b"), "failed"),
        (FENCED.format("def add(a, b):\n    raise KeyError('no\\nway')"), "failed: 'no\\nway'"),
        (FENCED.format("def add(a, b) return a + b"), "failed: expected ':'"),
        (FENCED.format("def add(a, b):\n    exit()"), "failed: None"),
        (FENCED.format("def add(a, b):\n    import os\n    os._exit(0)"), "failed: it ended before its tests did"),
        (FENCED.format("def add(a, b):\n    return len(b' ' * (1 << 40))"), "failed"),
        (FENCED.format(""), None),
        ("I would rather not write a program.", None),
        ("", None),
    ],
)
def test_what_the_tests_say_is_the_answer(code, response, answer):
    found = code.extract(code.problems()[0], response)
    assert found is None if answer is None else found is not None and found.startswith(answer)


@pytest.mark.full
def test_an_endless_loop_has_failed_in_any_thread(code):
    problem = code.problems()[0]
    quick = CodeTask(code.path, timeout=0.5, **ALLOWED)
    endless = FENCED.format("def add(a, b):\n    while True:\n        pass")
    assert in_thread(lambda: quick.extract(problem, endless)) == "failed: timed out"
    stubborn = FENCED.format(
        "def add(a, b):\n    while True:\n        try:\n            add(a, b)\n        except BaseException:\n            pass"
    )
    assert quick.extract(problem, stubborn) == "failed: timed out"
    assert quick.extract(problem, "    return a + b") == "passed"


def test_programs_in_many_threads_do_not_mix(code):
    problem, found = code.problems()[0], {}

    def run(i):
        found[i] = code.extract(problem, f"    return a {'+-'[i % 2]} b")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] == "passed" for i in range(6)] == [True, False] * 3


def test_programs_are_equivalent_when_both_pass_or_both_do_not(code):
    assert code.slow and not code.against_running
    assert code.same(ANY, "failed: invalid syntax", "failed: timed out") and code.same(ANY, "passed", "passed")
    assert not code.same(ANY, "passed", "failed") and not code.same(ANY, "failed", "passed")
    problem = code.problems()[0]
    assert code.right(problem, "passed") is True and code.right(problem, "failed") is False
    assert code.right(problem, None) is None


def test_programs_to_be_completed(code):
    task = CodeTask(code.path, timeout=2.0, chat=False, **ALLOWED)
    problem = task.problems()[0]
    assert problem.prompt == ADD["prompt"]
    assert task.extract(problem, "    return a + b\n\nprint(add(1, 2))\nnonsense here") == "passed"
    assert task.extract(problem, "\n    s = a\n    return s + b\n\ndef add(a, b):\n    return 0") == "passed"
    assert task.extract(problem, "    return a + b\n```\n\nIt adds.") == "passed"
    assert task.extract(problem, FENCED.format("def add(a, b):\n    return a + b")) == "passed"
    assert task.extract(problem, "some words").partition(" (")[0] == "failed: invalid syntax"
    assert task.extract(problem, " \n") is None


def test_the_rows_of_human_eval():
    task = load_task("code", **ALLOWED)
    problems = task.problems()
    assert len(problems) == 164
    row = problems[0].extra
    assert row["prompt"].rstrip() in problems[0].prompt and "test" in row
    answer = task.extract(
        problems[0], "    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])"
    )
    assert answer == "passed"


def test_code_rows_may_be_compressed_and_must_be_whole(tmp_path):
    with gzip.open(tmp_path / "code.jsonl.gz", "wt") as file:
        file.write(json.dumps(ADD))
    assert CodeTask(tmp_path / "code.jsonl.gz", **ALLOWED).problems()[0].gold == "passed"
    path = rows(tmp_path / "bad.jsonl", {"prompt": "def f():", "test": "pass"})
    with pytest.raises(ValueError, match="line 1: expected a text under 'entry_point', got the fields prompt, test"):
        CodeTask(path, **ALLOWED).problems()
