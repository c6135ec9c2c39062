"""The embedded demo: the task is what it says, the models are as good as promised, and their training can be resumed."""

import json
import os
import re
import runpy
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from support import tiny
from transformers import AutoModelForCausalLM

import hf_lossy_assist as hla
from hf_lossy_assist import demo
from hf_lossy_assist.tasks import demo_task as task


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def models():
    return demo.load()


def test_problems_are_what_they_say():
    for problem in demo.problems(300, seed=1):
        start, first, second = map(int, re.findall(r"\d+", problem.prompt))
        signs = [1 if verb in task.GAINS else -1 for verb in re.findall(r"(\w+) \d+", problem.prompt)[1:]]
        assert problem.answer == start + signs[0] * first + signs[1] * second
        assert demo.answer(problem.prompt + problem.solution) == problem.answer
    assert demo.answer("The answer is 7. The answer is 12.") == 12
    assert demo.answer("The answer is twelve.") is None
    assert demo.answer("") is None
    for problem in demo.problems(100, seed=2):
        wordings = dict(re.findall(r"(\w+) (plain|warm|brisk)", problem.prompt))
        assert problem.solution.startswith(task.START[wordings["start"]])
        assert task.END[wordings["end"]] + " The answer is" in problem.solution
    assert demo.problems(5, seed=3) == demo.problems(5, seed=3)
    assert demo.problems(9, seed=3)[:5] == demo.problems(5, seed=3)
    prompts = {split: {p.prompt for p in demo.problems(500, 0, split)} for split in ("train", "calibration", "test")}
    assert not (prompts["train"] & prompts["test"] or prompts["train"] & prompts["calibration"])
    assert not prompts["calibration"] & prompts["test"]
    assert len(list(islice(task.generate_problems("test", 0), 1000))) == 1000


def test_what_is_shipped_is_of_the_demos_models(models):
    for made in map(demo.head, demo.HEADS):
        assert made.config.model_weights.keys() == {"target", "draft"}
        made.check(models.target, models.draft, models.tokenizer)
    made = demo.profile()
    assert made.training["source"] == "the demo task, calibration problems of seed 0" and made.gamma == 7
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the profile's seconds were taken on another machine")
        made.check(models.target, models.draft, models.companion, models.tokenizer)
    gains = [row["gain"] for row in made.metrics["information"]]
    assert [row["cells"] for row in made.metrics["information"]] == [25, 100, 400, 272]
    assert min(gains) > 0 and gains == sorted(gains)
    assert made.latency.batches.tolist() == [1, 4, 16, 32, 64]
    assert sum(path.stat().st_size for path in demo.FOLDER.rglob("*") if path.is_file()) < 15e6
    for problem in demo.problems(100, seed=5):
        text = problem.prompt + problem.solution
        assert models.tokenizer.decode(models.tokenizer(text).input_ids) == text


def test_policies_with_a_profile_equal_what_their_json_form_builds():
    spec = {"name": "sv", "profile": str(demo.FOLDER / "sv_profile"), "companion": str(demo.FOLDER / "companion")}
    policy = hla.as_policy({"filter": spec})
    again = hla.as_policy(json.dumps(policy.to_dict()))
    assert policy == again and hash(policy) == hash(again)
    other = replace(policy.filter.profile, pays=policy.filter.profile.pays + 1)
    assert policy != replace(policy, filter=replace(policy.filter, profile=other))


@pytest.mark.parametrize("kind", [pytest.param("dspark", marks=pytest.mark.full), "eagle3"])
def test_the_shipped_drafters_are_as_good_as_their_cards(models, kind):
    """Drafts of five tokens give 5.3 and 5.6 tokens a call."""
    target, inputs = hla.enable(models.target), models.tokenizer([p.prompt for p in demo.problems(4, seed=9)], return_tensors="pt", padding=True)  # fmt: skip
    settings = {"max_new_tokens": 32, "do_sample": False, "return_dict_in_generate": True}
    policy = hla.LossyPolicy(stop=hla.Constant(5))
    out = target.generate(**inputs, assistant_model=demo.drafter(kind), lossy_policy=policy, **settings)
    assert out.sequences.equal(target.generate(**inputs, **settings).sequences)
    total = out.speculation.total()
    assert total.num_new_tokens / total.num_spec_steps > 4.3


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="demo.drafter: unknown kind 'dflash'; there are dspark, eagle3"):
        demo.drafter("dflash")
    with pytest.raises(ValueError, match="got -1"):
        demo.problems(-1)
    with pytest.raises(TypeError, match=r"problems\(n\): expected a whole number of at least 0, got 'a'"):
        demo.problems("a")
    with pytest.raises(ValueError, match="'dev'"):
        demo.problems(1, split="dev")


