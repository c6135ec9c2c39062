"""A run of mining that could search nothing says why, and so does the fit of what it left."""

import json

import pytest
from support.fitting import record

from hf_lossy_assist.methods.autojudge.hidden_states import read_mined
from hf_lossy_assist.methods.autojudge.mined import RECORD, summary, unanswered, why_nothing
from hf_lossy_assist.methods.autojudge.search import Mined


def mined(length, answer=None):
    return Mined(0, "p", [1], [5] * length, [5] * length, answer)


def facts(problems=4, **found):
    return {"problems": problems, "found": found}


def test_responses_that_were_cut_are_counted_apart():
    found = summary([mined(8), mined(8, "3"), mined(7), mined(8)], 8)
    assert (found["problems_without_answer"], found["cut_without_answer"]) == (3, 2)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            {"problems_without_answer": 4, "cut_without_answer": 4},
            "4 of 4 problems were not searched: the target's response has no answer, and 4 were cut short: raise --max-new-tokens",
        ),
        (
            {"problems_without_answer": 4, "cut_without_answer": 0},
            "4 of 4 problems were not searched: the target's response has no answer that the task finds, and none was cut: ask for its form "
            "in the prompts (--chat, --shots)",
        ),
        (
            {"problems_without_answer": 4},  # a dataset of version 0.1.0
            "4 of 4 problems were not searched: the target's response has no answer: raise --max-new-tokens, if they were cut",
        ),
        (
            {"problems_without_answer": 1, "cut_without_answer": 1},
            "1 of 4 problems were not searched: the target's response has no answer, and 1 were cut short: raise --max-new-tokens; of the "
            "others the draft guessed every token as the target does",
        ),
        (
            {"problems_without_answer": 0, "cut_without_answer": 0},
            "the draft guessed every token of 4 problems as the target does: mine more or harder problems, or take a weaker draft",
        ),
    ],
)
def test_the_cause_of_an_empty_dataset(found, says):
    assert why_nothing(facts(**found)) == says
    assert (unanswered(facts(**found)) is None) == (found["problems_without_answer"] == 0)


@pytest.mark.parametrize("found", [None, [], {"problems_without_answer": "4"}, {"problems_without_answer": True}])
def test_a_record_that_says_something_else_gives_no_other_error(found):
    assert why_nothing({"problems": 4, "found": found}).startswith("the draft guessed every token of 4 problems")


def test_mine_and_fit_name_the_cause(hf_lossy, tmp_path):
    """Four tokens are no answer to a word problem."""
    out = tmp_path / "mined"
    line = hf_lossy("mine", "--limit", 2, "--max-new-tokens", 4, "--out", out).line
    why = "2 of 2 problems were not searched: the target's response has no answer, and 2 were cut short: raise --max-new-tokens"
    assert line == f"hf-lossy: {out} holds nothing to fit a judge to: {why}, and choose another --out"
    assert "| 2, 2 of them cut short |" in (out / "README.md").read_text()
    assert (
        hf_lossy("fit", "autojudge", out, "--out", tmp_path / "judge").line
        == f"hf-lossy: {out} has no mismatch: {why}"
    )
    record(out, RECORD, {**json.loads((out / RECORD).read_text()), "found": {}})
    with pytest.raises(ValueError, match="has no mismatch: the draft guessed every token of 2 problems"):
        read_mined(out)
    assert not (tmp_path / "judge").exists()
