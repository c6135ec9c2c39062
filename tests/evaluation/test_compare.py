"""`hf-lossy compare` on real models: what is measured is what `generate` writes; an interrupted run goes on."""

import copy
import csv
import functools
import json
import os
import re
import shutil
from dataclasses import replace

import accelerate
import pytest
import torch
from support import small
from support.commands import prompts_file
from support.runs import ARMS, a_run
from transformers import CompileConfig

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation import arms, comparison
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.comparison import compare_arms, list_batches, open_run, read_run
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.tasks.base import Problem
from hf_lossy_assist.tasks.math import GSM8K


SHORT = ("compare", "--limit", 2, "--max-new-tokens", 24)


def read(folder):
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    rows = list(csv.DictReader((folder / "summary.csv").read_text().splitlines()))
    return lines, rows, json.loads((folder / "run.json").read_text())


@pytest.mark.nightly
def test_the_demo_alone(hf_lossy, tmp_path, monkeypatch):
    """Every arm of the default and its compiled form; lossless arms write the target's text."""
    monkeypatch.setattr(arms, "CompileConfig", functools.partial(CompileConfig, backend="eager"))
    torch._dynamo.reset()
    done = hf_lossy(*SHORT, "--compile", "--out", tmp_path / "found")
    assert done.code == 0 and "…" not in done.out, done
    rivals = ["assisted γ=5", "assisted γ=5 compiled"] if arms.STATIC_DRAFTS else ["assisted γ=5"]
    policies = [f"{name}{form}" for name in ("strict", "svip", "svip+fallback") for form in ("", " compiled")]
    names = ["target", "target compiled", "prompt lookup γ=5", "assisted", *rivals, *policies]
    lines, rows, record = read(tmp_path / "found")
    assert [row["arm"] for row in rows] == names and list(record["arms"]) == names
    assert all(row["equal"] == "2" and row["judged"] == "2" for row in rows)
    for name in names:
        assert name in done.out
    assert record["found"]["advice"]["1"] in done.out and not record["found"]["left_out"]
    models, problems = hla.demo.load(), hla.demo.problems(2)
    for i, problem in enumerate(problems):
        ids = models.tokenizer(problem.prompt, return_tensors="pt")
        text = models.target.generate(**ids, max_new_tokens=24, do_sample=False)[
            0, ids["input_ids"].shape[1] :
        ].tolist()
        by_arm = {line["arm"]: line for line in lines if line["prompt"] == i}
        assert all(line["token_ids"] == text for line in by_arm.values()) and len(by_arm) == len(names)
        assert len(by_arm["target"]["token_ids"]) == len(text) and by_arm["svip"]["first_token"] > 0
        assert sum(by_arm["strict"]["accept_lengths"]) >= len(text)
    assert hf_lossy(*SHORT, "--out", tmp_path / "found").line.endswith(
        "choose another --out, or delete it to start again"
    )


def test_a_target_on_disk_is_measured_like_another(tmp_path):
    models, prompt = hla.demo.load(), hla.demo.problems(1)[0].prompt
    texts = []
    for offloaded in (False, True):
        target = copy.deepcopy(models.target)
        if offloaded:
            accelerate.disk_offload(target, tmp_path / "weights", torch.device("cpu"))
        writer = TextWriter(target, models.tokenizer, DecodingSettings(max_new_tokens=8))
        made = arms.make_arms(target, models.draft, {"svip": hla.svip()}, tokenizer=models.tokenizer, assisted=False)
        texts += [answer.token_ids for arm in made for answer in writer.write(arm, [prompt], 0, 0)]
    assert len(texts) == 4 and texts[1:] == texts[:1] * 3


@pytest.mark.full
def test_prompts_of_a_file_have_no_right_answers(hf_lossy, tmp_path):
    file = prompts_file(tmp_path, 3)
    found = hf_lossy(
        "compare", "--prompts", file, "--max-new-tokens", 8, "--no-static", "--policies", "svip", "--json"
    ).json
    assert [row["arm"] for row in found["figures"]] == [
        "target",
        "prompt lookup γ=5",
        "assisted",
        "assisted γ=5",
        "svip",
    ]
    assert all(row["right"] is None and row["prompts"] == 3 for row in found["figures"])
    assert list(found["advice"]) == ["1"]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*this policy is lossy")
