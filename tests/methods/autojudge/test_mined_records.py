"""A mined set's record is checked against the models of the fit, and every token id against their vocabulary."""

import json
import re
import shutil

import pytest
from datasets import load_from_disk
from support.collecting import record
from support.mining import loaded, undisturbed

from hf_lossy_assist.methods.autojudge.dataset import RECORD
from hf_lossy_assist.methods.autojudge.fit import fit_autojudge


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


def test_a_set_that_was_not_changed_goes_on_to_the_split(tmp_path):
    assert "at least 8 are needed" in refusal(changed(tmp_path))


def test_a_set_that_is_small_because_it_was_cut_off_says_so(tmp_path):
    """To mine more is no help there."""
    found = json.loads((undisturbed()[0] / RECORD).read_text())["found"] | {"cut_by_seconds": 3}
    line = refusal(changed(tmp_path, found=found))
    assert line.endswith("mine more; 3 of 6 problems were cut off at --max-seconds: raise it")


def test_other_weights_of_the_same_name_and_sizes_are_refused(tmp_path):
    for role in ("target", "draft"):
        line = refusal(changed(tmp_path / role, **{f"{role}_weights": "0" * 64}))
        assert f"the dataset was made for the {role} demo-{role}" in line
        assert "other weights under the same name" in line


def test_a_record_without_weights_is_of_an_older_version(tmp_path):
    older = {f"{role}_{what}": None for role in ("target", "draft") for what in ("weights", "dtype")}
    assert "at least 8 are needed" in refusal(changed(tmp_path, **older))


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
