"""Programs that a model wrote: what their tests say, and those that mean ill, in the sandbox (where there is one) and without."""

import json
import os
import threading
import time
from pathlib import Path

import pytest
from support.task_files import ANY, rows

from hf_lossy_assist.tasks.code import CodeTask, why_no_sandbox
from hf_lossy_assist.tasks.load import load_task


PLACES = [False] if why_no_sandbox() else [True, False]
NAMES = {True: "sandbox", False: "bare"}
ROW = {
    "prompt": "def add(a, b):\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
    "entry_point": "add",
}


@pytest.fixture(params=PLACES, ids=NAMES.get)
def task(request, tmp_path):
    file = tmp_path / "code.jsonl"
    file.write_text(json.dumps(ROW))
    return CodeTask(file, timeout=5.0, chat=False, allow_code_execution=True, sandbox=request.param)


def outcome(task: CodeTask, *lines: str) -> str | None:
    """Return the tests' verdict on a program whose function has these lines."""
    return task.extract(task.problems()[0], "".join(f"    {line}\n" for line in lines))


SAY = "raise KeyError(repr({}))"  # a program's way of telling what it sees


def test_a_program_sees_no_environment_and_no_file_but_its_three(task, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    held = os.open(task.path, os.O_RDONLY)  # and one that is told to be inherited
    os.set_inheritable(held, True)
    try:
        shown = outcome(task, "import os", SAY.format("dict(os.environ)"))
        assert "secret" not in shown and "PATH" not in shown
        # 0 is at its end, 1 and 2 are the program's output, 3 is the folder that is being listed.
        assert outcome(task, "import os", SAY.format("sorted(os.listdir('/dev/fd'))")).endswith("'3']\"")
    finally:
        os.close(held)


def test_what_a_program_writes_to_every_descriptor_is_no_verdict(task):
    write = ["import os", "for fd in range(64):", "    try:", "        os.write(fd, {})", "    except OSError:"]
    write += ["        pass", "return 0"]
    for bytes_ in ("b'\"passed\"\\n'", 'b\'{"is": "passed", "number": 1}\\n\'', "b'passed'"):
        assert outcome(task, *[line.format(bytes_) for line in write]).startswith("failed")
        assert outcome(task, "return a + b") == "passed"  # and the next verdict is the next program's
        assert outcome(task, "return 0").startswith("failed")
    assert outcome(task, "import os", "os._exit(0)") == "failed: it ended before its tests did"


MARK = f"left-behind-by-test-{os.getpid()}"  # of this run: another one beside it has processes of its own
DAEMON = [
    "import posix, sys", "if posix.fork() == 0:", "    posix.setsid()", "    if posix.fork() == 0:",
    f"        posix.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', '{MARK}'])",
    "    posix._exit(0)",
]  # fmt: skip


def running(mark: str) -> list[str]:
    """Processes whose command line has this word."""
    files = Path("/proc").glob("[0-9]*/cmdline")
    return [str(file) for file in files if _read(file).endswith(mark.encode() + b"\0")]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def test_no_process_is_left(task):
    daemon = (
        DAEMON if task.sandbox else DAEMON[:2] + DAEMON[4:5]
    )  # without a sandbox one may leave the group that is killed
    assert outcome(task, *daemon, "import time; time.sleep(0.3)", "return a + b") == "passed"
    for _ in range(100):  # the kernel ends them, after the program
        if not running(MARK):
            return
        time.sleep(0.05)
    raise AssertionError("it still runs")


def test_no_folder_is_left_however_deep(task, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = sorted(tmp_path.iterdir())
    assert outcome(task, "open('left', 'w').write('x')", "import posix", "posix._exit(0)").startswith("failed")
    assert sorted(tmp_path.iterdir()) == before
    deep = ["import posix", "for n in range(3000):", "    posix.mkdir('d')", "    posix.chdir('d')"]
    assert outcome(task, *deep, "return a + b") == "passed"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.nightly
def test_what_prevents_an_end_is_killed(task, monkeypatch):
    task.timeout = 0.5
    assert outcome(task, "import time; time.sleep(60)") == "failed: timed out"
    catch = ["while True:", "    try:", "        while True: pass", "    except BaseException: pass"]
    assert outcome(task, *catch) == "failed: timed out"  # by the limit on processor time
    monkeypatch.setattr("hf_lossy_assist.tasks.code.SLACK", 2.0)
    stopped = ["import posix, signal", "signal.setitimer(signal.ITIMER_REAL, 0)", "posix.kill(posix.getpid(), 19)"]
    assert outcome(task, *stopped) == "failed: timed out"


# -- with a sandbox ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("closed", PLACES, ids=NAMES.get)
def test_a_sandbox_has_no_network_no_home_and_no_other_process(tmp_path, closed):
    """And without one they are all there, which is why a warning says so."""
    import socket

    (tmp_path / "home").mkdir()
    (tmp_path / "code.jsonl").write_text(json.dumps(ROW))
    task = CodeTask(tmp_path / "code.jsonl", chat=False, allow_code_execution=True, sandbox=closed)
    for line, says in (
        ("import socket; socket.create_connection(('127.0.0.1', {port}), 2)", "Errno"),
        ("import posix; raise KeyError(posix.listdir({home!r}))", "Errno"),
        ("open({home!r} + '/made', 'w')", "Errno"),
        ("import sys; open(sys.prefix + '/made', 'w')", "Read-only file system"),
        ("import posix; posix.kill({pid}, 0)", "No such process"),
    ):
        if not closed and "sys.prefix" in line:
            continue
        with socket.create_server(("127.0.0.1", 0)) as listening:
            given = {"port": listening.getsockname()[1], "home": str(tmp_path / "home"), "pid": os.getpid()}
            found = outcome(task, line.format(**given), "return a + b")
        if closed:
            assert says in found, line
        else:
            assert "No such" not in found and "refused" not in found, line
    assert closed is False or not list((tmp_path / "home").iterdir())


def test_where_there_is_no_sandbox_the_task_is_refused(tmp_path, monkeypatch):
    (tmp_path / "code.jsonl").write_text(json.dumps(ROW))
    settings = {"path": tmp_path / "code.jsonl", "allow_code_execution": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    why_no_sandbox.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"no sandbox here: bubblewrap .* does not run .*; .* \(--no-sandbox\)"):
            CodeTask(**settings)
        assert CodeTask(**settings, sandbox=False).sandbox is False
        (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
        (tmp_path / "bwrap").chmod(0o755)
        why_no_sandbox.cache_clear()
        with pytest.raises(ValueError, match="bubblewrap does not work here .failed: bwrap: No permissions."):
            CodeTask(**settings)
    finally:
        why_no_sandbox.cache_clear()


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


def test_what_the_tests_say_is_the_answer(code):
    for response, answer in (
        (FENCED.format("def add(a, b):\n    return a + b"), "passed"), (FENCED.format("    return a + b"), "passed"),
        (FENCED.format("return a + b"), "passed"),
        (FENCED.format("import math\n\ndef add(a, b):\n    return int(math.fsum([a, b]))"), "passed"),
        ("def add(a, b):\n    return a + b\n", "passed"), ("    return a + b\n", "passed"),
        ("1. So:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", "passed"),
        (FENCED.format("def add(a, b):\n    return a + b") + "\n```python\nprint(add(1, 2))\n```", "passed"),
        (FENCED.format("def add(a, b):\n    return a * b") + "\nBetter:\n```\ndef add(a, b):\n    return a + b", "passed"),
        (FENCED.format("def add(a, b):\n    return a - b"), "failed"),
        (FENCED.format("def add(a, b):\n    raise KeyError('no\\nway')"), "failed: KeyError: 'no\\nway'"),
        (FENCED.format("def add(a, b) return a + b"), "failed: SyntaxError: expected ':'"),
        (FENCED.format("def add(a, b):\n    exit()"), "failed: it ended before its tests did"),
        (FENCED.format("def add(a, b):\n    import os\n    os._exit(0)"), "failed: it ended before its tests did"),
        (FENCED.format("def add(a, b):\n    return len(b' ' * (1 << 40))"), "failed"), (FENCED.format(""), None),
        ("I would rather not write a program.", None), ("", None),
    ):  # fmt: skip
        found = code.extract(code.problems()[0], response)
        assert found is None if answer is None else found is not None and found.startswith(answer), response


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


def test_programs_to_be_completed(code, tmp_path):
    task = CodeTask(code.path, timeout=2.0, chat=False, **ALLOWED)
    problem = task.problems()[0]
    assert problem.prompt == ADD["prompt"]
    assert task.extract(problem, "    return a + b\n\nprint(add(1, 2))\nnonsense here") == "passed"
    assert task.extract(problem, "\n    s = a\n    return s + b\n\ndef add(a, b):\n    return 0") == "passed"
    assert task.extract(problem, "    return a + b\n```\n\nIt adds.") == "passed"
    assert task.extract(problem, FENCED.format("def add(a, b):\n    return a + b")) == "passed"
    assert task.extract(problem, "some words") == "failed: SyntaxError: invalid syntax"
    assert task.extract(problem, " \n") is None
    path = rows(tmp_path / "bad.jsonl", {"prompt": "def f():", "test": "pass"})
    with pytest.raises(ValueError, match="line 1: expected a text under 'entry_point', got the fields prompt, test"):
        CodeTask(path, **ALLOWED).problems()
    assert code.slow
    assert code.same(ANY, "failed: invalid syntax", "failed: timed out") and code.same(ANY, "passed", "passed")
    assert not code.same(ANY, "passed", "failed") and not code.same(ANY, "failed", "passed")
    problem = code.problems()[0]
    assert code.right(problem, "passed") is True and code.right(problem, "failed") is False
    assert code.right(problem, None) is None


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
