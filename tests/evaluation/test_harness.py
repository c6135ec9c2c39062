"""lm-eval on a task file of our own: a lossless policy has the target's own figures."""

import json

import pytest
import torch

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.demo.lm_eval_task import write_task
from hf_lossy_assist.evaluation import lm_eval_models
from hf_lossy_assist.models import loading


lm_eval = pytest.importorskip("lm_eval.tasks")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_command(hf_lossy):
    """The demo is a task as well."""
    done = hf_lossy("eval", "--limit", "4", "--batch-size", "2", "--json")
    assert done.code == 0, done.err[-2000:]
    found = json.loads(done.out[done.out.index("{") :])
    figures = found["results"]
    assert figures["target"] == figures["svip"] and found["lossless"] is True
    assert figures["target"]["demo"]["exact_match,number"] > 0


def test_seconds_are_of_generating_and_warm():
    """Not of reading tasks, nor of the first batch, which is generated twice."""
    models = demo.load()
    plain, lossy = lm_eval_models.make_models()
    ids = models.tokenizer("How many", return_tensors="pt")["input_ids"]
    calls = []
    models.target.register_forward_pre_hook(lambda *_: calls.append(len(calls)))
    for lm in (
        plain(models.target, tokenizer=models.tokenizer),
        lossy(models.target, models.draft, tokenizer=models.tokenizer),
    ):
        assert lm.seconds == 0
        counts, took = [], []
        for _ in range(2):
            before = len(calls)
            lm._model_generate(ids, ids.shape[1] + 6, ["nothing"], attention_mask=torch.ones_like(ids))
            counts.append(len(calls) - before)
            took.append(lm.seconds)
        assert counts[0] == 2 * counts[1] > 0 and 0 < took[0] < took[1]


GOOD = '{"question": "1 + 1?", "answer": "2"}\n'
BAD = {
    "a missing field": ('{"text": "1 + 1?", "answer": "2"}\n', "'question' is undefined"),
    "JSON that ends early": (GOOD + '{"question": "1 +\n', "JSON parse error"),
    "an empty file": ("", "mend its YAML file"),
    "bytes": (b"\x89PNG\r\n\x1a\n\x00\xff", "JSON parse error"),
}


@pytest.fixture
def tasks_folder(monkeypatch, tmp_path):
    """lm-eval with the tasks of a folder alone; its own take seconds to list. No weights are read."""
    listed = lm_eval.TaskManager
    monkeypatch.setattr(lm_eval, "TaskManager", lambda **given: listed(**given | {"include_defaults": False}))
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(demo, "load", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_task(tmp_path, "sums")
    return tmp_path


def test_what_is_wrong_is_one_line(hf_lossy, tasks_folder):
    assert "there is no folder" in hf_lossy("eval", "--tasks", "sums", "--include-path", tasks_folder / "none").line
    assert "lm-eval knows no sum:" in hf_lossy("eval", "--tasks", "sum", "--include-path", tasks_folder).line
    (tasks_folder / "sums.yaml").write_text("task: sums\n  dataset_path: [")
    assert "lm-eval knows no sums" in hf_lossy("eval", "--tasks", "sums", "--include-path", tasks_folder).line


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bad", BAD)
def test_data_that_cannot_be_read_is_one_line(hf_lossy, tasks_folder, bad):
    content, says = BAD[bad]
    (tasks_folder / "sums.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    line = hf_lossy("eval", "--tasks", "sums", "--include-path", tasks_folder).line
    assert (
        "the task sums cannot be read: " in line
        and ": :" not in line
        and says in line
        and "mend its YAML file, or the data" in line
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_later_row_that_does_not_fit_is_one_line(tasks_folder):
    """lm-eval tries a task's templates on its first row."""
    (tasks_folder / "sums.jsonl").write_text(GOOD + '{"text": "1 + 1?", "answer": "2"}\n')
    file = tasks_folder / "sums.yaml"
    file.write_text(file.read_text().replace("{{question}}", "{{question.strip()}}"))
    manager = lm_eval_models.make_task_manager(["sums"], tasks_folder)
    with pytest.raises(
        ValueError, match=r"^sums: a template does not fit a row of the data \('None' has no attr[^\n]*$"
    ):
        lm_eval_models.evaluate("dummy", ["sums"], manager)


def test_a_policy_is_not_mixed_up_with_the_target(hf_lossy, tmp_path, monkeypatch):
    """A folder may be called target; its figures took the place of the target's own."""
    monkeypatch.chdir(tmp_path)
    hla.as_policy("svip").save_pretrained("target")
    assert "write ./target for the folder" in hf_lossy("eval", "--policy", "target").line


def test_what_the_folder_has_is_looked_for_nowhere_else(tasks_folder, monkeypatch):
    defaults = []
    of_folder = lm_eval.TaskManager
    monkeypatch.setattr(
        lm_eval, "TaskManager", lambda **given: defaults.append(given["include_defaults"]) or of_folder(**given)
    )
    lm_eval_models.make_task_manager(["sums"], tasks_folder)
    assert defaults == [False]
    with pytest.raises(ValueError, match="no other"):
        lm_eval_models.make_task_manager(["sums", "other"], tasks_folder)
    assert defaults == [False, False, True]
