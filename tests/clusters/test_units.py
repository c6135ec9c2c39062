"""Files of prompts in parts, what a job on workers refuses, and the writer of a dataset's rows; no cluster."""

import json
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from datasets import load_from_disk
from support import commands
from support.mining import SETTINGS, TASK
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.comparison import compare_arms, open_run
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.methods.autojudge.mine import mine
from hf_lossy_assist.methods.sprinter.collect import CollectSettings, collect
from hf_lossy_assist.ray.dataset_writer import Writer
from hf_lossy_assist.server.named_drafters import load_pair
from hf_lossy_assist.server.row_writer import WRITTEN, seed_of_row
from hf_lossy_assist.tasks.prompts import LEAST, PromptFile, PromptText
from hf_lossy_assist.training.processes import Processes


COMMAND = ("generate", "--policy", "svip", "--max-new-tokens", 3, "--batch-size", 4)


def lines_of(count):
    return [json.dumps({"prompt": problem.prompt}) + "\n" for problem in hla.demo.problems(count, seed=7)]


def test_any_part_is_read_by_itself(tmp_path):
    lines = [line + "\n" * (n % 3) for n, line in enumerate(lines_of(LEAST * 2 + 5))]
    (tmp_path / "p.jsonl").write_text("\n" + "".join(lines))
    expected = [{"id": n, "prompt": json.loads(line)["prompt"]} for n, line in enumerate(lines)]
    for limit, total in ((None, len(lines)), (LEAST + 1, LEAST + 1), (3, 3)):
        file = PromptFile.open(tmp_path / "p.jsonl", 1, limit)
        parts = [file.read(number) for number in reversed(range(len(file.begins)))][::-1]
        assert sum(parts, []) == expected[:total] and max(map(len, parts)) <= LEAST
    (tmp_path / "p.jsonl").write_text("".join(lines[:3]))
    refused(lambda: PromptFile(tmp_path / "p.jsonl", LEAST, 5, [0]).read(0), "p.jsonl has changed since the job began")


def test_rows_that_are_no_rows(tmp_path):
    shared = b'{"conversations": [{"from": "human", "value": "c"}]}\n{"prompt": "", "question": "d"}\n{"prompt": ""}\n{"a": 1}\n'
    (tmp_path / "p.jsonl").write_bytes(
        b'{"question": "a"}\n[1]\n{"prompt": \xff}\n{"id": 7, "prompt": "b"}\n'
        + shared
        + b'{"prompt": "\\ud800"}\n{"prompt": "e", "x": "\\ud800"}\n'
    )
    found = PromptFile.open(tmp_path / "p.jsonl", 1, None).read(0)
    assert found[0] == {"id": 0, "question": "a", "prompt": "a"} and found[3] == {"id": 7, "prompt": "b"}
    assert "p.jsonl, row 1 (the first is 0): expected a JSON object" in found[1]["error"]
    assert "p.jsonl, row 2 (the first is 0) is not JSON" in found[2]["error"]
    assert [row.get("prompt") for row in found[4:8]] == ["c", "d", "", None]
    assert ["surrogates not allowed" in row["error"] for row in found[8:]] == [True, True]  # which no file could hold


@pytest.mark.full
def test_a_file_of_a_dataset_on_the_hub(hub, hf_lossy, tmp_path):
    """With the commit that it was of when the job began; the texts are those of the file here."""
    import huggingface_hub

    data, name = tmp_path / "p.jsonl", "hf://datasets/org/prompts/data/p.jsonl"
    huggingface_hub.create_repo("org/prompts", repo_type="dataset")

    def upload(prompts):
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        settings = {"path_in_repo": "data/p.jsonl", "repo_id": "org/prompts", "repo_type": "dataset"}
        huggingface_hub.upload_file(path_or_fileobj=data, **settings)

    upload(["1+1=", "2+2="])
    file = PromptFile.open(Path(name), 1, None)
    for prompts, out in ((data, "here"), (name, "there")):
        assert hf_lossy(*COMMAND, "--prompts", prompts, "--out", tmp_path / out).code == 0
    here, there = ((tmp_path / out / "00000.jsonl").read_text() for out in ("here", "there"))
    assert here == there and here.count('"error": null') == 2
    upload(["3+3="])
    assert [row["prompt"] for row in file.read(0)] == ["1+1=", "2+2="]
    wrong = {
        "org/prompts/none.jsonl": "the dataset org/prompts: 404",
        "org/none/p.jsonl": "the dataset org/none: 404",
        "org/prompts@v9/p.jsonl": "the dataset org/prompts: 404",
        "p.jsonl": "expected hf://datasets/ORG/NAME/FILE, got",
    }
    for given, line in wrong.items():
        done = hf_lossy(*COMMAND, "--prompts", f"hf://datasets/{given}", "--out", tmp_path / "no")
        assert done.code == 2 and line in done.line, done.err


