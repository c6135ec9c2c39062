"""The papers' tasks and prompts: where their rows come from, on hand-made rows in the published formats, and what in them is refused."""

import json

import pytest
from support.refusals import refused
from support.task_files import fake_datasets, no_datasets, rows

from hf_lossy_assist.tasks.load import SOURCES, load_task
from hf_lossy_assist.tasks.prompts import PLACEHOLDER, PromptText, read_texts


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
    path = rows(tmp_path / "math.jsonl", {"problem": "Halve 1.", "answer": "0.5"})
    assert load_task("math", data=path).path == path and calls == []


def test_the_hub_comes_last(monkeypatch):
    """And what is learnt from is the training split."""
    for name, row, split, names, prompt in (
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, "test", ("openai/gsm8k", "main"), "1 + 1?"),
        ("gsm8k", {"question": "1 + 1?", "answer": "#### 2"}, "train", ("openai/gsm8k", "main"), "1 + 1?"),
        ("math", {"problem": "Halve 1.", "answer": "0.5"}, "test", ("HuggingFaceH4/MATH-500", None), "Halve"),
    ):
        calls = fake_datasets(monkeypatch, [row])
        [problem] = load_task(name, split="calibration" if split == "train" else "test").problems()
        assert calls == [(names, {"split": split})] and problem.prompt.startswith(prompt)


def test_what_is_missing_is_one_line_with_where_it_was_looked_for(monkeypatch):
    no_datasets(monkeypatch)
    for name, (repo, *_) in SOURCES.items():
        refused(lambda name=name: load_task(name), rf"\Athe task {name} needs --data: {repo} \(test\) was ")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch):
    fake_datasets(monkeypatch, error=ConnectionError("no\nroute"))
    with pytest.raises(ValueError, match=r"openai/gsm8k \(test\) was not loaded \(ConnectionError: no route\)"):
        load_task("gsm8k")


def test_rows_of_the_hub_are_named_in_errors(monkeypatch):
    fake_datasets(monkeypatch, [{"question": "a", "answer": "#### 1"}, {"question": "b"}])
    with pytest.raises(ValueError, match=r"openai/gsm8k \(test\), row 2: expected a text under 'answer'"):
        load_task("gsm8k").problems()


# Prompts


def test_speed_benchs_rows_in_parquet(tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    parquet.write_table(pa.Table.from_pylist([{"turns": ["Read this.", "And this."]}]), tmp_path / "test.parquet")
    assert read_texts(tmp_path / "test.parquet") == [PromptText("Read this.")]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not so")
    with pytest.raises(ValueError, match="Parquet"):
        read_texts(tmp_path / "bad.parquet")


def test_what_is_no_prompt_of_speed_bench_is_refused_by_row(tmp_path):
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