def test_heads_beside_strict(hf_lossy, tmp_path):
    """On the demo's models a method's bare name takes the demo's head. A folder of any name is written as JSON: not every name can stand in the short form."""
    folder = shutil.copytree(hla.demo.FOLDER / "autojudge_head", tmp_path / "a+b,c=d {e")
    names = ["strict", "autojudge", json.dumps(hla.AutoJudge(hla.Head.from_pretrained(folder), 0.25).to_dict())]
    short = ("--limit", 1, "--max-new-tokens", 64, "--no-static", "--json")
    found = hf_lossy("compare", "--policies", ",".join(names), *short).json["figures"]
    assert [row["arm"] for row in found][-3:] == names
    strict, judged = found[-3], found[-2]
    assert strict["lossless"] and not judged["lossless"]
    assert (strict["right"], strict["judged"]) == (1, 1) and judged["judged"] == 1 and judged["p"] is not None
    pair = ("--model", hla.demo.FOLDER / "target", "--assistant", hla.demo.FOLDER / "draft")
    line = hf_lossy("compare", *pair, "--prompts", prompts_file(tmp_path, 1), "--policies", "autojudge").line
    assert "the method autojudge takes head" in line


@pytest.mark.full
def test_several_drafts_beside_the_same_target(hf_lossy, tmp_path):
    """Each arm names its draft; a draft that refuses a policy is left out with the reason."""
    drafts = ("--assistant", "demo", "--assistant", "exit:1", "--assistant", "suffix", "--drafter", "demo")
    settings = ("--limit", 1, "--max-new-tokens", 6, "--no-static", "--policies", "strict,svip", "--out")
    done = hf_lossy("compare", *drafts, *settings, tmp_path / "found")
    assert done.code == 0, done.err
    lines, rows, record = read(tmp_path / "found")
    by_arm = {row["arm"]: row["draft"] for row in rows}
    names = ["demo", "exit:1", "suffix", "demo (drafter)"]
    assert {arm for arm in by_arm if arm.startswith("strict")} == {f"strict with {name}" for name in names}
    assert not any(by_arm.pop(name) for name in ("target", "prompt lookup γ=5")) and all(
        arm.endswith(f" with {name}") for arm, name in by_arm.items()
    )
    assert {"assisted with demo", "assisted γ=5 with demo", "svip with demo"} < set(by_arm)
    assert all(row["equal"] == row["prompts"] == "1" for row in rows)
    assert record["drafts"] == names and record["draft exit:1"]["num_layers"] == 1
    assert record["arms"]["svip with demo"]["draft"] == "demo" and "draft" not in record
    [why] = {why for arm, why in record["found"]["left_out"].items() if arm == "svip with suffix"}
    assert "ValueError" in why and f"svip with suffix was not measured: {why}" in done.out.replace("\n", " ")
    assert hf_lossy("report", tmp_path / "found", "--out", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "demo-target with demo, exit:1, suffix, demo (drafter); " in " ".join(page.split())
    assert all(arm in page for arm in by_arm)


@pytest.mark.full
def test_a_drafter_is_measured_compiled_and_no_batch_waits_for_the_compiler(hf_lossy, monkeypatch):
    monkeypatch.setattr(arms, "CompileConfig", functools.partial(CompileConfig, backend="eager"))
    torch._dynamo.reset()
    calls, group = [], TextWriter._group
    monkeypatch.setattr(TextWriter, "_group", lambda *args: calls.append(args[1].name) or group(*args))
    options = ("--drafter", "demo", "--policies", "strict", "--max-new-tokens", 8, "--no-static", "--json")
    figures = hf_lossy("compare", *options, "--limit", 1, "--compile").json["figures"]
    names = ["target", "prompt lookup γ=5", "strict", "strict compiled"]
    assert [(row["arm"], row["equal"]) for row in figures] == [(name, 1) for name in names]
    assert calls.count("strict compiled") == calls.count("strict") + 1 == 3  # the first compiled, and is repeated


@pytest.mark.nightly
def test_an_arm_that_cannot_be_compiled_is_left_out(hf_lossy, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no way\nno how")

    monkeypatch.setattr(arms, "CompileConfig", functools.partial(CompileConfig, backend=broken))
    torch._dynamo.reset()
    done = hf_lossy("compare", "--limit", 1, "--max-new-tokens", 4, "--policies", "svip")
    assert done.code == 0 and "target compiled was not measured: " in done.out


def test_a_run_that_goes_on_leaves_out_what_was_left_out_before(tmp_path):
    """Nor is it tried again, where it might work: its figures are of all batches, or there are none."""
    models, prompts = hla.demo.load(), [problem.prompt for problem in hla.demo.problems(2)]
    writer = TextWriter(models.target, models.tokenizer, DecodingSettings(max_new_tokens=3))
    works = arms.make_arms(models.target, models.draft, {}, assisted=False)[0]
    fails = replace(works, name="lame", write=None, optional=True)
    unwanted = replace(fails, write=lambda **_: pytest.fail("it was left out"))
    for other, resume, count in ((fails, False, 1), (unwanted, True, 2)):
        with open_run(tmp_path / "found", {}, resume) as run:
            found = compare_arms(writer, [works, other], prompts, list_batches(count, [1]), run)
        assert list(found.left_out) == ["lame"] and [row.arm for row in found.metrics] == ["target"]
    assert len(found.answers) == 2


def test_what_is_wrong_is_one_line_before_a_model_is_loaded(hf_lossy, monkeypatch):
    monkeypatch.setattr("hf_lossy_assist.artifacts.loading.load_model", None)
    for arguments, message in (
        (("--policies", "svip,,strict"), "expected names of policies with commas between them"),
        (("--policies", "svop"), "unknown policy 'svop'"),
        (("--batch-size", "1,x"), "--batch-size: expected a number, or several with commas between them, got '1,x'"),
        (("--batch-size", "4"), "batches of 4 need as many prompts, and there are 2"),
        (("--batch-size", "0"), "--batch-size"), (("--resume",), "pass its --out"),
        (("--task", "gsm8k"), "needs --data"),
        (("--task", "demo", "--prompts", "x.jsonl"), "--prompts is in place of --task"),
        (("--prompts", "none.jsonl"), "there is no file 'none.jsonl'"),
        (("--prompts", "."), "there is no file '.' (it is a folder)"),
        (("--model", "x", "--task", "demo"), "are for the demo models"), (("--model", "x"), "are for the demo models"),
        (("--temperature", "0.5"), "--do-sample"), (("--assistant", "x", "--assistant", "suffix"), "expected both"),
        (("--assistant", "exit:two"), "--assistant exit:two: expected exit:N with a number of layers"),
    ):  # fmt: skip
        assert message in hf_lossy(*SHORT, *arguments).line, arguments
    pair = ("--model", "a", "--assistant", "b")
    assert "--shots: leave them out" in hf_lossy("compare", "--prompts", "x.jsonl", "--shots", 2, *pair).line
    assert "shots are for the task gsm8k, not demo" in hf_lossy("compare", "--task", "demo", "--shots", 2).line


def test_a_policy_is_not_mixed_up_with_an_arm(hf_lossy, tmp_path, monkeypatch):
    """A folder may have the name of an arm."""
    monkeypatch.chdir(tmp_path)
    hla.as_policy("svip").save_pretrained("target")
    assert "write ./target for the folder" in hf_lossy(*SHORT, "--policies", "target", "--no-static").line


def few_shot(end, by_pattern):
    task = GSM8K([], shots=1)
    task.ends, task.closing = ((), re.compile(re.escape(end))) if by_pattern else ((end,), None)
    return task


@pytest.mark.full
def test_a_task_ends_the_texts_of_all_arms_alike_and_none_writes_on_for_long():
    """Few-shot prompts: behind its answer a model would go on with a question of its own, which counts in an arm's seconds alone."""
    target, words = small.llama(eos_token_id=2), small.tokenizer()
    words.padding_side = "left"
    these = arms.make_arms(target, small.near(target), {"svip": hla.as_policy("svip")}, tokenizer=words)
    prompts, whole = ["w3 w9 w20 w4", "w7 w1 w30", "w11 w2"], TextWriter(target, words, DecodingSettings(max_new_tokens=48))  # fmt: skip
    long = whole.write(these[0], prompts, 0, 0)
    for place, by_pattern in ((4, True), (8, False)):
        end = words.decode(long[0].token_ids[place : place + 2])
        writer = replace(whole, task=few_shot(end, by_pattern))
        for arm in these:
            written = []

            def write(arm=arm, written=written, **settings):
                out = arm.write(**settings)
                written.append(out.sequences.shape[1] - settings["input_ids"].shape[1])
                return out

            [alone] = writer.write(replace(arm, write=write), prompts[:1], 0, 0)
            most = 30 if arm.kind == "assisted" else 0  # of a round
            assert len(alone.token_ids) <= written[-1] <= len(alone.token_ids) + most, (arm.name, place, written)
            assert end in alone.text and len(alone.token_ids) <= place + 2
    found = [[answer.token_ids for answer in writer.write(arm, prompts, 0, 0)] for arm in these]
    assert found == [found[0]] * len(these) and len(found[0][0]) <= 10
    assert all(ids == text.token_ids[: len(ids)] for ids, text in zip(found[0], long, strict=True))
    assert len(set(map(len, found[0]))) > 1, "rows of several lengths: the shorter ones are padded"


def test_a_tokenizer_whose_texts_cannot_be_looked_for_is_refused_in_one_line():
    demo = hla.demo.load()
    writer = TextWriter(
        demo.target, demo.tokenizer, DecodingSettings(max_new_tokens=2), few_shot("\nQuestion:", False)
    )
    [arm] = arms.make_arms(demo.target, demo.draft, {}, assisted=False)
    with pytest.raises(ValueError, match="^stop_strings: Transformers cannot look for texts among the tokens of this"):
        writer.write(arm, ["Tom has 3 boxes"], 0, 0)


# -- the folder of a run ------------------------------------------------------------------------------------------------
ANSWERS = sorted((replace(answer, right=None) for answer in a_run()), key=repr)  # there is no task


class Written:
    """Writes the known answers; `calls`: the units that were written, but for warm-ups."""

    task = None

    def __init__(self):
        self.calls = []

    def write(self, arm, prompts, first, unit):
        self.calls.append((arm.name, first))
        return [answer for answer in a_run() if (answer.arm, answer.prompt) == (arm.name, first)]


def compare_known(out, count, resume=False):
    writer = Written()
    with open_run(out, {"target": {"id": "T"}}, resume) as run:
        found = compare_arms(writer, ARMS, ["a", "b"], list_batches(count, [1]), run)
        if count == 2:
            comparison.finish_run(run, found.metrics)
    return found, writer.calls[len(ARMS) :]


def test_stored_answers_are_there_again(tmp_path):
    compare_known(tmp_path / "found", 1)
    found, calls = compare_known(tmp_path / "found", 2, resume=True)
    assert sorted(found.answers, key=repr) == ANSWERS and {first for _, first in calls} == {1}
    assert sorted(os.listdir(tmp_path / "found")) == ["answers.jsonl", "run.json", "summary.csv"]
    assert os.listdir(tmp_path) == ["found"] and sorted(read_run(tmp_path / "found")[1], key=repr) == ANSWERS


def test_a_run_is_of_its_right_answers_and_heads_too(tmp_path):
    """A data file whose answers were corrected, or a head fitted anew in its folder, makes another run of it."""
    models, head = hla.demo.load(), hla.demo.head()

    def facts(gold, name):
        policies = {"svip": hla.as_policy("svip"), "sprinter": hla.as_policy(f"sprinter:head={name}")}
        arms = make_arms(models.target, models.draft, policies)
        writer = TextWriter(models.target, models.tokenizer, DecodingSettings())
        return comparison.describe_comparison(writer, models.draft, arms, ["a"], "demo", [1], [Problem("a", gold)])

    head.save_pretrained(tmp_path / "head")
    first = facts("7", tmp_path / "head")
    assert facts("7", tmp_path / "head") == first
    assert facts("8", tmp_path / "head")["prompts_sha256"] != first["prompts_sha256"]
    with torch.no_grad():
        next(head.parameters()).add_(1)
    head.save_pretrained(tmp_path / "head")
    other = facts("7", tmp_path / "head")
    assert other["arms"]["svip"] == first["arms"]["svip"] and other["arms"]["sprinter"] != first["arms"]["sprinter"]
