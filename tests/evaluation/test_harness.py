"""lm-eval on a task file of our own: a lossless policy has the target's own figures."""

import json
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.artifacts import loading
from hf_lossy_assist.demo.lm_eval_task import write_task
from hf_lossy_assist.evaluation import lm_eval_models


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
    timed, _ = lm_eval_models.make_models()
    ids = models.tokenizer("How many", return_tensors="pt")["input_ids"]
    calls = []
    models.target.register_forward_pre_hook(lambda *_: calls.append(len(calls)))
    for speculating in (nullcontext(), hla.using(models.target, models.draft)):
        with speculating:
            model = timed(models.target, tokenizer=models.tokenizer)
            assert model.seconds == 0
            counts, took = [], []
            for _ in range(2):
                before = len(calls)
                model._model_generate(ids, ids.shape[1] + 6, ["nothing"], attention_mask=torch.ones_like(ids))
                counts.append(len(calls) - before)
                took.append(model.seconds)
        assert counts[0] == 2 * counts[1] > 0 and 0 < took[0] < took[1]


# -- a standing policy in models that know nothing of it --------------------------------------------------------------------


@pytest.mark.parametrize("registered", (False, True), ids=("a target with a standing policy", "hf-lossy"))
def test_texts_and_likelihoods_are_those_of_lm_evals_model(registered):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    target, draft, _, tokenizer = demo.load()
    _, lossy = lm_eval_models.make_models()
    prompts = [problem.prompt for problem in demo.problems(3, seed=4)]
    arguments = {"until": [" so"], "max_gen_toks": 24, "do_sample": False}
    texts = [Instance("generate_until", {}, (prompt, arguments), i) for i, prompt in enumerate(prompts)]
    pairs = [Instance("loglikelihood", {}, (prompt, " The answer is 5"), i) for i, prompt in enumerate(prompts)]

    def run(model):
        return model.generate_until(texts, disable_tqdm=True), model.loglikelihood(pairs, disable_tqdm=True)

    common = {"tokenizer": tokenizer, "batch_size": 2}
    plain = run(HFLM(pretrained=target, **common))
    if registered:
        model = lossy(target, draft, "strict", **common)
    else:
        model = HFLM(pretrained=hla.enable(target, draft, strict=True), **common)
    assert run(model) == plain and any(plain[0])
    calls = hla.reports(target)
    assert len(calls) == 2 and sum(call.num_accepted_draft_tokens for call in calls) > 10  # none is of likelihoods
    hla.disable(target)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*found in sys.modules:RuntimeWarning")
def test_lm_evals_command_knows_the_model(monkeypatch, tmp_path, capsys):
    from lm_eval.api.registry import model_registry

    listed = lm_eval.TaskManager  # lm-eval's tasks take seconds to list
    monkeypatch.setattr(lm_eval, "TaskManager", lambda **given: listed(**given | {"include_defaults": False}))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_registry, "_objs", {k: v for k, v in model_registry.items() if k != "hf-lossy"})
    write_task(tmp_path, "sums")
    models = f"pretrained={demo.FOLDER / 'target'},assistant={demo.FOLDER / 'draft'},policy=svip"
    line = f"lm-eval run --model hf-lossy --model_args {models} --tasks sums --include_path {tmp_path} --limit 2 --device cpu"
    monkeypatch.setattr(sys, "argv", line.split())
    runpy.run_module("hf_lossy_assist.evaluation.lm_eval_models", run_name="__main__")
    assert "exact_match" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_lighteval_as_it_is(monkeypatch, tmp_path, capsys):
    """`examples/lighteval_task.py`, with a policy and without: the same texts and figures."""
    registry = pytest.importorskip("lighteval.tasks.registry").Registry
    for name in ("_load_from_files", "_load_from_subdirs"):  # lighteval's own tasks, one of which downloads a file
        monkeypatch.setattr(registry, name, staticmethod(lambda *_: {}))
    path = Path(__file__).parents[2] / "examples" / "lighteval_task.py"
    printed = []
    for arguments in ([], ["--plain"]):
        monkeypatch.setattr(sys, "argv", [path.name, "--limit", "3", *arguments])
        runpy.run_path(str(path), run_name="__main__")
        printed.append(capsys.readouterr().out.splitlines())
    *_, texts, figure, report = printed[0]
    assert [texts, figure] == printed[1][-2:] and "accepted" in report and texts.startswith("[[")


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
