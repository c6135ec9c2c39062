"""A folder that a comparison is kept in: gone on with where it was left, by one process at a time."""

import os
from dataclasses import replace

import torch
from support.runs import ARMS, a_run

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.comparison import (
    compare_arms,
    describe_comparison,
    finish_run,
    list_batches,
    open_run,
    read_run,
)
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.tasks.base import Problem


ANSWERS = sorted((replace(answer, right=None) for answer in a_run()), key=repr)  # there is no task


class Written:
    """Writes the known answers; `calls`: the units that were written, but for warm-ups."""

    task = None

    def __init__(self):
        self.calls = []

    def write(self, arm, prompts, first, unit):
        self.calls.append((arm.name, first))
        return [answer for answer in a_run() if (answer.arm, answer.prompt) == (arm.name, first)]


def compare(out, count, resume=False):
    writer = Written()
    with open_run(out, {"target": {"id": "T"}}, resume) as run:
        found = compare_arms(writer, ARMS, ["a", "b"], list_batches(count, [1]), run)
        if count == 2:
            finish_run(run, found.metrics)
    return found, writer.calls[len(ARMS) :]


def test_stored_answers_are_there_again(tmp_path):
    compare(tmp_path / "found", 1)
    found, calls = compare(tmp_path / "found", 2, resume=True)
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
        return describe_comparison(writer, models.draft, arms, ["a"], "demo", [1], [Problem("a", gold)])

    head.save_pretrained(tmp_path / "head")
    first = facts("7", tmp_path / "head")
    assert facts("7", tmp_path / "head") == first
    assert facts("8", tmp_path / "head")["prompts_sha256"] != first["prompts_sha256"]
    with torch.no_grad():
        next(head.parameters()).add_(1)
    head.save_pretrained(tmp_path / "head")
    other = facts("7", tmp_path / "head")
    assert other["arms"]["svip"] == first["arms"]["svip"] and other["arms"]["sprinter"] != first["arms"]["sprinter"]
