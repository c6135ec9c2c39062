"""lm-eval and lighteval: a lossless policy has the target's own texts, likelihoods and figures."""

import runpy
import sys
from pathlib import Path

import pytest
from support.lm_eval_task import write_task

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.evaluation import lm_eval_models


lm_eval = pytest.importorskip("lm_eval.tasks")


@pytest.mark.parametrize("registered", (pytest.param(False, marks=pytest.mark.full), True))
def test_texts_and_likelihoods_are_those_of_lm_evals_model(registered):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    target, draft, _, tokenizer = demo.load()
    lossy = lm_eval_models.make_model()
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
