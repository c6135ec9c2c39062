"""A run of mining that could search nothing says why, and so does the fit of what it left."""

import os

import pytest

from hf_lossy_assist.methods.autojudge.dataset import explain_nothing, summarise
from hf_lossy_assist.methods.autojudge.mine import FIRST
from hf_lossy_assist.methods.autojudge.search import Mined


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


CASES = {
    "no answer": (("--max-new-tokens", 4), "2 of 2 problems were not searched: the target's response has no answer that the task finds, 2 were cut short: raise --max-new-tokens"),
    "no time": (("--max-seconds", 1e-9), "2 of 2 problems were cut off at --max-seconds: raise it"),
}  # fmt: skip


@pytest.mark.full(every=4)
@pytest.mark.parametrize(("options", "why"), CASES.values(), ids=CASES)
def test_mining_that_found_nothing_says_why_and_frees_the_name(hf_lossy, tmp_path, options, why):
    out = tmp_path / "mined"
    line = hf_lossy("mine", "--limit", 2, *options, "--out", out).line
    assert line == f"hf-lossy: nothing to fit a judge to, and nothing is written: {why}"
    assert os.listdir(tmp_path) == []
    assert hf_lossy("mine", "--limit", 2, "--out", out).code == 0


@pytest.mark.nightly
@pytest.mark.filterwarnings("default:the first 8 problems")
def test_a_run_that_finds_nothing_says_so_before_its_end(hf_lossy, tmp_path):
    done = hf_lossy("mine", "--limit", FIRST + 1, "--max-seconds", 1e-9, "--out", tmp_path / "mined")
    warning = f"warning: the first {FIRST} problems gave no mismatch: {FIRST} of {FIRST} problems were cut off at --max-seconds: raise it"
    assert done.code == 2 and warning in done.err
    done = hf_lossy("mine", "--limit", FIRST + 1, "--out", tmp_path / "mined")
    assert done.code == 0 and "gave no mismatch" not in done.err
