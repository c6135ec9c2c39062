"""Proves what a mined dataset says with plain forwards and `generate`, that the batch does not change it, and that a fit checks its record."""

import json
import math
import os
import re
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Value, load_from_disk
from support import eagle, small
from support.collecting import record
from support.commands import DEMO
from support.hub_server import card_problems
from support.mining import COUNT, NEW, SETTINGS, SOURCE, TASK, found, loaded, local, undisturbed
from support.refusals import refused
from transformers import RwkvConfig, RwkvForCausalLM

from hf_lossy_assist import AutoJudge, Head, LossyPolicy
from hf_lossy_assist.methods.autojudge.dataset import RECORD, explain_nothing, summarise
from hf_lossy_assist.methods.autojudge.fit import fit_autojudge
from hf_lossy_assist.methods.autojudge.mine import FIRST, MineSettings, mine
from hf_lossy_assist.methods.autojudge.search import Mined
from hf_lossy_assist.tasks.base import AnswerTask, Problem
from hf_lossy_assist.tasks.load import DemoTask


# -- what the labels mean -----------------------------------------------------------------------------------------------


def answers(texts: list[list[int]], starts: list[int], model: Any) -> list[str | None]:
    """The answer of each text after `generate` went on with it; `starts`: where its response begins."""
    m = loaded()
    width, out = max(map(len, texts)), []
    ids = torch.tensor([[0] * (width - len(t)) + t for t in texts])
    mask = torch.tensor([[0] * (width - len(t)) + [1] * len(t) for t in texts])
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for row, text, start in zip(whole.tolist(), texts, starts, strict=True):
        new = row[width - len(text) + start :][:NEW]
        out.append(TASK.extract(Problem(""), m.tokenizer.decode(new, skip_special_tokens=True)))
    return out


@pytest.mark.full
@torch.no_grad()
def test_the_labels_are_what_generate_says():
    """And they are of every place where the two models differ: the response has the target's token if important, else the draft's."""
    m, rows = loaded(), [(one, mismatch) for one in local() for mismatch in one.mismatches]
    prompts = [len(one.prompt_ids) for one, _ in rows]
    texts = [one.prompt_ids + one.response[: x.position] + [x.draft_token] for one, x in rows]
    for (one, mismatch), answer in zip(rows, answers(texts, prompts, m.target), strict=True):
        assert answer == mismatch.answer and mismatch.important == (answer != one.target_answer)
    for one in local():
        ids, start = torch.tensor([one.prompt_ids + one.response]), len(one.prompt_ids)
        p, q = (model(ids).logits[0, start - 1 : -1].argmax(-1).tolist() for model in (m.target, m.draft))
        labels = {x.position: x for x in one.mismatches}
        assert [t for t in range(len(p)) if p[t] != q[t]] == sorted(labels)
        for t, token in enumerate(one.response):
            assert token == (p[t] if t not in labels or labels[t].important else q[t])


@pytest.mark.full
def test_the_batch_decides_the_speed_alone():
    assert found(None, TASK.problems(4), batch_size=3) == local()[:4]


@pytest.mark.full
def test_caps():
    for one, full in zip(found(None, TASK.problems(3), replace(SETTINGS, max_mismatches=2)), local()[:3], strict=True):
        assert one.mismatches == full.mismatches[:2]
        assert one.cut == ("mismatches" if len(full.mismatches) > 2 else None)
    [late] = found(None, TASK.problems(1), replace(SETTINGS, max_seconds=0.0))
    assert late.cut == "seconds" and not late.mismatches


class Slow(DemoTask):
    """Its answers are worked out in threads, which take their time."""

    slow = True

    def extract(self, problem: Problem, response: str) -> str | None:
        time.sleep(0.001 * (len(response) % 7))
        return super().extract(problem, response)


@pytest.mark.full
def test_answers_worked_out_in_threads():
    assert found(None, TASK.problems(3), task=Slow("calibration"), batch_size=2, workers=2) == local()[:3]