def test_another_file_under_the_same_name(hf_lossy, tmp_path, monkeypatch):
    """As on another node: a worker compares it before it reads a part."""
    prompts, original = tmp_path / "p.jsonl", Processes.run
    prompts.write_text('{"prompt": "1+1="}\n')

    def run(self, *given, **settings):
        prompts.write_text('{"prompt": "1+2="}\n')
        original(self, *given, **settings)

    monkeypatch.setattr(Processes, "run", run)
    done = hf_lossy(*COMMAND, "--prompts", prompts, "--out", tmp_path / "texts")
    assert done.code == 2 and done.line.endswith("p.jsonl is not the file that the job was started with"), done.err


@pytest.mark.full
def test_rows_without_texts_are_counted(hf_lossy, tmp_path):
    """Wherever the line may be in a text: a column that holds errors of its own is no error."""
    rows = [{"prompt": "1+1=", "of": '"error": "no"'}, {"prompt": None, "of": "x"}, {"prompt": "2+2=", "of": None}]

    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return hf_lossy(*COMMAND, "--prompts", tmp_path / name, "--out", tmp_path / f"out {name}")

    done = write("some.jsonl", rows)
    line = "texts of 2 of 3 prompts; the others have an `error`, the first row 1: expected a prompt or messages"
    assert done.code == 0 and line in done.out, done
    done = write("none.jsonl", rows[1:2] * 2)
    assert done.code == 2 and "no text of 2 prompts; all have an `error`, the first row 0: expected" in done.err
    assert (tmp_path / "out none.jsonl").is_dir()
    done = write("all.jsonl", rows[:1])
    assert done.code == 0 and done.out.endswith(": texts of 1 prompts\n"), done.out


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


OUT = ("--out", "texts", "--prompts", "p.jsonl")
REFUSED = (
    (("--ray", "auto"), "--ray and --resume are for texts in files: pass --out"),
    (("--out", "texts"), "--out continues the file of --prompts"),
    ((*OUT, "--json"), "leave --prompt, --json and --policy svip out"),
    (("--out", "texts", "--prompts", "none.jsonl"), "there is no file 'none.jsonl'"),
    ((*OUT, "--set", "num_beams=2"), "num_beams"),
    (("--out", "empty", "--prompts", "p.jsonl", "--resume"), "empty exists: choose another --out"),
    (("--out", "texts", "--prompts", "p.txt"), "--out continues JSON lines (.jsonl), and hla.ray.Writer tables"),
    ((*OUT, "--ray", "127.0.0.1:1"), "--ray 127.0.0.1:1: no cluster to work on"),
    ((*OUT, "--ray", "ray://127.0.0.1:1"), "no cluster to work on ([Errno 111] Connection refused)"),
    ((*OUT, "--ray", "http://127.0.0.1:8265"), "start one with `ray start --head`, or pass --ray local"),
)


