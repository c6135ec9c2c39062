"""The papers' tasks: where their rows come from, on hand-made rows in the published formats, and what in them is refused."""

import json

import pytest
from support.task_files import ANY, fake_datasets, no_datasets, rows

from hf_lossy_assist.tasks.base import ShareGPT
from hf_lossy_assist.tasks.load import NAMES, SOURCES, load_rows, load_task
from hf_lossy_assist.tasks.prompts import PLACEHOLDER, PromptText, read_texts


MT = {"question_id": 81, "category": "writing", "turns": ["Write about Hawaii.", "Rewrite it."]}
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


def test_a_path_comes_first(tmp_path, monkeypatch):
    calls = fake_datasets(monkeypatch, error=AssertionError("not asked for"))
    path = rows(tmp_path / "mt.jsonl", MT)
    assert load_rows("mt_bench", path) == path and calls == []
    with pytest.raises(FileNotFoundError, match="there is no file"):
        load_rows("mt_bench", tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "name, row, names, settings, prompt",
    [
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, ("openai/gsm8k", "main"), {"split": "test"}, "1 + 1?"),
        ("math", {"problem": "Halve 1.", "answer": "0.5"}, ("HuggingFaceH4/MATH-500", None), {"split": "test"}, "Halve"),
        ("mt_bench", {"prompt": ["Write.", "Again."], "category": "writing"}, ("HuggingFaceH4/mt_bench_prompts", None),
         {"split": "train"}, "Write."),
        ("sharegpt", TALK, ("anon8231489123/ShareGPT_Vicuna_unfiltered", None),
         {"split": "train", "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json"}, "What is a token?"),
    ],
)  # fmt: skip
def test_the_hub_comes_last(monkeypatch, name, row, names, settings, prompt):
    calls = fake_datasets(monkeypatch, [row])
    [problem] = load_task(name).problems()
    assert calls == [(names, settings)] and problem.prompt.startswith(prompt)


def test_what_is_learnt_from_is_the_training_split(monkeypatch):
    calls = fake_datasets(monkeypatch, [])
    load_task("gsm8k", split="calibration")
    assert calls == [(("openai/gsm8k", "main"), {"split": "train"})]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_what_is_missing_is_one_line_with_where_it_was_looked_for(monkeypatch, name):
    no_datasets(monkeypatch)
    with pytest.raises(ValueError) as excinfo:
        load_rows(name)
    line = str(excinfo.value)
    assert line.startswith(f"the task {name} needs --data: {SOURCES[name].needs}") and "\n" not in line
    assert (SOURCES[name].dataset or "") in line


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    fake_datasets(monkeypatch, error=ConnectionError("no\nroute"))
    with pytest.raises(ValueError, match=r"could not load openai/gsm8k \(main, test\) \(ConnectionError: no route\)"):
        load_task("gsm8k")


def test_rows_of_the_hub_are_named_in_errors(monkeypatch):
    fake_datasets(monkeypatch, [{"question": "a", "answer": "#### 1"}, {"question": "b"}])
    with pytest.raises(ValueError, match=r"openai/gsm8k \(main, test\), row 2: expected a text under 'answer'"):
        load_task("gsm8k").problems()


def test_all_names_are_tasks():
    assert set(SOURCES) < set(NAMES) and {"mt_bench", "spec_bench", "sharegpt"} < set(NAMES)


# Questions with categories


@pytest.mark.parametrize("name", ["mt_bench", "spec_bench", "speed_bench"])
def test_the_first_turn_is_the_prompt_and_the_category_stays(tmp_path, name):
    task = load_task(name, data=rows(tmp_path / "questions.jsonl", MT, MT | {"turns": ["One turn."]}))
    assert task.name == name
    first, second = task.problems()
    assert (first.prompt, second.prompt) == ("Write about Hawaii.", "One turn.")
    assert first.extra["category"] == "writing" and first.gold is None
    with pytest.raises(ValueError, match=r"the task \w+_bench compares texts by a judge model.*--judge-url"):
        task.same(first, "one", "other")
    bad = rows(tmp_path / "bad.jsonl", {"turns": ["a"]})
    with pytest.raises(ValueError, match="bad.jsonl, line 1: expected a text under 'category', got the fields turns"):
        load_task(name, data=bad).problems()


SPEED = {
    "question_id": "a1",
    "category": "rag",
    "sub_category": "x",
    "source": "s",
    "src_id": "1",
    "difficulty": "low",
    "multiturn": True,
}