def test_the_dataset_says_what_was_found():
    mined = undisturbed()[0]
    data, facts = load_from_disk(str(mined)), json.loads((mined / RECORD).read_text())
    card, m = (mined / "README.md").read_text(), loaded()
    assert data.features["important"] == Value("bool") and data.features["prompt_ids"].feature == Value("int32")
    want = [
        {
            "problem": one.problem, "prompt": problem.prompt, "prompt_ids": m.tokenizer(problem.prompt)["input_ids"],
            "response": m.tokenizer.decode(one.response, skip_special_tokens=True), "response_ids": one.response,
            "position": x.position, "target_token": x.target_token, "draft_token": x.draft_token,
            "important": x.important, "target_answer": one.target_answer, "answer": x.answer,
        }
        for one, problem in zip(local(), TASK.problems(COUNT), strict=True) for x in one.mismatches
    ]  # fmt: skip
    assert data.to_list() == want and len(data.column_names) == 11
    important = sum(row["important"] for row in want)
    assert facts["found"] == {
        "mismatches": len(want), "important": important, "no_answer": sum(row["answer"] is None for row in want),
        "problems_without_answer": 0, "cut_without_answer": 0, "cut_by_mismatches": 0, "cut_by_seconds": 0,
        "continuations": sum(one.continuations for one in local()), "target_tokens": sum(one.new_tokens for one in local()),
    }  # fmt: skip
    assert facts["settings"]["max_new_tokens"] == NEW and facts["problems"] == COUNT and facts["task"] == "demo"
    assert card_problems(card) == ([], [])
    assert f"| mismatches | {len(want)} |" in card
    assert f"| important | {important} ({100 * important / len(want):.1f} %) |" in card
    assert f"{len(want)} mismatches of {COUNT} problems, task demo ({SOURCE})" in card


class Last(AnswerTask):
    """The last word of a response is its answer; `without`: no answer for this one."""

    name = "last"

    def __init__(self, *prompts: str, without: str = ""):
        self.prompts, self.without = prompts, without

    def problems(self, limit: int | None = None) -> list[Problem]:
        return [Problem(prompt) for prompt in self.prompts]

    def extract(self, problem: Problem, response: str) -> str | None:
        return None if problem.prompt == self.without else response.split()[-1]

    def same(self, problem: Problem, reference: str, answer: str) -> bool:
        return reference == answer


def mine_small(out: Path, task: Any, settings: MineSettings | None = None, draft: Any = None, **options: Any) -> Path:
    target = small.llama()
    draft = draft or small.near(target, 0.3)
    return mine(target, draft, small.tokenizer(), task, task.problems(), out, settings or MineSettings(8), **options)


def test_what_is_cut_and_what_has_no_answer_is_counted(tmp_path):
    task = Last("w1 w2", "w3", "w4 w5 w6", without="w3")
    whole = json.loads((mine_small(tmp_path / "whole", task) / RECORD).read_text())["found"]
    assert whole["problems_without_answer"] == 1 and whole["mismatches"] > 4
    out = mine_small(tmp_path / "cut", task, MineSettings(8, max_mismatches=1))
    facts = json.loads((out / RECORD).read_text())["found"]
    assert (facts["mismatches"], facts["cut_by_mismatches"], facts["cut_by_seconds"]) == (2, 2, 0)
    assert "cap on mismatches, on time | 2, 0 |" in (out / "README.md").read_text()
    assert {row["problem"] for row in load_from_disk(str(out))} == {0, 2}
    out = mine_small(tmp_path / "late", task, MineSettings(8, max_seconds=0.0))
    facts = json.loads((out / RECORD).read_text())["found"]
    assert (facts["mismatches"], facts["cut_by_seconds"]) == (0, 2)


