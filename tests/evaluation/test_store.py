"""A folder that a comparison is kept in: gone on with where it was left, by one process at a time."""

import os

import pytest
import torch
from support.runs import ARMS, a_run

import hf_lossy_assist as hla
from hf_lossy_assist.evaluation.arms import make_arms
from hf_lossy_assist.evaluation.metrics import compute_metrics
from hf_lossy_assist.evaluation.results import ResultFolder, describe_comparison
from hf_lossy_assist.evaluation.writer import DecodingSettings, TextWriter
from hf_lossy_assist.tasks.base import Problem


FACTS = {"target": {"id": "T"}, "arms": {}}


def begun(out, resume=False):
    store = ResultFolder(out, FACTS, resume)
    for unit in (0, 1):
        if not store.has(1, unit):
            store.add(1, unit, [answer for answer in a_run() if answer.unit == unit])
    return store


def test_stored_answers_are_there_again(tmp_path):
    begun(tmp_path / "found").release()
    store = ResultFolder(tmp_path / "found", FACTS, True)
    assert sorted(store.answers, key=repr) == sorted(a_run(), key=repr) and store.has(1, 1) and not store.has(1, 2)
    store.finish(compute_metrics(store.answers, ARMS))
    assert sorted(os.listdir(tmp_path / "found")) == ["answers.jsonl", "run.json", "summary.csv"]
    assert os.listdir(tmp_path) == ["found"]


def test_a_run_that_is_killed_while_it_finishes_has_lost_nothing(tmp_path, monkeypatch):
    store = begun(tmp_path / "found")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        store.finish(compute_metrics(store.answers, ARMS))
    monkeypatch.undo()
    again = ResultFolder(tmp_path / "found", FACTS, True)
    assert again.has(1, 0) and again.has(1, 1)
    again.finish(compute_metrics(again.answers, ARMS))
    assert (tmp_path / "found" / "answers.jsonl").is_file()


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