def test_speed_benchs_rows_in_parquet_and_as_messages(tmp_path):
    turns, file = ["Read this.", "And this."], tmp_path / "test.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(
        pytest.importorskip("pyarrow").Table.from_pylist([SPEED | {"turns": turns}]), file
    )
    messages = [{"role": "system", "content": "Be kind."}, *({"role": "user", "content": turn} for turn in turns)]
    for path in (file, rows(tmp_path / "skills.jsonl", SPEED | {"messages": messages})):
        [problem] = load_task("speed_bench", data=path).problems()
        assert problem.prompt == "Read this." and problem.extra["category"] == "rag" and problem.gold is None


def test_what_is_no_question_of_speed_bench_is_refused_by_place(tmp_path):
    held_back = SPEED | {"turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH\n\nSummarise {{article}}"]}
    path = rows(tmp_path / "speed.jsonl", SPEED | {"turns": ["Read."]}, held_back)
    for read in (load_task("speed_bench", data=path).problems, lambda: read_texts(path)):
        with pytest.raises(
            ValueError, match=r"\A[^\n]*speed.jsonl, line 2: SPEED-Bench's placeholder [^\n]*prepare_data.py[^\n]*\Z"
        ):
            read()
    for messages in ([], [{"role": "system", "content": "Hi."}], [{"role": "user", "content": [1]}], "Hi."):
        bad = rows(tmp_path / "bad.jsonl", SPEED | {"messages": messages})
        with pytest.raises(
            ValueError, match="bad.jsonl, line 1: expected a text under one of turns, prompt, got the fields"
        ):
            load_task("speed_bench", data=bad).problems()
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match=r"\A[^\n]*bad.parquet is not a Parquet file[^\n]*\Z"):
        load_task("speed_bench", data=tmp_path / "bad.parquet").problems()


# Conversations


@pytest.mark.parametrize("indent", [None, 2])
def test_conversations_of_an_array_and_of_lines(tmp_path, indent):
    talks = [TALK, ALONE, UNASKED]
    array, lines = tmp_path / "ShareGPT.json", rows(tmp_path / "lines.jsonl", *talks)
    array.write_text(json.dumps(talks, indent=indent, ensure_ascii=False) + "\n")
    for path in (array, lines):
        problems = ShareGPT(path).problems()
        assert [problem.prompt for problem in problems] == ["What is a token?", "Go on."]
        assert [problem.extra for problem in problems] == [{"reference": "A piece of text."}, {}]
        assert read_texts(path) == [
            PromptText("What is a token?", "A piece of text."),
            PromptText("Go on."),
        ]  # collect's and compare's
        assert len(ShareGPT(path).problems(1)) == len(read_texts(path, 1)) == 1


def test_conversations_have_no_answers(tmp_path):
    task = load_task("sharegpt", data=rows(tmp_path / "talks.jsonl", TALK))
    problem = task.problems()[0]
    assert problem.gold is None and task.right(problem, None) is None
    for ask in (lambda: task.extract(problem, "Hello."), lambda: task.same(ANY, "a", "b")):
        with pytest.raises(ValueError, match="the task sharegpt has prompts and no right answers"):
            ask()


@pytest.mark.parametrize(
    "content, expected",
    [
        ('[{"conversations": 1}]', "entry 1: expected a list under 'conversations', got 1"),
        ('[{"conversations": [{"from": "human"}]}]', "entry 1: expected turns with a text under 'from' and 'value'"),
        ('[{"conversations": []}, 3]', "entry 2: expected a JSON object, got 3"),
        ('[{"conversations": []}, {"a": ', "talks.json is not JSON"),
        ('[{"conversations": [], "conversations": []}]', "talks.json is not JSON: an object has the key"),
        ('{"conversations": [["human", "a"]]}', "line 1: expected turns"),
    ],
)
def test_what_is_no_conversation_is_refused_by_place(tmp_path, content, expected):
    path = tmp_path / "talks.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=expected) as excinfo:
        ShareGPT(path).problems()
    assert "talks.json" in str(excinfo.value) and "\n" not in str(excinfo.value)


def test_an_array_that_is_not_utf_8_is_refused(tmp_path):
    path = tmp_path / "talks.json"
    path.write_bytes(b'[{"conversations": [{"from": "human", "value": "\xff"}]}]')
    with pytest.raises(ValueError, match="talks.json is not JSON: 'utf-8' codec"):
        ShareGPT(path).problems()