def test_a_draft_that_never_differs_and_every_character_of_prompts(tmp_path):
    out = mine_small(tmp_path / "same", Last("w1 w2", "w3"), draft=small.llama())
    data = load_from_disk(str(out))
    assert len(data) == 0 and "position" in data.column_names
    assert json.loads((out / RECORD).read_text())["found"]["mismatches"] == 0
    prompts = ("w1\u2028w2", "w3\u0085 w4 „é” \U0001f600", "w5\x1c\r\n w6")
    out = mine_small(tmp_path / "data", Last(*prompts))
    assert {row["prompt"] for row in load_from_disk(str(out))} == set(prompts)


@pytest.mark.parametrize(("broken", "value"), [("target", math.inf), ("draft", math.nan)])
def test_logits_of_which_no_choice_can_be_made(tmp_path, broken, value):
    """The argmax of NaN is a token, too, and would become a label."""
    models = {"target": small.llama(), "draft": small.near(small.llama(), 0.3)}
    with torch.no_grad():
        models[broken].lm_head.weight[5] = value
    task, settings = Last("w1 w2"), MineSettings(8)
    given = models["target"], models["draft"], small.tokenizer(), task, task.problems(), tmp_path / "data", settings
    refused(lambda: mine(*given), f"the {broken} model gave NaN or infinite logits in prompt 0, after 0 new tokens")


def test_what_cannot_be_mined_is_refused_before_anything_is_written(tmp_path):
    sizes = {"vocab_size": small.VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 64}
    rwkv, t5, target, task = RwkvForCausalLM(RwkvConfig(**sizes)), small.t5(), small.llama(), Last("w1 w2")
    long = {
        "rope_type": "longrope", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 7,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    }  # fmt: skip
    cases: list[tuple[str, Any, Any, Any, dict]] = [
        ("no problems", target, target, Last(), {}), ("draft", target, t5, task, {}),
        ("draft", target, rwkv, task, {}), ("target", rwkv, target, task, {}), ("target", t5, target, task, {}),
        ("empty prompt", target, target, Last(""), {}), ("batch_size", target, target, task, {"batch_size": 0}),
        ("workers", target, target, task, {"workers": 0}),
        ("the target has 256 positions", target, target, task, {"settings": MineSettings(400)}),
        ("the target's tokenizer", target, small.llama(vocab=2 * small.VOCAB), task, {}),
        ("the target has another RoPE after 7 tokens", small.llama(rope_parameters=long), target, task, {}),
        ("needs a draft model", target, eagle.drafter(target), task, {}),
    ]  # fmt: skip
    for says, target_, draft, given, options in cases:
        args = target_, draft, small.tokenizer(), given, given.problems(), tmp_path / "data"
        refused(partial(mine, *args, **{"settings": MineSettings(8)} | options), says)
        assert list(tmp_path.iterdir()) == [], says


# -- the record, which a fit checks -------------------------------------------------------------------------------------


def refusal(folder, **models):
    """The line that a fit refuses a set with."""
    m = loaded()
    with pytest.raises(ValueError) as error:
        fit_autojudge(folder, folder.parent / "judge", models.get("target", m.target), m.draft, m.tokenizer)
    assert "\n" not in str(error.value) and not (folder.parent / "judge").exists()
    return str(error.value)


def changed(where, change=lambda row: row, **facts):
    """A copy of a mined set, with rows and record changed."""
    mined, out = undisturbed()[0], where / "mined"
    load_from_disk(str(mined)).map(change, load_from_cache_file=False).save_to_disk(str(out))
    shutil.copy(mined / "README.md", out)
    record(out, RECORD, json.loads((mined / RECORD).read_text()) | facts)
    return out