def test_refused_in_one_line(hf_lossy, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("p.jsonl", "p.txt"):
        (tmp_path / name).write_text("".join(lines_of(1)))
    for words, line in REFUSED:
        done = hf_lossy(*COMMAND, *words)
        assert not list(tmp_path.glob("texts*"))
        assert done.code == 2 and line in done.err.strip().splitlines()[-1], words


def make_pair(models):
    """Return a writer and the arms of models; the last arm cannot be measured."""
    target, draft, tokenizer = models
    arms = make_arms(target, draft, {"svip": hla.as_policy("svip")}, tokenizer=tokenizer, assisted=False)
    lame = replace(arms[0], name="lame", optional=True, write=None)
    return TextWriter(target, tokenizer, DecodingSettings(max_new_tokens=5), None), [*arms, lame]


class Elsewhere(Processes):
    """Runs a copy of the work, unit by unit, with models that it loads itself."""

    def run(self, work, models, units, write, named, at_once=1):
        pickler = pytest.importorskip("ray.cloudpickle")
        work, models = pickler.loads(pickler.dumps(work)), load_pair(None, None, "auto", "cpu")
        for unit in units:
            for number, result in work(models, [unit], lambda *_: None):
                write(number, result)


@pytest.mark.full
def test_what_is_compared_by_workers_that_load_the_models():
    models = load_pair(None, None, "auto", "cpu")
    writer, arms = make_pair(models)
    texts, found = [problem.prompt for problem in hla.demo.problems(3, 7)], []
    for processes in (Processes(), Elsewhere()):
        with open_run(None, {}, processes=processes) as run:
            done = compare_arms(
                writer, arms, texts, [(1, 0, 0), (1, 1, 1), (2, 0, 0)], run, loaded=(models, make_pair)
            )
        assert list(done.left_out) == ["lame"] and len(done.warm_up_seconds) == 4
        found.append([replace(answer, seconds=0.0, first_token=None) for answer in done.answers])
    assert found[0] == found[1] and len(found[0]) == 8


@pytest.mark.full
def test_what_is_mined_and_collected_by_workers_that_load_the_models(tmp_path):
    models = load_pair(None, None, "auto", "cpu")
    texts = [PromptText(problem.prompt, problem.solution) for problem in hla.demo.problems(3, 7)]
    for name, processes in (("alone", None), ("elsewhere", Elsewhere())):
        mine(*models, TASK, TASK.problems(3), tmp_path / f"mined {name}", SETTINGS, processes=processes)
        settings = CollectSettings(new_tokens=8, batch_size=2)
        collect(*models, texts, tmp_path / f"collected {name}", settings, processes=processes)
    for job in ("mined", "collected"):
        rows = [load_from_disk(str(tmp_path / f"{job} {name}")).to_list() for name in ("alone", "elsewhere")]
        assert rows[0] == rows[1] != [], job


def test_a_writer_that_cannot_be_made():
    models = {"tokenizer": hla.demo.load().tokenizer, "seed": 3}
    for settings, line in (
        ({"draft": "D"}, "draft D has no target: pass both, or neither for the demo's"),
        ({"dtype": "float7"}, "load: unknown dtype 'float7'. Did you mean 'float32'"),
        ({"target": "./none"}, "./none was not loaded: it is neither a folder here nor a Hub id"),
        ({"target": "M", "load_models": dict}, "load_models is in place of target, draft and policy: pass either"),
        ({"load_models": lambda: (hla.demo.load().target, models)}, "multiple values for keyword argument 'seed'"),
        ({"device": "meta"}, "load: device .* cannot be used here"),
        ({"max_new_tokens": -1}, "max_new_tokens"),
    ):
        with pytest.raises((ValueError, TypeError, OSError), match=line):
            Writer(**settings)


def test_a_job_without_a_cluster_writes_nothing(tmp_path):
    pytest.importorskip("ray")
    models, workers = load_pair(None, None, "auto", "cpu"), hla.ray.Workers(address="127.0.0.1:1")
    given = partial(mine, *models, TASK, TASK.problems(1), tmp_path / "mined", SETTINGS, processes=workers)
    refused(given, "^--ray 127.0.0.1:1: no cluster to work on")
    assert not list(tmp_path.iterdir())


def test_a_worker_that_differs_is_named():
    pytest.importorskip("ray")
    from hf_lossy_assist.artifacts.identity import check_same, hash_weights
    from hf_lossy_assist.ray.cluster import UnitWorker

    versions = {"transformers": "5.24.0", "torch": "2"}, {"transformers": "5.17.0", "torch": "2"}
    words = r"transformers: 5\.24\.0 where the job was started, 5\.17\.0 here: install the same"
    refused(partial(check_same, *versions), words)
    load = partial(load_pair, None, None, "auto", "cpu")
    expected = hash_weights(load())
    worker = UnitWorker(lambda models, numbers, tell: [(n, n * n) for n in reversed(numbers)], load, expected)
    assert worker({"unit": [2, 3]})["unit"] == [2, 3]
    other = UnitWorker(worker.work, load, expected | {"weights of the draft": "0" * 64})({"unit": [0, 1]})
    assert other["unit"] == [-1]
    words = r"worker \d+ on .*: weights of the draft: 0{12} where the job was started, \w{12} here: install the same everywhere"
    assert re.fullmatch(words, pickle.loads(other["result"][0]))


# -- a dataset's rows, on blocks as Ray passes them ---------------------------------------------------------------------


WRITING = {"policy": "svip", "max_new_tokens": 24, "max_rows": 4}


@pytest.fixture(scope="module")
def prompts():
    return [problem.prompt for problem in hla.demo.problems(5, seed=7)]


@pytest.fixture(scope="module")
def sampling():
    return Writer(**WRITING, do_sample=True, seed=3)


def test_texts_are_those_of_generate_many(prompts):
    models = hla.demo.load()
    settings = {"assistant_model": models.draft, "lossy_policy": "svip", "tokenizer": models.tokenizer}
    many = hla.generate_many(models.target, prompts, max_new_tokens=24, **settings)
    alone = {result.index: result for result in many}
    found = Writer(**WRITING)(pa.table({"prompt": prompts, "of": range(5)})).to_pylist()
    assert [row["token_ids"] for row in found] == [alone[n].token_ids for n in range(5)]
    assert [row["text"] for row in found] == [alone[n].text for n in range(5)]
    assert [row["of"] for row in found] == list(range(5)), "rows stay in order, with their other columns"
    for number, row in enumerate(found):
        assert row["error"] is None and len(row["token_sources"]) == len(row["token_ids"])
        assert row["speculation"]["num_new_tokens"] == len(row["token_ids"])
        ended = row["token_ids"][-1] == models.target.generation_config.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length"), number


@pytest.mark.full
def test_a_sampled_text_depends_on_the_id_of_its_row_alone(prompts, sampling):
    rows = [{"id": f"row {n}", "prompt": prompt} for n, prompt in enumerate([*prompts, prompts[0]])]
    whole = sampling(pa.Table.from_pylist(rows)).to_pylist()
    apart = [sampling(pa.Table.from_pylist([row])).to_pylist()[0] for row in reversed(rows)][::-1]
    assert [row["token_ids"] for row in whole] == [row["token_ids"] for row in apart]
    assert whole[0]["token_ids"] != whole[5]["token_ids"], "one prompt under two ids"
    without = sampling(pa.table({"prompt": [prompts[0], prompts[1], prompts[0]]})).to_pylist()
    assert without[0]["token_ids"] == without[2]["token_ids"] != without[1]["token_ids"]
    assert len({seed_of_row(seed, name) for seed in (0, 1) for name in (0, "0", 1, [0], None)}) == 10


def test_broken_rows_get_an_error_and_the_others_their_texts(prompts, sampling):
    rows = [
        {"id": 0, "prompt": prompts[0]}, {"id": 1, "prompt": None}, {"id": 2, "prompt": ""},
        {"id": 3, "prompt": prompts[1], "max_new_tokens": 0},
        {"id": 4, "prompt": prompts[2], "max_new_tokens": 3},
        {"id": 5, "messages": [{"role": "user", "content": prompts[0]}]},
        {"id": 6, "messages": [{"role": "user", "content": None}]},
    ]  # fmt: skip
    turns = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    schema = pa.schema({"id": pa.int64(), "prompt": pa.string(), "max_new_tokens": pa.int64(), "messages": turns})
    found = sampling(pa.Table.from_pylist(rows, schema)).to_pylist()
    errors = [row["error"] for row in found]
    assert errors[0] is errors[4] is errors[5] is None
    assert len(found[4]["token_ids"]) == 3 and found[4]["finish_reason"] == "length"
    assert "expected a prompt or messages, got neither" in errors[1] and "no tokens" in errors[2]
    assert "max_new_tokens: expected" in errors[3] and "content" in errors[6]
    for row, error in zip(found, errors, strict=True):
        assert (row["text"] is None) == (error is not None) and (error is None or "\n" not in error)
    alone = sampling(pa.table({"id": [0], "prompt": [prompts[0]]})).to_pylist()[0]
    assert alone["token_ids"] == found[0]["token_ids"]


def test_rows_of_json_that_have_other_types(sampling):
    rows = [{"messages": messages} for messages in ("a", ["a"], [{"role": "user", "content": "a " * 40_001}])]
    rows += [{"prompt": prompt} for prompt in (7, [10**9], ["a"], {"a": 1}, [5] * 40_001, "a " * 40_001)]
    wrong = {"stop_strings": [[3]], "hints": [3], "text": ["there"], "error": [None, "before"], "top_p": [0.5]}
    rows += [{"prompt": [5], name: value} for name, values in wrong.items() for value in values]
    for row, found in zip(rows, sampling.rows.write(rows), strict=True):
        assert found["error"] and "\n" not in found["error"] and found.keys() == row.keys() | {"error"}, row
        assert found["error"] not in (None, row.get("error")), row
    assert sampling.rows.write([{"id": 3, "error": "no JSON"}]) == [{"id": 3, "error": "no JSON"}]


def test_a_prompt_of_all_the_targets_positions(sampling):
    """Its text, which lies beyond, is `generate`'s."""
    longest = hla.demo.load().target.config.max_position_embeddings
    found = sampling.rows.write([{"prompt": [5] * length} for length in (longest, longest + 1)])
    assert found[0]["error"] is None and found[0]["token_ids"]
    assert found[1]["error"] == f"the prompt has {longest + 1} tokens, and the target {longest} positions: shorten it"


@pytest.mark.full
def test_a_row_that_ends_the_others_texts_is_found(prompts, sampling, monkeypatch):
    """Errors that arise while texts are written, as of a model whose logits are not finite."""
    from hf_lossy_assist.server import row_writer

    def many(target, given, numbers, **settings):
        for result in hla.generate_many(target, given, numbers=numbers, **settings):
            if any(prompt["prompt"] == prompts[1] for prompt in given):
                raise ValueError("its logits are not finite")
            yield result

    whole = sampling(pa.table({"prompt": prompts})).to_pylist()
    monkeypatch.setattr(row_writer, "generate_many", many)
    found = sampling(pa.table({"prompt": [prompts[1], prompts[0]]})).to_pylist()
    assert found[1]["token_ids"] == whole[0]["token_ids"] and found[1]["error"] is None
    assert found[0]["error"] == "its logits are not finite" and found[0]["token_ids"] is None


def test_wrong_uses(prompts, sampling):
    for name in WRITTEN:
        with pytest.raises(ValueError, match=f"there is a column '{name}'.*rename it, or drop it"):
            sampling(pa.table({"prompt": prompts, name: prompts}))
    with pytest.raises(ValueError, match="there are two columns 'prompt'"):
        sampling(pa.table([pa.array(prompts), pa.array(prompts)], names=["prompt", "prompt"]))
    for name in ("temperature", "max_tokens"):
        found = sampling(pa.table({"prompt": prompts[:2], name: [None, 1]}))["error"].to_pylist()
        assert found[0] is None and f"'{name}' in a row does nothing: a row has max_new_tokens" in found[1]


def test_other_columns_pass_unread(prompts, sampling):
    """Whether Python could hold them or not."""
    others = {"speed": 1, "hint": "x", "policy": "of a bank", "of": object}
    assert sampling.rows.write([{"prompt": prompts[0]} | others])[0]["text"]
    far = pa.array([10**13, 1], pa.timestamp("s"))
    found = sampling(pa.table({"prompt": prompts[:2], "when": far}))
    assert found["error"].to_pylist() == [None, None] and found["when"].chunk(0).equals(far)
    refused(lambda: sampling({"prompt": prompts[:1]}), "pass batch_format", TypeError)


@pytest.mark.full
def test_a_chats_seed_depends_on_its_messages_alone(sampling):
    """Arrow fills fields that another row of the block has."""
    first = {"messages": [{"role": "user", "content": "1+1="}]}
    second = {"messages": [{"role": "user", "content": "2+2=", "name": "Bo"}]}
    for one, other in ((first, second), ({"prompt": "1+1=", "id": {"a": 1}}, {"prompt": "2+2=", "id": {"b": 1}})):
        texts = [sampling(pa.Table.from_pylist(rows))["token_ids"][0] for rows in ([one], [one, other])]
        assert texts[0] == texts[1] and texts[0].as_py()


def test_token_ids_in_an_array_are_those_of_a_list(sampling):
    """As Ray's tensor columns have them: the same seed, the same bound on the length."""
    ids, long = [5, 6, 7], np.ones(5000, int)
    found = sampling.rows.write([{"prompt": ids}, {"prompt": np.array(ids)}, {"prompt": long}])
    assert found[0]["token_ids"] == found[1]["token_ids"] and "5000 tokens" in found[2]["error"]


@pytest.mark.full
def test_the_packages_that_the_writer_needs():
    """None of the server's; without Ray one line says how to install it, and the package imports none of it before it is used."""
    without = "sys.modules |= dict.fromkeys(({}), None)\n"
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport hf_lossy_assist as hla\n" + without.format("'ray',")
    code += "try: hla.ray.Writer\nexcept ImportError as error: print(error)\ndel sys.modules['ray']\n"
    code += without.format("'starlette', 'uvicorn', 'prometheus_client'") + "print(hla.ray.Writer.__name__)"
    done = subprocess.run([sys.executable, "-c", code, str(commands.ROOT)], capture_output=True, text=True)
    expected = "hf_lossy_assist.ray.Writer needs ray: pip install 'hf_lossy_assist[ray]'\nWriter\n"
    assert done.stdout == expected, done.stderr
