"""Mining on models whose recurrent states cannot go back: what it finds is what plain forwards and `generate` say, and a judge is fitted to it."""

from functools import cache

import pytest
import torch
from support import hybrids, small

import hf_lossy_assist as hla
from hf_lossy_assist.methods.autojudge.classifiers import JudgeSettings
from hf_lossy_assist.methods.autojudge.fit import fit_autojudge
from hf_lossy_assist.methods.autojudge.mine import MineSettings, mine, mine_problems
from hf_lossy_assist.tasks.load import DemoTask


KINDS = ["qwen3_5_text", "falcon_h1", "kimi_linear"]
NEW, COUNT = 24, 6
SETTINGS = MineSettings(NEW)


class Words(DemoTask):
    """The answer of a response is a coin that its last characters flip: some changes keep it."""

    def extract(self, problem, response):
        return ["many", "few"][sum(map(ord, response[-9:])) % 2]

    def same(self, problem, reference, answer):
        return reference == answer


TASK = Words("calibration", 0)


@cache
def pair(kind):
    target = hybrids.few_token_model(kind, len(tokenizer()))
    return target, small.near(target, 0.1)


def tokenizer():
    return hla.demo.load().tokenizer


@cache
def found(kind, count=COUNT, batch_size=3):
    mined = mine_problems(*pair(kind), tokenizer(), TASK, TASK.problems(count), SETTINGS, batch_size=batch_size)
    return sorted(mined, key=lambda one: one.problem)


@pytest.mark.full
@pytest.mark.nightly(every=12)
@pytest.mark.parametrize("kind", KINDS)
def test_the_labels_are_what_generate_says(kind):
    for one in found(kind):
        for mismatch in one.mismatches:
            text = one.prompt_ids + one.response[: mismatch.position] + [mismatch.draft_token]
            left = NEW - mismatch.position - 1
            if left:
                ids = torch.tensor([text])
                text = pair(kind)[0].generate(ids, max_new_tokens=left, do_sample=False)[0].tolist()
            response = tokenizer().decode(text[len(one.prompt_ids) :], skip_special_tokens=True)
            assert TASK.extract(None, response) == mismatch.answer
            assert mismatch.important == (mismatch.answer != one.target_answer)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*this policy is lossy:UserWarning")
def test_a_judge_is_fitted_and_decides(tmp_path):
    target, draft = pair("qwen3_5_text")
    words = target, draft, tokenizer()
    mine(*words, TASK, TASK.problems(12), tmp_path / "data", SETTINGS, batch_size=4, source="words")
    head, report = fit_autojudge(tmp_path / "data", tmp_path / "judge", *words, JudgeSettings(folds=0))
    assert 0 <= report.auroc <= 1
    inputs = tokenizer()([problem.prompt for problem in TASK.problems(3)], return_tensors="pt", padding=True)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    hla.enable(target)
    expected = target.generate(**inputs, **settings)
    settings |= {"assistant_model": draft, "return_dict_in_generate": True}
    strict = target.generate(**inputs, **settings, lossy_policy=hla.AutoJudge(head, 0.0))
    lossy = target.generate(**inputs, **settings, lossy_policy=hla.AutoJudge(head, 1.0))
    assert torch.equal(strict.sequences, expected) and not torch.equal(lossy.sequences, expected)
