"""Files of prompts in parts, and what a job on workers refuses; no cluster."""

import json
import pickle
import re
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hf_lossy_assist as hla
from hf_lossy_assist.generation.named_drafters import load_pair
from hf_lossy_assist.ray.dataset_writer import WRITTEN
from hf_lossy_assist.tasks.prompt_files import LEAST, PromptFile


COMMAND = ("generate", "--policy", "svip", "--max-new-tokens", 3, "--batch-size", 4)


def lines_of(count):
    return [json.dumps({"prompt": problem.prompt}) + "\n" for problem in hla.demo.problems(count, seed=7)]


def test_any_part_is_read_by_itself(tmp_path):
    lines = [line + "\n" * (n % 3) for n, line in enumerate(lines_of(LEAST * 2 + 5))]
    (tmp_path / "p.jsonl").write_text("\n" + "".join(lines))
    pq.write_table(
        pa.table({"prompt": [json.loads(line)["prompt"] for line in lines]}), tmp_path / "p.parquet", row_group_size=21
    )
    expected = [{"id": n, "prompt": json.loads(line)["prompt"]} for n, line in enumerate(lines)]
    for name in ("p.jsonl", "p.parquet"):
        for limit, total in ((None, len(lines)), (LEAST + 1, LEAST + 1), (3, 3)):
            file = PromptFile.open(tmp_path / name, 1, limit)
            parts = [file.read(number) for number in reversed(range(len(file.begins)))][::-1]
            assert sum(parts, []) == expected[:total] and max(map(len, parts)) <= LEAST
    assert pq.read_table(pa.BufferReader(file.encode(parts[0], WRITTEN))).column_names == ["prompt", "id", *WRITTEN]


def test_rows_that_are_no_rows(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b'{"question": "a"}\n[1]\n{"prompt": \xff}\n{"id": 7, "prompt": "b"}\n')
    found = PromptFile.open(tmp_path / "p.jsonl", 1, None).read(0)
    assert found[0] == {"id": 0, "question": "a", "prompt": "a"} and found[3] == {"id": 7, "prompt": "b"}
    assert "row 1: expected a JSON object" in found[1]["error"] and "row 2 is not JSON" in found[2]["error"]


@pytest.mark.full
def test_texts_in_files_go_on_from_those_that_are_there(hf_lossy, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "texts"
    prompts.write_text("".join(lines_of(LEAST + 3)))
    command = (*COMMAND, "--prompts", prompts, "--out", out)
    assert hf_lossy(*command).code == 0
    texts = [json.loads(line) for n in range(2) for line in (out / f"0000{n}.jsonl").read_text().splitlines()]
    assert hf_lossy(*command[:-2], "--json", "--limit", 6).json["outputs"][5]["token_ids"] == texts[5]["token_ids"]
    assert [row["id"] for row in texts] == list(range(LEAST + 3)) and not any(row["error"] for row in texts)
    part, second = tmp_path / "texts.partial", (out / "00001.jsonl").read_text()
    out.rename(part)
    (part / "00001.jsonl").unlink()
    first = (part / "00000.jsonl").stat().st_ino
    done = hf_lossy(*command, "--max-new-tokens", 7, "--resume")
    assert done.code == 2 and "max_new_tokens 3, this run has 7" in done.err
    assert hf_lossy(*command, "--resume").code == 0
    assert (out / "00000.jsonl").stat().st_ino == first and (out / "00001.jsonl").read_text() == second


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--ray", "auto"), "--ray and --resume are for texts in files: pass --out"),
        (("--out", "texts"), "pass --prompts"),
        (("--out", "texts", "--prompts", "p.jsonl", "--json"), "pass --prompts, not --json"),
        (("--out", "texts", "--prompts", "p.txt"), "expected JSON lines (.jsonl) or Parquet (.parquet)"),
        (("--out", "texts", "--prompts", "p.jsonl", "--compile"), "leave --compile and --policy target out"),
        (("--out", "p.jsonl", "--prompts", "p.jsonl"), "p.jsonl exists: choose another --out"),
        (("--out", "texts", "--prompts", "p.jsonl", "--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster to work on"),
    ],
)  # fmt: skip
def test_refused(hf_lossy, tmp_path, monkeypatch, words, line):
    if "--ray" in words and "127.0.0.1:1" in words:
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "p.txt"):
        (tmp_path / name).write_text("".join(lines_of(1)))
    done = hf_lossy(*COMMAND, *words)
    assert done.code == 2 and line in done.err.strip().splitlines()[-1], done.err


def test_a_worker_that_differs_is_named():
    pytest.importorskip("ray")
    from hf_lossy_assist.models.identity import check_same
    from hf_lossy_assist.ray.cluster import UnitWorker, hash_weights

    with pytest.raises(
        ValueError, match=r"transformers: 5\.24\.0 where the job was started, 5\.17\.0 here: install the same"
    ):
        check_same({"transformers": "5.24.0", "torch": "2"}, {"transformers": "5.17.0", "torch": "2"})
    load = partial(load_pair, None, None, "auto", "cpu")
    expected = hash_weights(load())
    worker = UnitWorker(lambda models, numbers, tell: [(n, n * n) for n in reversed(numbers)], load, expected)
    assert worker({"unit": [2, 3]})["unit"] == [2, 3]
    other = UnitWorker(worker.work, load, expected | {"weights of the draft": "0" * 64})({"unit": [0, 1]})
    assert other["unit"] == [-1]
    words = r"worker \d+ on .*: weights of the draft: 0{12} where the job was started, \w{12} here: install the same everywhere"
    assert re.fullmatch(words, pickle.loads(other["result"][0]))