def test_a_sets_record_is_that_of_the_models(tmp_path):
    """A set that was not changed goes on to the split, and so does one of an older version, without hashes of the weights."""
    older = {f"{role}_{what}": None for role in ("target", "draft") for what in ("weights", "dtype")}
    for number, facts in enumerate(({}, older)):
        assert "at least 8 are needed" in refusal(changed(tmp_path / str(number), **facts))
    cut = json.loads((undisturbed()[0] / RECORD).read_text())["found"] | {"cut_by_seconds": 3}
    line = refusal(changed(tmp_path / "cut", found=cut))  # to mine more is no help there
    assert line.endswith("mine more; 3 of 6 problems were cut off at --max-seconds: raise it")
    for role in ("target", "draft"):
        line = refusal(changed(tmp_path / role, **{f"{role}_weights": "0" * 64}))
        assert f"made for the {role} demo-{role}" in line and "other weights under the same name" in line


@pytest.mark.parametrize("beyond", [False, True])
def test_a_token_id_that_no_vocabulary_has_is_refused(tmp_path, beyond):
    token = loaded().target.config.vocab_size if beyond else -1
    for column in ("prompt_ids", "response_ids", "target_token", "draft_token"):

        def change(row, column=column):
            if isinstance(row[column], list):
                return row | {column: [*row[column], token]}
            elsewhere = row["response_ids"][row["position"]] != row[column]  # the response is to hold one of the two
            return row | {column: token} if elsewhere else row

        line = refusal(changed(tmp_path / column, change))
        assert re.search(rf"the dataset has the token id {token}, expected 0 to \d+: mine it again", line)


def mined(length, answer=None):
    return Mined(0, "p", [1], [5] * length, [5] * length, answer)


def test_responses_that_were_cut_are_counted_apart():
    found = summarise([mined(8), mined(8, "3"), mined(7), mined(8)], 8)
    assert (found["problems_without_answer"], found["cut_without_answer"]) == (3, 2)


UNSEARCHED = "of 4 problems were not searched: the target's response has no answer that the task finds"
LATE = "of 4 problems were cut off at --max-seconds: raise it"
CAUSES = (
    ((4, 4), f"4 {UNSEARCHED}, 4 were cut short: raise --max-new-tokens"),
    ((4, 0), f"4 {UNSEARCHED}, 0 were cut short: ask for its form in the prompts (--chat, --shots)"),
    ((1, 1, 2), f"1 {UNSEARCHED}, 1 were cut short: raise --max-new-tokens; 2 {LATE}"),
    ((0, 0, 4), f"4 {LATE}"),
    ((0, 0), "the draft guessed every token of 4 problems as the target does: mine more or harder problems, or take a "
             "weaker draft"),
)  # fmt: skip


def test_the_cause_of_an_empty_dataset():
    for counts, says in CAUSES:
        names = ("problems_without_answer", "cut_without_answer", "cut_by_seconds")
        assert explain_nothing({"problems": 4, "found": dict(zip(names, counts, strict=False))}) == says


@pytest.mark.full
@pytest.mark.filterwarnings("default:the first 8 problems")
def test_mining_that_found_nothing_says_why_and_frees_the_name(hf_lossy, tmp_path):
    """After the first problems already, before its end."""
    for count, options, why in (
        (2, ("--max-new-tokens", 4), f"2 {UNSEARCHED}, 2 were cut short: raise --max-new-tokens"),
        (FIRST + 1, ("--max-seconds", 1e-9), f"{FIRST + 1} {LATE}"),
    ):
        done = hf_lossy("mine", "--limit", count, *options, "--out", tmp_path / "mined")
        expected = f"hf-lossy: nothing to fit a judge to, and nothing is written: {why}"
        assert done.line == expected.replace("of 4", f"of {count}") and os.listdir(tmp_path) == []
        warning = f"warning: the first {FIRST} problems gave no mismatch: {FIRST} of {FIRST} problems were cut off at --max-seconds: raise it"
        assert (warning in done.err) == (count > FIRST)
    done = hf_lossy("mine", "--limit", 2, "--out", tmp_path / "mined")
    assert done.code == 0 and "gave no mismatch" not in done.err