@pytest.mark.full
def test_the_models_are_as_good_as_promised_and_the_target_obeys_the_card(models):
    problems = demo.problems(60, seed=31337)
    inputs = models.tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    right, obeyed = {}, 0
    for name in ("target", "draft", "companion"):
        out = getattr(models, name).generate(**inputs, max_new_tokens=64, do_sample=False)
        texts = models.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right[name] = sum(demo.answer(t) == p.answer for t, p in zip(texts, problems, strict=True)) / len(problems)
        if name == "target":
            obeyed = sum(t == p.solution for t, p in zip(texts, problems, strict=True)) / len(problems)
    assert right["target"] >= 0.95
    assert 0.2 <= right["draft"] <= 0.7
    assert 0.2 <= right["companion"] <= 0.8
    assert obeyed >= 0.9


def texts(out, padding):
    """Each row without its padding, on either side: what does not depend on the rows beside it."""
    return [row[row != padding].tolist() for row in out]


@pytest.mark.full
def test_strict_and_svip_equal_the_target_on_12_unseen_problems_in_ragged_batches_and_on_some_alone(models):
    """In float32, where no choice is so close that other batches' rounding could turn it."""
    prompts = [p.prompt for p in demo.problems(12, seed=424242)]
    target, padding = hla.enable(models.target), models.tokenizer.pad_token_id
    inputs = models.tokenizer(prompts, return_tensors="pt", padding=True)
    end = {"max_new_tokens": 64, "eos_token_id": models.tokenizer.eos_token_id}
    expected = texts(tiny.greedy(target, inputs, **end), padding)
    for size, count in ((1, 2), (6, 12)):
        for i in range(0, count, size):
            inputs = models.tokenizer(prompts[i : i + size], return_tensors="pt", padding=True)
            for policy in ("strict", "svip"):
                got = target.generate(
                    **inputs, max_new_tokens=64, do_sample=False, assistant_model=models.draft, lossy_policy=policy
                )
                assert texts(got, padding) == expected[i : i + size]


@pytest.mark.nightly
def test_a_killed_training_resumes_to_the_same_weights(tmp_path, monkeypatch):
    """Only what is killed needs a process of its own, with as many threads as this one: sums round by their number."""
    script = ROOT / "examples" / "train_demo_models.py"
    settings = ["--only", "draft", "--steps", "24", "--checkpoint-every", "4", "--out"]

    def trained(folder):
        monkeypatch.setattr(sys, "argv", [str(script), *settings, str(folder)])
        runpy.run_path(str(script), run_name="__main__")

    trained(tmp_path / "whole")
    command = [sys.executable, str(script), *settings, str(tmp_path / "part")]
    threads = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=threads) as process:
        while not (tmp_path / "part" / "draft.checkpoint.pt").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    assert not (tmp_path / "part" / "draft").exists()
    trained(tmp_path / "part")
    weights = [(tmp_path / run / "draft" / "model.safetensors").read_bytes() for run in ("whole", "part")]
    assert weights[0] == weights[1]
    assert not (tmp_path / "part" / "draft.checkpoint.pt").exists()


@pytest.mark.nightly
def test_a_hybrid_pair_is_trained_too(tmp_path, monkeypatch):
    """A few steps of the draft: a Transformers folder with the demo's tokenizer, which is a target's draft."""
    script = ROOT / "examples" / "train_demo_models.py"
    settings = ["--hybrid", "--only", "draft", "--steps", "21", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(script), *settings])
    runpy.run_path(str(script), run_name="__main__")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    inputs = demo.load().tokenizer([p.prompt for p in demo.problems(2, seed=3)], return_tensors="pt", padding=True)
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    ours = hla.enable(model).generate(
        **inputs, max_new_tokens=8, do_sample=False, assistant_model=demo.load().draft, lossy_policy="strict"
    )
    assert torch.equal(expected, ours)
    monkeypatch.setattr(sys, "argv", [str(script), "--hybrid", "--only", "companion", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