# -- from the command line, with a Hub on loopback ----------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*policy is lossy:UserWarning")
def test_mine_fit_generate_push_pull(hf_lossy, hub, tmp_path):
    mined = tmp_path / "mined"
    assert hf_lossy("mine", "--task", "demo", "--limit", 12, "--batch-size", 12, "--out", mined).code == 0
    facts = json.loads((mined / RECORD).read_text())
    found = facts["found"]
    assert facts["settings"]["max_new_tokens"] == 96 and facts["problems"] == 12
    assert 0 < found["important"] < found["mismatches"] == len(load_from_disk(str(mined)))
    assert card_problems((mined / "README.md").read_text()) == ([], [])

    head = tmp_path / "judge"
    fitted = hf_lossy("fit", "autojudge", mined, "--out", head, "--folds", 3)
    assert fitted.code == 0 and "…" not in fitted.out, fitted
    assert "AUROC" in fitted.out and "of the important tokens" in fitted.out
    last = f"see which answers it changes: hf-lossy compare --task demo --policies svip,{head}"
    assert fitted.out.splitlines()[-1] == last
    assert Head.from_pretrained(head).config.polarity == "important"

    policy = f"autojudge:head={head},threshold=0.9,window=8"
    lossy = hf_lossy("generate", "--max-new-tokens", 40, "--json", "--seed", 3, "--policy", policy).json
    assert lossy["policy"]["rule"] == {"name": "judge", "head": str(head), "threshold": 0.9}
    assert lossy["policy"]["stop"] == {"name": "constant", "gamma": 8}
    assert lossy["speculation"]["lossless"] is False and lossy["speculation"]["num_lossy_accepts"] > 0

    for folder, repo in ((head, "org/judge"), (mined, "org/mined")):
        url = hf_lossy("push", folder, repo)
        assert url.code == 0 and hub.url in url.out, url
    pulled = hf_lossy("pull", "datasets/org/mined", "--out", tmp_path / "back")
    assert pulled.code == 0, pulled.err
    assert load_from_disk(str(tmp_path / "back")).to_list() == load_from_disk(str(mined)).to_list()
    assert LossyPolicy.from_pretrained("org/judge") == AutoJudge(Head.from_pretrained("org/judge"))


@pytest.mark.full
def test_wrong_uses(hf_lossy, tmp_path):
    out, file, mined = ("--out", tmp_path / "x"), tmp_path / "file.jsonl", undisturbed()[0]
    file.write_text('{"question": "1 + 1?"}\n')
    for arguments, words in (
        (("--task", "gsm"), "'gsm8k'"),
        (("--task", "gsm8k"), "--data"),
        (("--task", "gsm8k", "--data", tmp_path / "none.jsonl"), "none.jsonl"),
        (("--task", "gsm8k", "--data", file, *DEMO), "line 1"),
        (("--task", "code", "--data", file, *DEMO), "--allow-code-execution"),
        (("--task", "gsm8k", "--data", file, *DEMO, "--allow-code-execution"), "runs no programs"),
        (("--task", "demo", *DEMO), "demo models"),
        (("--model", "m"), "for the demo models"),
        (("--drafter", "demo"), "needs a draft model"),
        (("--max-new-tokens", 400), "positions: choose fewer new tokens"),
    ):
        line = hf_lossy("mine", *arguments, *out).line
        assert words in line, line
    assert not list(tmp_path.glob("x*"))

    for arguments, words in (
        ((tmp_path,), "mine.json"),
        ((mined, "--model", DEMO[3], "--assistant", DEMO[3]), "hidden_size"),
        ((mined, "--features", "companion"), "companion"),
        ((mined, "--recall", 2), "recall"),
    ):
        line = hf_lossy("fit", "autojudge", *arguments, *out).line
        assert words in line, line
    assert not list(Path(tmp_path).glob("x*"))
